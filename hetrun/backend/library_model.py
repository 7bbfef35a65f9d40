"""What a backend offers that runs models as a whole: a library with a memory and a mind of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetrun.graph.quant import QuantType
from hetrun.system.file_identity import Stamp

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WholeSetup:
    """How a library is to run a model as a whole."""

    context: int  # tokens of a sequence
    sequences: int  # of that length side by side; one more may be there for a moment
    threads: int
    ubatch: int  # most tokens of a run
    wanted: int  # most wanted rows of a run
    kv_quant: QuantType


class WholeRunner(Protocol):
    """A model inside a library that does everything itself: weights, keys and values, and what runs where.

    Sequences are numbered from 0 to `WholeSetup.sequences`.
    """

    n_vocab: int
    native_seconds: float

    def run(self, tokens: Ints, positions: Ints, sequences: Ints, wanted: NDArray[np.bool_]) -> Floats:
        """Take tokens in; the logits of the wanted ones, in order, good until the next run.

        After an error it is unknown what was taken in, until `recover` and `cut` have been called.
        """
        ...

    def recover(self) -> bool:
        """After an error: whether sequences still hold what they held. If not, all of them are empty now."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Let an empty sequence hold what another one holds."""
        ...

    def cut(self, seq: int, n: int) -> bool:
        """Forget all but n tokens; False: it cannot be cut there, and is empty now."""
        ...

    def cancel(self) -> None:
        """End the run that is going on, from any thread; it raises Cancelled."""
        ...

    def rearm(self) -> None:
        """Forget a cancel, so that the next run runs."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@dataclass(frozen=True, slots=True)
class LibraryBackend:
    """A backend that runs a model as a whole, and what it cannot promise then.

    It opens the parts of a model's file by path; they must be those that have these stamps. `look` has it
    read the header, without weights, and refuses what it does not know.
    """

    open: Callable[[Mapping[str, Stamp], WholeSetup, Callable[[float], None] | None], WholeRunner]
    promises_off: tuple[str, ...]
    look: Callable[[Mapping[str, Stamp]], None] = lambda files: None
