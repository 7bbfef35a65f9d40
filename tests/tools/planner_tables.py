"""Write the tables of docs/other-machines.md, for papers' test beds: `python -m tests.tools.planner_tables`

Nothing in them was measured here. Each part of the document between its two markers is made by one function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hetrun.tools.simulate.costs import decode, parts_of, prefill
from hetrun.tools.simulate.evaluator import StepCosts, predict
from hetrun.tools.simulate.machine_files import open_machine
from hetrun.tools.simulate.policies import compare
from hetrun.tools.simulate.policies.flexgen import streaming
from hetrun.tools.simulate.policies.lia import best_policy, shown
from hetrun.tools.simulate.policies.twinpilots import SEVEN, balanced, table
from hetrun.tools.simulate.report import policies_table
from hetrun.tools.simulate.types import Prediction, SimulatedSetting
from tests.simulate.questions import model
from tests.simulate.test_policies import ON_CPU, ON_GPU

DOCUMENT = Path(__file__).parents[2] / "docs" / "other-machines.md"
BEDS = ("twinpilots-a10g", "lia-spr-a100", "server-h200")
MODELS = ("opt-30b", "llama-70b")
BATCHES = (1, 4, 64)
PROMPT, GENERATE = 512, 32
HEADING = (
    "| policy | prefill s | decode ms | decode tok/s | all tok/s | copied GB a step | how |",
    "|---|---|---|---|---|---|---|",
)


def asked(machine: str, name: str, batch: int, prompt: int = PROMPT, generate: int = GENERATE) -> StepCosts:
    """A question about one of the machines that ship."""
    return StepCosts(SimulatedSetting(open_machine(machine), model(name), batch, prompt, generate))


def by_name(clock: StepCosts) -> dict[str, Prediction]:
    """Every policy's prediction."""
    return {p.placing.policy: p for p in compare(clock)}


def bed(machine: str) -> Iterator[str]:
    """All policies on one machine."""
    yield open_machine(machine).about[:1].upper() + open_machine(machine).about[1:] + "."
    for name in MODELS:
        for batch in BATCHES:
            yield from ("", f"{name}, batch {batch}:", "", *HEADING)
            yield from policies_table(compare(asked(machine, name, batch)))


def laptop() -> Iterator[str]:
    """Without a GPU there is one placement; the bill says what comes from disk."""
    yield from (
        "| model | decode tok/s | prefill tok/s | memory GB | from disk GB a step |",
        "|---|---|---|---|---|",
    )
    for name in ("llama-8b:q4_0", "llama-13b:q4_0", "opt-30b:q4_0", "llama-70b:q4_0"):
        found = by_name(asked("laptop", name, 1))["hetrun"]
        total = sum(found.bill.cpu.values()) / 1e9
        yield (
            f"| {name} | {found.tokens_per_second:.2f} | {PROMPT / found.prefill.seconds:.1f}"
            f" | {total:.1f} | {found.bill.disk / 1e9:.1f} |"
        )


def twinpilots() -> Iterator[str]:
    """The paper's own times, and what the file of its machine says instead."""
    on_gpu, makespan = balanced(ON_CPU, ON_GPU)
    clock = asked("twinpilots-a10g", "opt-30b", 5, 896, 128)
    seven = parts_of([op for part in clock.model.layers[0] for op in part.ops], SEVEN)
    cpu, gpu = table(clock, seven, decode(5, 1024))
    _, predicted = balanced(cpu, gpu)
    yield from (
        "| ms for a layer of OPT-30B | Q, K, V, OUT each | SCORE | MLP1, MLP2 each | all | balanced |",
        "|---|---|---|---|---|---|",
    )
    rows = [("on the GPU, loads included", ON_GPU, gpu), ("on the processor", ON_CPU, cpu)]
    for where, paper, ours in rows:
        for whose, times, scale, best in (
            ("paper", paper, 1, makespan),
            ("predicted", ours, 1000, predicted),
        ):
            cells = (times["q"], times["score"], times["mlp1"], sum(times.values()), best)
            yield f"| {where}, {whose} | {' | '.join(f'{scale * cell:.1f}' for cell in cells)} |"
    yield ""
    names = ", ".join(n for n in on_gpu if on_gpu[n])
    yield f"With the paper's times the GPU gets {names} (one of eight assignments that are equally good)."


def lia() -> Iterator[str]:
    """Where its policy changes."""
    yield from ("| OPT-175B | from | policy |", "|---|---|---|")
    for machine in ("lia-spr-a100", "lia-spr-h100", "lia-gnr-a100"):
        clock = asked(machine, "opt-175b", 1)
        layer = clock.model.layers[0]
        for phase in ("prefill", "decode"):
            before = None
            for n in range(10, 2500, 10):
                case = prefill(1, n) if phase == "prefill" else decode(n, 512)
                policy = best_policy(clock, layer, case)
                if policy != before:
                    what = "B*L" if phase == "prefill" else "B"
                    start = "the beginning" if before is None else f"{what} = {n}"
                    yield f"| {machine}, {phase} | {start} | {shown(policy)} |"
                before = policy


def measured() -> Iterator[str]:
    """What papers measured and what we would have said."""
    yield from ("| what | paper measured | predicted |", "|---|---|---|")
    t4 = asked("flexgen-t4", "opt-30b", 144)
    yield _row("FlexGen, OPT-30B on T4, batch 144, tokens/s with prefill", "7.32", streamed(t4).throughput)
    a10 = by_name(asked("hetegen-a10", "opt-30b", 1, 512, 64))
    yield _row("FlexGen on HeteGen's A10, OPT-30B, batch 1, tokens/s", "0.44", a10["streaming"].throughput)
    yield _row("HeteGen itself there, hetrun predicted", "2.0", a10["hetrun"].throughput)
    pilots = by_name(asked("twinpilots-a10g", "opt-30b", 4, 896, 128))
    ratio = pilots["streaming"].seconds / pilots["TwinPilots"].seconds
    yield _row("TwinPilots against FlexGen, OPT-30B, batch 4, times as fast", "2.2 (11.80 s, 5.44 s)", ratio)
    for name, flexgen, ipex in (("opt-30b", "5.3 - 7.3", "1.8 - 2.1"), ("opt-175b", "8.5 - 12", "1.1 - 1.3")):
        found = by_name(asked("lia-spr-a100", name, 1, 512, 32))
        for other, paper in (("streaming", flexgen), ("processor only", ipex)):
            who = {"streaming": "FlexGen", "processor only": "IPEX on the processor"}[other]
            times = found[other].seconds / found["LIA"].seconds
            yield _row(f"LIA against {who}, {name}, batch 1, SPR-A100, times as fast", paper, times)
    pinned = by_name(asked("lia-spr-a100", "opt-30b", 1))["LIA"].placing.bands[0].layers / 48
    yield _row("LIA's layers of OPT-30B whole on the A100, %", "62", 100 * pinned)


def streamed(clock: StepCosts) -> Prediction:
    """FlexGen's placement, which exists on every machine that ships."""
    found = streaming(clock)
    assert found is not None
    return predict(clock, found.placing)


def _row(what: str, paper: str, predicted: float) -> str:
    return f"| {what} | {paper} | {predicted:.3g} |"


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "twinpilots": twinpilots,
    "lia": lia,
    "measured": measured,
    "laptop": laptop,
    **{machine: partial(bed, machine) for machine in BEDS},
}


def made(part: str) -> str:
    """The text of a part."""
    return "\n".join(PARTS[part]())


def between(part: str) -> re.Pattern[str]:
    """A part in the document, its markers kept apart."""
    return re.compile(rf"(<!-- {part} -->\n).*?(<!-- /{part} -->)", re.DOTALL)


def main() -> None:
    """Write every part where it belongs."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for part in PARTS:
        new = made(part)
        text, n = between(part).subn(lambda m, new=new: f"{m[1]}{new}\n{m[2]}", text)  # type: ignore[misc]
        if n != 1:
            raise SystemExit(f"{DOCUMENT} has no place for {part}")
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
