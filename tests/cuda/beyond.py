"""More weights than the GPU's memory may hold: our plan beside what people would set by hand, and beside what
the machine could do at best."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from hetrun.errors import BudgetError
from hetrun.planner.options import this_machine
from hetrun.tools.bench.cases import BenchCase
from hetrun.tools.bench.memory_bandwidth import memory
from tests.cuda.measured import (
    CUDA,
    Measured,
    all_streamed,
    layer_split,
    layers_of,
    link_and_memory,
    measured,
)
from tests.cuda.models import Wanted, made
from tests.cuda.rows import Line, Table

MODELS = (Wanted("8b", "Q4_K_M"), Wanted("32b", "Q4_K_M"))
PARTS = (0.25, 0.5, 0.75)  # of the model's file
DECODE = BenchCase("decode", 32, 512)
ROUNDS = 3
OF_BEST, OF_LIMIT, ERROR = 0.85, 0.7, 15.0
HOST, BOTH = ("llamacpp",), (CUDA, "llamacpp")


def beyond(
    models: Path,
    table: Table,
    wanted: Sequence[Wanted] = MODELS,
    case: BenchCase = DECODE,
    rounds: int = ROUNDS,
    parts: Sequence[float] = PARTS,
) -> None:
    """For each model and each part of it: ours, and all the others in turn."""
    link, memory_of = link_and_memory()
    dram = memory(this_machine().cores, 4e9).dram
    for name, rate in {"DRAM": dram, "the link": link, "the GPU's memory": memory_of}.items():
        table.add(Line(f"{name} gives", "GB/s", (rate / 1e9,)))
    for each in wanted:
        path = made(models, each)
        off = []
        for part in parts:
            if not table.has_time(f"{each} --vram {part:.0%}"):
                continue
            vram, what = int(part * path.stat().st_size), f"{each} --vram {part:.0%}"
            off.append(_point(table, what, path, vram, case, rounds, (dram, link, memory_of)))
        known = [n for n in off if n is not None]
        if known:
            mean = sum(known) / len(known)
            table.add(Line(f"{each}: predicted against measured", "% off", (mean,), ERROR, "most"))
        path.unlink()


Rates = tuple[float, float, float]  # DRAM, link, the GPU's memory


def _point(
    table: Table, what: str, path: Path, vram: int, case: BenchCase, rounds: int, rates: Rates
) -> float | None:
    """One budget; how far our prediction was off, in percent."""
    ours = measured(path, case, rounds, backends=BOTH, vram=vram)
    table.add(Line(f"{what}: ours", "tokens/s", ours.tok_s, note=_where(ours)))
    with _folder() as folder:
        for name, found in _others(path, folder, vram, case, rounds):
            table.add(Line(f"{what}: {name}", "tokens/s", found.tok_s, note=_where(found)))
            ratio = median(ours.tok_s) / median(found.tok_s)
            table.add(Line(f"{what}: ours against {name}", "times", (ratio,), 1.0))
    again = measured(path, case, rounds, backends=BOTH, vram=vram)
    table.add(Line(f"{what}: ours, once more", "tokens/s", again.tok_s))
    tok_s = (*ours.tok_s, *again.tok_s)
    limit = _limit(ours, rates)
    table.add(Line(f"{what}: of what the machine gives", "", tuple(limit * t for t in tok_s), OF_LIMIT))
    if ours.best:
        table.add(Line(f"{what}: of the best placement", "", tuple(ours.best * t for t in tok_s), OF_BEST))
    table.add(Line(f"{what}: memory of the GPU", "of --vram", (ours.held / vram,), 1.0, "most"))
    return 100 * abs(ours.predicted * median(tok_s) - 1) if ours.predicted else None


def _others(
    path: Path, folder: Path, vram: int, case: BenchCase, rounds: int
) -> Iterator[tuple[str, Measured]]:
    """What people would do without a planner: all on the CPU, all over the link, as many layers as fit."""
    yield "all on the CPU", measured(path, case, rounds, backends=HOST)

    def by_hand(plan: Path) -> Measured | None:
        try:
            return measured(path, case, rounds, backends=BOTH, vram=vram, plan=plan)
        except BudgetError:  # so much does not fit
            return None

    if found := by_hand(all_streamed(path, folder / "streamed.json")):
        yield "all over the link", found
    for layers in range(layers_of(path), 0, -1):
        if found := by_hand(layer_split(path, folder / "split.json", layers)):
            yield f"the last {layers} layers on the GPU", found
            return


def _limit(found: Measured, rates: Rates) -> float:
    """Seconds of a step that the bytes take, each where it lies."""
    dram, link, vram = rates
    host = sum(n for name, n in found.places.items() if not name.startswith(CUDA))
    return max(
        host / dram, found.places.get(f"{CUDA}-streamed", 0) / link, found.places.get(CUDA, 0) / (vram or 1.0)
    )


def _where(found: Measured) -> str:
    return ", ".join(f"{n / 1e9:.3g} GB on {name}" for name, n in found.places.items() if n)


@contextmanager
def _folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
