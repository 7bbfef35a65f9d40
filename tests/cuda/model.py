"""One model as people run it, all of it on the GPU, beside llama.cpp on the same file in turn: prompts and
answers of every length, and many sequences at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import monotonic

from hetrun.tools.bench.cases import BenchCase
from tests.cuda.measured import CUDA, measured
from tests.cuda.models import Wanted, made
from tests.cuda.peer import PROMPT, RUN_S, Peer, PeerError
from tests.cuda.rows import Line, Table

MODEL = Wanted("8b", "Q4_K_M")
ANSWER = 32
# What ours must reach of llama.cpp's speed. The shortest come first: they say most in little time.
BARS: Mapping[BenchCase, float | None] = {
    BenchCase("decode", ANSWER): 1.0,
    BenchCase("prefill", 512): 0.9,
    BenchCase("prefill", 4096): 0.9,
    BenchCase("decode", ANSWER, PROMPT, 8): 1.0,
    BenchCase("decode", ANSWER, PROMPT, 32): 1.0,
    BenchCase("decode", ANSWER, PROMPT, 64): 1.0,
    BenchCase("decode", ANSWER, 8192): None,
    BenchCase("prefill", 64): None,
    BenchCase("decode", ANSWER, 32768): 0.9,
    BenchCase("prefill", 16384): 0.8,
}
ROUNDS = 3
SPARE = 8 << 30  # bytes of the GPU beside the weights, for keys, values and passes
LONGEST_S = 60.0  # of a case, before any was measured


def model(
    models: Path,
    table: Table,
    wanted: Wanted = MODEL,
    bars: Mapping[BenchCase, float | None] = BARS,
    rounds: int = ROUNDS,
    precisions: Sequence[str] = ("fast",),
    spare: int = SPARE,
) -> None:
    """Every case as long as there is time."""
    path, took = made(models, wanted), list[float]()
    vram = path.stat().st_size + spare
    for case, bar in bars.items():
        name = f"{wanted} {_name(case)}"
        if not table.has_time(name, max(took, default=LONGEST_S)):
            continue
        began = monotonic()
        peers = _peer(table, name, Peer(path, rounds, min(RUN_S, table.seconds_left)), case)
        for precision in precisions:
            what = f"{name}, {precision}"
            ours = measured(path, case, rounds, backends=[CUDA], vram=vram, precision=precision)
            table.add(Line(what, "tokens/s", ours.tok_s))
            table.add(Line(f"{what}: memory", "of --vram", (ours.held / vram,), 1.0, "most"))
            if peers:
                share = tuple(each / median(peers) for each in ours.tok_s)
                table.add(Line(f"{what}: against llama.cpp", "times", share, bar))
        took.append(monotonic() - began)
    path.unlink()


def chosen_cases(only: str) -> Mapping[BenchCase, float | None]:
    """Those whose names have a text in them."""
    return {case: bar for case, bar in BARS.items() if only in _name(case)}


def _name(case: BenchCase) -> str:
    return f"{case.name}, {case.batch} sequences" if case.batch > 1 else case.name


def _peer(table: Table, name: str, peer: Peer, case: BenchCase) -> tuple[float, ...]:
    try:
        found = peer.tokens_per_s(case)
    except PeerError as e:
        print(f"{name}: llama.cpp: {e}", flush=True)
        table.add(Line(f"{name}: llama.cpp measured", "", (0,), 1))
        return ()
    table.add(Line(f"{name}, llama.cpp", "tokens/s", found))
    return found
