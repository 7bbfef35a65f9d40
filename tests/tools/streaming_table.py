"""What was promised of models bigger than memory, held against what happens here.

    python -m tests.tools.streaming_table -m 8b-q4_0.gguf                     everything: an hour or two
    python -m tests.tools.streaming_table -m 8b-q4_0.gguf --only speed        one part of it
    python -m tests.tools.streaming_table -m 8b-q4_0.gguf --json table.json   the numbers, too

Budgets are shares of the model's bytes, and 300 MiB on top. hetrun runs in a control group of twice the
budget, llama.cpp, which maps the model, in one of just the budget; both in turn. So it takes root, the
package llama-cpp-python, and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import strftime

import numpy as np

from hetrun.config import STREAMING, Settings
from hetrun.loader.open_model import open_model
from hetrun.system.terminal_text import align_columns
from hetrun.tools.bench.process import BenchProcess
from hetrun.tools.bench.roofline import demands
from hetrun.tools.bench.sweep import sweep, worker
from hetrun.tools.bench.sweep.budgets import SweepBudget, SweepOptions
from hetrun.tools.bench.sweep.cgroup_sandbox import confined, why_not
from hetrun.tools.bench.sweep.report import to_json, to_table
from hetrun.tools.bench.sweep.results import BudgetPoint, Sweep

CONTEXT = 4096
PERCENTS: Mapping[float, str] = {25.0: "q8_0", 50.0: "f16", 75.0: "f16", 90.0: "f16"}  # and the type of KV
RATIOS = {50.0: 2.5, 75.0: 4.0, 90.0: 7.0}  # against llama.cpp
OF_BOUND, LOCKED, BYTES, BATCHES = 0.9, 0.97, 0.02, 12.0
WAYS = tuple(way for way in STREAMING if way != "off")
PROMPTS, PROMPT = 64, 100
HALF = SweepBudget(percent=50.0)


@dataclass(frozen=True, slots=True)
class Row:
    """A promise, and what came of it."""

    what: str
    case: str
    bar: str
    result: str
    met: bool | None  # None: it could not be measured


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line."""

    model: Path
    rounds: int
    tokens: int
    few: int
    percents: tuple[float, ...]
    ways: tuple[str, ...]


Details = dict[str, object]
Part = Callable[[Asked, Details], Iterator[Row]]


def memory(asked: Asked, details: Details) -> Iterator[Row]:
    """The whole context is filled, and nothing goes above the budget."""
    for percent in asked.percents:
        # The prompt, the token behind it, and those that are measured are the whole context.
        found = _sweep(asked, percent, depth=CONTEXT - 9, generate=8, rounds=1)
        point, case = found.points[-1], _name(percent)
        details[f"memory {case}"] = json.loads(to_json(found))
        peak = point.state.held.peak if point.state else None
        for name, nbytes in (("VmHWM", peak), ("group's max usage", point.group_peak)):
            what = f"{name}, {CONTEXT} tokens of context"
            if point.failed or nbytes is None or point.nbytes is None:
                yield Row(
                    what,
                    case,
                    "at most the budget",
                    point.failed or "unknown",
                    bool(not point.failed) or None,
                )
                continue
            share = nbytes / point.nbytes
            yield Row(what, case, "at most the budget", f"{share:.1%} of it", share <= 1)


def speed(asked: Asked, details: Details) -> Iterator[Row]:
    """Bytes, the share of the bound, the ratio to llama.cpp, and how much of the room holds weights."""
    compute: float | None = None
    for percent in asked.percents:
        found = _sweep(asked, percent, vs="llama.cpp" if percent in RATIOS else None, control=compute is None)
        print(to_table(found, 100), file=sys.stderr)
        details[f"speed {_name(percent)}"] = json.loads(to_json(found))
        if found.compute and found.points[0].turns and not found.points[0].streams:
            compute = found.compute[0]
        yield from _speed_rows(asked, percent, found.points[-1], compute)


def _speed_rows(asked: Asked, percent: float, point: BudgetPoint, compute: float | None) -> Iterator[Row]:
    case = _name(percent)
    if point.failed or not point.turns or point.state is None:
        yield Row("it runs", case, "yes", point.failed or "no sample", False)
        return
    held, case_of = point.state.held, SweepOptions((HALF,)).case
    weights = demands(asked.model, PERCENTS.get(percent, "f16")).of(case_of).weight_bytes
    expected = weights - held.locked
    for who, read in (
        ("hetrun's", point.middle(lambda s: s.per_step)),
        ("kernel's", point.middle(lambda s: s.read / s.steps)),
    ):
        off = read / expected - 1 if expected > 0 else 0.0
        said = f"{read / 1e9:.3f} GB, {off:+.1%}"
        yield Row(f"bytes a token, {who}", case, f"weights - locked ± {BYTES:.0%}", said, abs(off) <= BYTES)
    share, bar = point.of_bound(compute), f"{OF_BOUND} of the bound"
    said = (
        "unknown"
        if share is None
        else f"{share:.2f} ({point.tok_s:.2f} of {point.bound(compute):.2f} tokens/s)"
    )
    yield Row("decode", case, bar, said, None if share is None else share >= OF_BOUND)
    if percent in RATIOS:
        yield _against(percent, point)
    if point.nbytes is not None and held.memory is not None:
        room = point.nbytes - (held.memory - held.locked)
        part = held.locked / room
        said = f"{part:.1%} ({held.locked / 1e9:.2f} of {room / 1e9:.2f} GB)"
        yield Row("locked, of the room for it", case, f"{LOCKED:.0%}", said, part >= LOCKED)


def _against(percent: float, point: BudgetPoint) -> Row:
    peer, what, bar = point.peer, "decode against llama.cpp", f"{RATIOS[percent]:g} times"
    if peer is None or point.ratio is None or peer.tok_s is None:
        return Row(what, _name(percent), bar, (peer and peer.failed) or "unknown", None)
    said = f"{point.ratio:.2f} times ({point.tok_s:.2f} and {peer.tok_s:.2f} tokens/s)"
    return Row(what, _name(percent), bar, said, point.ratio >= RATIOS[percent])


def ablations(asked: Asked, details: Details) -> Iterator[Row]:
    """Every way to stream gives the tokens that all weights in memory give."""
    settings = {"deterministic": True, "ctx": CONTEXT}
    with _ours(asked, None, **settings) as ours:
        prompt = _prompts(asked, 1)
        expected = ours.ask(worker.Complete(prompt, asked.tokens), worker.CaseCompleted).tokens[0]
    for way in asked.ways:
        what, case, bar = f"--streaming {way}", HALF.name, f"the same {asked.tokens} tokens"
        try:
            with _ours(asked, HALF, **settings, streaming=way) as ours:
                found = ours.ask(worker.Complete(prompt, asked.tokens), worker.CaseCompleted)
        except Exception as error:
            yield Row(what, case, bar, str(error), False)
            continue
        alike = _alike(expected, found.tokens[0])
        rate = len(found.tokens[0]) / found.seconds
        details[f"way {way}"] = {"tokens": found.tokens[0], "seconds": found.seconds}
        yield Row(what, case, bar, f"{alike} alike, {rate:.2f} tokens/s", found.tokens[0] == expected)


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens are the same until the first that is not."""
    same = [x == y for x, y in zip(a, b, strict=False)]
    return same.index(False) if False in same else len(same)


def batches(asked: Asked, details: Details) -> Iterator[Row]:
    """Many prompts share each pass over the weights; a few of them one by one say what that is worth."""
    with _ours(asked, HALF) as ours:
        prompts = _prompts(asked, PROMPTS)
        ours.ask(worker.Complete(prompts[:1], 2), worker.CaseCompleted)
        together = ours.ask(worker.Complete(prompts, asked.few), worker.CaseCompleted)
        alone = [
            ours.ask(worker.Complete([p], asked.few), worker.CaseCompleted) for p in _prompts(asked, 3, 1)
        ]
    rate = sum(map(len, together.tokens)) / together.seconds
    one = sum(len(a.tokens[0]) for a in alone) / sum(a.seconds for a in alone)
    details["batches"] = {"together_tok_s": rate, "alone_tok_s": one, "tokens_each": asked.few}
    said = f"{rate / one:.1f} times ({rate:.2f} and {one:.2f} tokens/s, {asked.few} tokens each)"
    what = f"{PROMPTS} prompts of {PROMPT} tokens, against one at a time"
    yield Row(what, HALF.name, f"{BATCHES:g} times", said, rate / one >= BATCHES)


def _sweep(asked: Asked, percent: float, **given: object) -> Sweep:
    """One budget."""
    settings = Settings.resolve(
        environ={}, model=str(asked.model), ctx=CONTEXT, kv_type=PERCENTS.get(percent, "f16")
    )
    options: dict[str, object] = {"rounds": asked.rounds, "control": False, **given}
    chosen = SweepOptions((SweepBudget(percent=percent),), **options)  # type: ignore[arg-type]
    return sweep.run(settings, chosen, lambda done, total, what: _say(what))


@contextmanager
def _ours(asked: Asked, budget: SweepBudget | None, **options: object) -> Iterator[BenchProcess]:
    """hetrun with the model, in so much memory."""
    size = open_model(asked.model).nbytes
    nbytes = None if budget is None else budget.of(size)
    with confined(sweep.TWICE * (nbytes or 2 * size)) as group:
        _say(f"{budget.name if budget else 'all in memory'} {options}")
        process = worker.start(group.prefix)
        try:
            given = {"spec": "off"} | options | ({} if nbytes is None else {"ram": nbytes})
            process.ask(worker.OpenModel(str(asked.model), given, size), worker.ModelOpened)
            yield process
        finally:
            process.close()


def _prompts(asked: Asked, n: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Of random tokens."""
    table = open_model(asked.model).find("token_embd.weight")
    assert table is not None, "every model looks its tokens up"
    found = np.random.default_rng(seed).integers(0, table.shape[0], (n, PROMPT))
    return [tuple(row) for row in found.tolist()]


def _name(percent: float) -> str:
    return f"{percent:g}%, {PERCENTS.get(percent, 'f16').upper()}"


def _say(what: str) -> None:
    print(f"{strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


PARTS: Mapping[str, Part] = {"memory": memory, "speed": speed, "ablations": ablations, "batches": batches}


def main() -> int:
    """The table; 0 if every promise was kept."""
    parser = argparse.ArgumentParser(description="models bigger than memory: what was promised, and what is")
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--only", choices=list(PARTS), action="append", help="a part; may be repeated")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="samples of each speed")
    parser.add_argument("--tokens", type=int, default=256, help="of each way of streaming")
    parser.add_argument("--few", type=int, default=32, help="tokens of each of many prompts")
    parser.add_argument("--percents", default="25,50,75,90", help="budgets")
    parser.add_argument("--ways", default=",".join(WAYS), help="to stream, one after the other")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    given = parser.parse_args()
    if refusal := why_not():
        parser.error(refusal)
    percents = tuple(float(p) for p in given.percents.split(","))
    ways = tuple(given.ways.split(","))
    asked = Asked(given.model, given.rounds, given.tokens, given.few, percents, ways)
    rows: list[Row] = []
    details: Details = {}
    for name in given.only or PARTS:
        for row in PARTS[name](asked, details):
            _say(f"{row.what}, {row.case}: {row.result}")
            rows.append(row)
    lines = [["what", "budget", "bar", "result", "met"]]
    words = {True: "yes", False: "NO", None: "?"}
    lines += [[r.what, r.case, r.bar, r.result, words[r.met]] for r in rows]
    print("\n".join(align_columns(lines, left={0, 1, 2, 3, 4})))
    if given.json:
        found = {"rows": [asdict(r) for r in rows], "details": details}
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0 if all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
