"""All of a model in the GPU's memory: how fast it reads its weights, and how fast it multiplies."""

from __future__ import annotations

from pathlib import Path

from hetrun.tools.bench.cases import BenchCase
from hetrun.tools.bench.roofline import demands
from tests.cuda.measured import CUDA, Measured, link_and_memory, measured
from tests.cuda.models import Wanted, made
from tests.cuda.rows import Line, Table

MEMORY_BYTES_S = 4.3e12  # of an H200, as its memory was read and written in a copy
DECODE_BARS = {"BF16": 0.6, "Q4_K_M": 0.4}  # of the time that reading the weights would take
PREFILL_BAR = 300e12  # useful multiplications and additions a second
MODELS = (Wanted("8b", "Q4_K_M"), Wanted("8b", "BF16"), Wanted("32b", "Q4_K_M"))
DECODE, PREFILL = BenchCase("decode", 64, 512), BenchCase("prefill", 4096)
ROUNDS = 5


def speed(
    models: Path,
    table: Table,
    wanted: tuple[Wanted, ...] = MODELS,
    cases: tuple[BenchCase, BenchCase] = (DECODE, PREFILL),
    rounds: int = ROUNDS,
) -> None:
    """One line for each model and case; then how fast each form of unit reads its weights."""
    decode, prefill = cases
    link, memory = link_and_memory()
    table.add(Line("copies over the link", "GB/s", (link / 1e9,)))
    table.add(Line("copies inside the GPU's memory, read and written", "GB/s", (memory / 1e9,)))
    for each in wanted:
        if not table.has_time(str(each)):
            continue
        path = made(models, each)
        weights = demands(path, "f16").traffic.weight_bytes(1)
        found = measured(path, decode, rounds, backends=[CUDA])
        shares = tuple(weights * tok_s / MEMORY_BYTES_S for tok_s in found.tok_s)
        note = f"{1 / found.predicted:.1f} tokens/s were predicted" if found.predicted else ""
        bar = DECODE_BARS.get(each.quant)
        table.add(Line(f"{each} {decode.name}", "tokens/s", found.tok_s, note=note))
        table.add(Line(f"{each} {decode.name}", f"of {MEMORY_BYTES_S / 1e12:g} TB/s", shares, bar))
        _units(table, each, found)
        read = measured(path, prefill, rounds, backends=[CUDA])
        table.add(Line(f"{each} {prefill.name}", "tokens/s", read.tok_s))
        done = tuple(_useful(path, prefill) * tok_s / prefill.tokens / 1e12 for tok_s in read.tok_s)
        table.add(Line(f"{each} {prefill.name}", "TFLOP/s", done, PREFILL_BAR / 1e12))
        path.unlink()


def _useful(path: Path, case: BenchCase) -> float:
    """Multiplications and additions of a prompt."""
    demand = demands(path, "f16").of(case)
    return (demand.products or 0.0) + (demand.attention or 0.0)


def _units(table: Table, each: Wanted, found: Measured) -> None:
    for form, rate in found.units.items():
        table.add(Line(f"{each} one token, {form}", "GB/s of weights", (rate / 1e9,)))
