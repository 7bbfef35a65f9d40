"""Files that a repacking in place has not finished: their names, and what opening them says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_SOURCE, _TARGET, _JOURNAL = ".repacking", ".repacked", ".repack-journal"


@dataclass(frozen=True, slots=True)
class Names:
    """Of one model while it is repacked in place."""

    model: Path

    @property
    def source(self) -> Path:
        """What is left of the old file."""
        return self._with(_SOURCE)

    @property
    def target(self) -> Path:
        """What there is of the new file."""
        return self._with(_TARGET)

    @property
    def journal(self) -> Path:
        """How far it has come."""
        return self._with(_JOURNAL)

    def _with(self, suffix: str) -> Path:
        return Path(f"{self.model}{suffix}")


def reason_against(path: Path) -> str | None:
    """Why a file must not be opened: it is, or would be, half repacked."""
    model = path.with_suffix("") if path.suffix in (_SOURCE, _TARGET) else path
    names = Names(model)
    if model == path and (os.path.exists(path) or not os.path.exists(names.source)):
        return None
    return f"is only partly repacked: `hetrun repack --in-place {model}` finishes it"
