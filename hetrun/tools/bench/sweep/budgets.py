"""Budgets as they are typed: `1GiB,2GiB,50%`. Several are a sweep, and so is a share of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetrun.errors import OptionError
from hetrun.option_types import parse_size
from hetrun.system.units import format_bytes
from hetrun.tools.bench.cases import OUTPUTS, BenchCase

FLAG = "--ram"
BESIDE = 300 << 20  # bytes: what a share of the model leaves for everything that is not weights
MOST_PERCENT = 1000.0
DEPTH = 32  # tokens that were seen, unless it is said: long prompts take long where weights come from disk


@dataclass(frozen=True, slots=True)
class SweepBudget:
    """A number of bytes, or a share of the model's."""

    nbytes: int = 0
    percent: float | None = None  # of the model's bytes; what is not weights comes on top

    def of(self, model_bytes: int) -> int:
        """In bytes, for a model of that size."""
        if self.percent is None:
            return self.nbytes
        return round(self.percent / 100 * model_bytes) + BESIDE

    @property
    def name(self) -> str:
        """As short as it was typed: `50%`, `2.0 GiB`."""
        return format_bytes(self.nbytes) if self.percent is None else f"{self.percent:g}%"


def is_sweep(text: str) -> bool:
    """Whether it asks for more than one budget, or for one that only the model's size makes a number."""
    return "," in text or "%" in text


def budgets(text: str) -> tuple[SweepBudget, ...]:
    """Of a list with commas; each once, in the order in which they were typed."""
    found = [_budget(part.strip()) for part in text.split(",") if part.strip()]
    if not found:
        raise OptionError(f"{FLAG} must be budgets such as 1GiB,2GiB,50%, not {text!r}")
    return tuple(dict.fromkeys(found))


def _budget(text: str) -> SweepBudget:
    if not text.endswith("%"):
        return SweepBudget(parse_size(text, FLAG))
    try:
        percent = float(text[:-1])
    except ValueError:
        percent = 0.0
    if not 0 < percent <= MOST_PERCENT:  # also what is no number
        raise OptionError(f"a share in {FLAG} must be more than 0% and at most {MOST_PERCENT:g}%, not {text}")
    return SweepBudget(percent=percent)


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What `hetrun bench --ram 1GiB,2GiB,...` was asked to measure: one case in each budget."""

    budgets: tuple[SweepBudget, ...]
    generate: int = 64  # -n: at most; a sample ends earlier where a token takes long
    depth: int = DEPTH  # -d
    batch: int = 1  # -b
    rounds: int = 5  # -r
    vs: str | None = None
    output: str = "table"
    vs_threads: int | None = None
    picture: Path | None = None  # a file of SVG
    text: Path | None = None  # that is read and written in place of random tokens
    control: bool = True  # whether a run with all weights in memory comes first, where there is room

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise OptionError(f"-o must be one of {', '.join(OUTPUTS)}, not {self.output!r}")
        if self.rounds < 1:
            raise OptionError(f"-r must be 1 or more, not {self.rounds}")
        if self.generate < 2:
            raise OptionError("a sweep measures answers: -n must be 2 or more")
        if self.vs_threads is not None and self.vs is None:
            raise OptionError("--vs-threads says how many threads the peer has; give --vs llama.cpp too")
        if self.picture is not None and self.picture.suffix.lower() != ".svg":
            raise OptionError(f"--picture writes SVG; give it a name as sweep.svg, not {self.picture}")

    @property
    def case(self) -> BenchCase:
        """What is measured."""
        return BenchCase("decode", self.generate, self.depth, self.batch)
