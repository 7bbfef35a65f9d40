"""A model larger than RAM and the GPU's memory together: prompts with the GPU, which reads all weights from
disk by itself, and without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from hetrun.tools.bench.cases import BenchCase
from tests.cuda.measured import CUDA, measured
from tests.cuda.models import Wanted, made
from tests.cuda.rows import Line, Table

MODELS = (Wanted("8b", "Q4_K_M"),)
CASES = (BenchCase("prefill", 512), BenchCase("prefill", 2048))
ROUNDS = 3
HOST, BOTH = ("llamacpp",), (CUDA, "llamacpp")
BESIDES = 1 << 30  # bytes of RAM for the process, its libraries, keys and values
RAM, VRAM = 0.35, 0.4  # of the model's file
Budgets = Callable[[int], tuple[int, int]]


def budgets(nbytes: int) -> tuple[int, int]:
    """RAM and the GPU's memory for a file of a size: less than it needs, together."""
    return BESIDES + int(RAM * nbytes), int(VRAM * nbytes)


def disk(
    models: Path,
    table: Table,
    wanted: Sequence[Wanted] = MODELS,
    cases: Sequence[BenchCase] = CASES,
    rounds: int = ROUNDS,
    budgets: Budgets = budgets,
) -> None:
    """For each length of a prompt: both together against the CPU alone, with the same RAM."""
    for each in wanted:
        path = made(models, each)
        ram, vram = budgets(path.stat().st_size)
        for case in cases:
            what = f"{each} {case.name} from disk"
            if not table.has_time(what):
                continue
            alone = measured(path, case, rounds, backends=HOST, ram=ram)
            table.add(Line(f"{what}: CPU", "tokens/s", alone.tok_s))
            both = measured(path, case, rounds, backends=BOTH, ram=ram, vram=vram)
            on = ", ".join(f"{n / 1e9:.3g} GB by {name}" for name, n in both.places.items() if n)
            table.add(Line(f"{what}: GPU and CPU", "tokens/s", both.tok_s, note=on))
            ratio = median(both.tok_s) / median(alone.tok_s)
            table.add(Line(f"{what}: GPU and CPU against CPU", "times", (ratio,), 1.0))
            table.add(Line(f"{what}: memory of the GPU", "of --vram", (both.held / vram,), 1.0, "most"))
        path.unlink()
