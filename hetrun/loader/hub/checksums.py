"""Checksums that are known without asking anybody: caches name a downloaded file by its sha256."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hetrun.errors import ModelFileError

HUB, OLLAMA = re.compile(r"[0-9a-f]{64}"), re.compile(r"sha256[-:]([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class ExpectedChecksum:
    """The sha256 that a file should have, and who says so."""

    sha256: str
    store: str

    def compare(self, path: str, sha256: str) -> None:
        """Raise if the file has another one."""
        if sha256 != self.sha256:
            raise ModelFileError(
                path,
                f"its sha256 is {sha256}, but {self.store} downloaded it as {self.sha256}: bytes of it were "
                "changed or lost; remove it and download it again",
            )


def expected(path: str) -> ExpectedChecksum | None:
    """What the name of a file in the cache of Hugging Face or Ollama says, also through links."""
    folder, name = os.path.split(os.path.realpath(path))
    if os.path.basename(folder) != "blobs":
        return None
    if HUB.fullmatch(name):
        return ExpectedChecksum(name, "Hugging Face's cache")
    match = OLLAMA.fullmatch(name)
    return ExpectedChecksum(match[1], "Ollama") if match else None
