"""What can be measured, and how it was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import OptionError

OUTPUTS = ("table", "json", "csv")
MOST = 1 << 24  # tokens; a slip of the finger rather than a wish
MOST_BESIDE = 256  # processes
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One number to measure: tokens read, or tokens written behind `depth` others, in `batch` sequences."""

    kind: Literal["prefill", "decode"]
    tokens: int
    depth: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        """As llama-bench writes it: pp512, tg64, tg64@512."""
        if self.kind == "prefill":
            return f"pp{self.tokens}"
        return f"tg{self.tokens}@{self.depth}" if self.depth else f"tg{self.tokens}"

    @property
    def prompt(self) -> int:
        """Tokens of the prompt. An answer needs something to answer to: depth 0 is depth 1."""
        return self.tokens if self.kind == "prefill" else max(self.depth, 1)

    @property
    def context(self) -> int:
        """Tokens that one sequence needs room for: the prompt, its first token, and what is measured."""
        return self.prompt + 1 if self.kind == "prefill" else self.prompt + 1 + self.tokens

    def prompts(self, n_vocab: int, seed: int) -> Tokens:
        """The tokens to read, one row for each sequence. Prefill gets others in each round, so that no side
        answers from a cache; decode the same ones, so that every side may."""
        rng = np.random.default_rng(seed if self.kind == "prefill" else 0)
        return rng.integers(0, n_vocab, (self.batch, self.prompt), np.int32)


@dataclass(frozen=True, slots=True)
class Passage:
    """What the sequences of a run read, and what they write then: [sequence, token]."""

    prompts: Tokens
    answers: Tokens


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `hetrun bench` was asked to measure, and how to say it."""

    prompt: tuple[int, ...] = (512,)  # -p: 0 is none
    generate: tuple[int, ...] = (64,)  # -n: 0 is none
    depth: tuple[int, ...] = (512,)  # -d
    batch: tuple[int, ...] = (1,)  # -b
    rounds: int = 5  # -r
    vs: str | None = None
    explain: bool = False
    output: str = "table"
    vs_threads: int | None = None  # of the peer; None: its best number, or, beside others, its default
    beside: int = 0  # other programs that keep a core busy each
    text: Path | None = None  # that is read and written in place of random tokens

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise OptionError(f"-o must be one of {', '.join(OUTPUTS)}, not {self.output!r}")
        if self.explain and self.output == "csv":
            raise OptionError("--explain needs more room than a line of csv; use -o table or -o json")
        if self.rounds < 1:
            raise OptionError(f"-r must be 1 or more, not {self.rounds}")
        if self.vs_threads is not None and self.vs is None:
            raise OptionError("--vs-threads says how many threads the peer has; give --vs llama.cpp too")
        if self.beside > MOST_BESIDE:
            raise OptionError(f"--beside must be {MOST_BESIDE} or less, not {self.beside}")
        if not self.cases():
            raise OptionError("nothing is left to measure: -p and -n are both 0")

    def cases(self) -> list[BenchCase]:
        """Every combination, in the order of the options."""
        found: list[BenchCase] = []
        for batch in self.batch:
            found += [BenchCase("prefill", p, 0, batch) for p in self.prompt if p]
            found += [BenchCase("decode", n, d, batch) for n in self.generate if n for d in self.depth]
        return list(dict.fromkeys(found))


def numbers(flag: str, text: str | int | Sequence[int], least: int = 0) -> tuple[int, ...]:
    """The value of an option that takes one number or several: `512`, `128,512`."""
    given = text.split(",") if isinstance(text, str) else [text] if isinstance(text, int) else text
    try:
        found = tuple(int(part) for part in given)
    except ValueError:
        found = ()
    if not found or min(found) < least or max(found) > MOST:
        raise OptionError(f"{flag} must be a number of {least} or more, or several as 128,512; not {text!r}")
    return found
