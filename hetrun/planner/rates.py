"""Tokens per second that a plan promises, and what that rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetrun.system.units import format_bytes

SHORT = 256  # tokens of a short text: prompt and answer of a question


@dataclass(frozen=True, slots=True)
class Residence:
    """How much of the weights is in memory, and what each token reads of the others, in bytes."""

    total: int
    short: int  # in memory while texts are short
    full: int  # beside the keys and values of a full context
    read: int = 0  # by each token of a short text
    read_full: int = 0

    @property
    def words(self) -> str:
        """For people."""
        if self.full >= self.total:
            return f"all {format_bytes(self.total)} in memory"
        short = f"{format_bytes(self.short)} of {format_bytes(self.total)}"
        said = f"{short} in memory, {format_bytes(self.read)} read for each token"
        if self.short == self.full:
            return said
        return (
            f"{said}; in a full context {format_bytes(self.full)} in memory, "
            f"{format_bytes(self.read_full)} read"
        )


Basis = Literal["measured", "partly measured", "predicted", "unknown"]
WORDS: dict[Basis, str] = {
    "measured": "from times measured on this machine",
    "partly measured": "answers from times measured on this machine, prompts predicted",
    "predicted": "predicted: it has not run like this here yet",
}


@dataclass(frozen=True, slots=True)
class TokenRates:
    """Tokens per second; None: unknown."""

    prompts: float | None = None  # in passes of the most tokens
    answers: float | None = None  # in a short text
    full: float | None = None  # at the end of a full context
    basis: Basis = "unknown"

    @property
    def words(self) -> str:
        """For people."""
        rates = {"prompts": self.prompts, "answers": self.answers, "in a full context": self.full}
        known = [f"{name} {_figures(rate)}" for name, rate in rates.items() if rate]
        if self.basis == "unknown" or not known:
            return "unknown until it has been measured: the first run does that"
        known[0] += " tokens/s"
        return f"{', '.join(known)} ({WORDS[self.basis]})"


def _figures(rate: float) -> str:
    """Three figures, and no more than tenths."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
