"""What the block that predicts one more token (`--spec mtp`) wins, by how often its guesses are right.

    python -m tests.tools.make_model --shape qwen35-4b --mtp --quant Q4_K_M --same-layers -o 4b.gguf
    python -m tests.tools.mtp_table -m 4b.gguf

The block of a model of random weights guesses nothing. So the model computes all that it always does, and so
does its block, but the tokens that are taken are those of a real text, and of the guesses a part is made to
be right. Two processes write in turn, one without speculation. `allowed` is what the measured steps and
guesses allow at best: for each length of a draft the tokens that it gives by the time that it took.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

from hetrun import LLM, SamplingParams
from hetrun.backend import Floats
from hetrun.engine.output_processor import Choices
from hetrun.engine.request import ActiveRequest, Chosen, Drafts
from hetrun.engine.speculation.mtp import MtpSequence
from hetrun.engine.speculation.speculator import Speculator
from hetrun.executor.steps import Step
from hetrun.sampling.interface import SampledToken
from hetrun.system.terminal_text import align_columns
from tests.tools.speculation_table import Apart, free, tokens_of

Times = Mapping[int, Sequence[float]]  # seconds by the length of the draft


@dataclass(slots=True)
class Script:
    """What is to come, how often guesses are right, and how long all of it took."""

    text: tuple[int, ...] = ()
    n_prompt: int = 0
    accept: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    steps: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    guesses: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def token(self, at: int) -> int:
        """The one at a place of the sequence."""
        return self.text[(at - self.n_prompt) % len(self.text)]

    def together(self, running: Sequence[ActiveRequest], step: Step, drafts: Drafts, logits: Floats
                 ) -> Iterator[Choices]:  # fmt: skip
        """In place of what the model says."""
        for r in running:
            rows = 1 + len(drafts.get(r.id, ()))
            yield [SampledToken(self.token(len(r.tokens) + i)) for i in range(rows)]

    def propose(self, real: Callable[[MtpSequence, int], object], mine: MtpSequence, n: int) -> list[int]:
        """In place of what the block says."""
        start = perf_counter()
        real(mine, n)
        self.guesses[n].append(perf_counter() - start)
        at = len(mine._tokens)
        right = [self.rng.random() < self.accept for _ in range(n)]
        return [self.token(at + i) ^ (0 if good else 1) for i, good in enumerate(right)]

    def took(self, drafts: Drafts, seconds: float) -> None:
        """A step is over."""
        self.steps[max(map(len, drafts.values()), default=0)].append(seconds)


class Written(NamedTuple):
    """What one side did."""

    rate: float
    drafted: int
    accepted: int
    steps: Times
    guesses: Times


class Work(NamedTuple):
    """A script."""

    prompt: Sequence[int]
    text: tuple[int, ...]
    accept: float
    tokens: int


def serve(asks: Connection, options: Mapping[str, Any]) -> None:
    """Write what is asked for; runs in a process of its own."""
    script = Script()
    propose, compiled = MtpSequence.propose, Speculator.compiled

    def timed(mine: Speculator, chosen: Chosen, drafts: Drafts, seconds: float) -> bool:
        first = compiled(mine, chosen, drafts, seconds)
        if not first and all(n == 1 for _, n in chosen):
            script.took(drafts, seconds)
        return first

    with (
        patch("hetrun.engine.loop.together", script.together),
        patch.object(MtpSequence, "propose", lambda mine, n: script.propose(propose, mine, n)),
        patch.object(Speculator, "compiled", timed),
        LLM(**options) as llm,
    ):
        asks.send("ready")
        while (work := asks.recv()) is not None:
            assert isinstance(work, Work)
            script.text, script.accept, script.n_prompt = work.text, work.accept, len(work.prompt)
            script.steps.clear()
            script.guesses.clear()
            params = SamplingParams(max_tokens=work.tokens, temperature=0.0, ignore_eos=True)
            t = llm.generate([list(work.prompt)], params)[0].timings
            asks.send(
                Written(t.decode_tok_s, t.drafted, t.accepted, dict(script.steps), dict(script.guesses))
            )


def middles(times: Times) -> dict[int, float]:
    """The median of each."""
    return {n: median(seconds) for n, seconds in sorted(times.items())}


def allowed(accept: float, steps: Times, guesses: Times) -> float:
    """Tokens a second at the best length of a draft, by what was measured."""
    found = []
    for n, seconds in steps.items():
        gives = sum(accept**i for i in range(n + 1))
        making = median(guesses[n]) if n in guesses else 0.0
        if len(seconds) >= 5:
            found.append(gives / (median(seconds) + making))
    return max(found)


class Writer(Apart):
    """Writes scripts in a process of its own."""

    def __init__(self, **options: object) -> None:
        super().__init__(options, serve)

    def told(self, work: Work) -> Written:
        """What came of a script."""
        found = self.ask(work)
        assert isinstance(found, Written)
        return found


def main() -> int:
    """The table."""
    parser = argparse.ArgumentParser(description="--spec mtp: what it wins by how often guesses are right")
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--accept", default="0,0.5,0.7,0.85", help="which parts of the guesses are right")
    parser.add_argument("--spec", default="mtp")
    parser.add_argument("--precision", default="fast")
    parser.add_argument("--ram", help="what each side may take, as for hetrun")
    parser.add_argument("--tokens", type=int, default=192, help="of each text")
    parser.add_argument("--texts", type=int, default=3, help="for each")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    asked = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f}", file=sys.stderr)
    texts = free()[: asked.texts]
    ids = tokens_of(texts)
    options = {"model": str(asked.model), "ctx": 4096, "precision": asked.precision}
    if asked.ram:
        options["ram"] = asked.ram
    off, on = Writer(**options, spec="off"), Writer(**options, spec=asked.spec)
    lines = [["right", "off", "on", "ratio", "allowed", "of it", "drafted", "right of these"]]
    numbers: list[Mapping[str, object]] = []
    for accept in map(float, asked.accept.split(",")):
        rows = []
        for i, text in enumerate(texts):
            work = Work(ids[text.prompt], ids[text.answer], accept, asked.tokens)
            sides = [off, on] if i % 2 else [on, off]
            found = {side: side.told(work) for side in sides}
            plain, mine = found[off], found[on]
            best = allowed(accept, {**mine.steps, 0: plain.steps[0]}, mine.guesses)
            rates = (plain.rate, mine.rate, mine.rate / plain.rate, best, mine.rate / best)
            rows.append((*rates, mine.drafted, mine.accepted))
            numbers.append({"right": accept, "row": rows[-1], "plain": median(plain.steps[0]),
                            "steps": middles(mine.steps), "guesses": middles(mine.guesses)})  # fmt: skip
            print(numbers[-1], file=sys.stderr, flush=True)
        middle = [median(column) for column in zip(*rows, strict=True)]
        words = ["{:g}", "{:.1f}", "{:.1f}", "{:.2f}", "{:.1f}", "{:.2f}", "{:.0f}", "{:.0f}"]
        lines.append([w.format(v) for w, v in zip(words, [accept, *middle], strict=True)])
    off.close()
    on.close()
    print("\n".join(align_columns(lines, left=set())))
    print(f"load average {os.getloadavg()[0]:.2f}")
    if asked.json:
        asked.json.write_text(json.dumps(numbers, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
