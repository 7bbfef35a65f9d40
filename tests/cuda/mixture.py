"""A mixture that is three times as large as what it may take of the GPU, beside llama.cpp in as much: the
fastest of its settings, among them a cache of experts where the release has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hetrun.graph.ops import MIXTURE, Moe
from hetrun.loader.architectures import build_graph
from hetrun.loader.open_model import open_model
from hetrun.tools.bench.cases import BenchCase
from tests.cuda.measured import CUDA, measured
from tests.cuda.models import Wanted, made
from tests.cuda.peer import ALL_LAYERS, RUN_S, Peer, PeerError, help_of
from tests.cuda.rows import Line, Table

MODEL = Wanted("30b-a3b", "Q4_K_M", real_routing=True)
PART = 1 / 3  # of the file
BARS: Mapping[BenchCase, float | None] = {
    BenchCase("decode", 128, 512): 1.2,
    BenchCase("prefill", 2048): None,
}
ROUNDS = 3
BESIDES = 1 << 30  # bytes of llama.cpp besides weights: CUDA itself, keys and values, what passes work in
WARMUP = 256  # tokens, after which a cache has what is chosen
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model: in all, and the experts of each layer."""

    whole: int
    experts: Sequence[int]


def mixture(models: Path, table: Table, case: BenchCase, bar: float | None, wanted: Wanted = MODEL) -> None:
    """One case."""
    name = _name(case)
    if not table.has_time(name, RUN_S):
        return
    path = made(models, wanted)
    vram = int(PART * path.stat().st_size)
    peers = _peers(table, name, path, case, vram)
    ours = measured(path, case, ROUNDS, backends=[CUDA, "llamacpp"], vram=vram, precision="fast")
    found = ours.slots
    note = (
        f"{found.found / found.chosen:.0%} of chosen experts found in slots" if found and found.chosen else ""
    )
    table.add(Line(name, "tokens/s", ours.tok_s, note=note))
    table.add(Line(f"{name}: memory", "of --vram", (ours.held / vram,), 1.0, "most"))
    if peers:
        share = tuple(each / max(map(median, peers)) for each in ours.tok_s)
        table.add(Line(f"{name}: against llama.cpp's fastest", "times", share, bar))


def chosen_mixtures(only: str) -> Mapping[BenchCase, float | None]:
    """Those whose names have a text in them."""
    return {case: bar for case, bar in BARS.items() if only in _name(case)}


def _name(case: BenchCase) -> str:
    return f"mixture {MODEL}, --vram {PART:.0%}, {case.name}"


def _peers(table: Table, name: str, path: Path, case: BenchCase, vram: int) -> list[tuple[float, ...]]:
    """Each setting by itself."""
    from hetrun.backends.cuda.cupy_driver import properties

    found = list[tuple[float, ...]]()
    try:
        settings = ways(help_of("llama-bench"), sizes_of(path), vram, properties(0).memory)
    except PeerError as e:
        print(f"{name}: llama.cpp: {e}", flush=True)
        settings = {}
    for what, where in settings.items():
        try:
            found.append(Peer(path, ROUNDS, min(RUN_S, table.seconds_left), where).tokens_per_s(case))
        except PeerError as e:
            print(f"{name}: llama.cpp {what}: {e}", flush=True)
            continue
        table.add(Line(f"{name}, llama.cpp {what}", "tokens/s", found[-1]))
    if not found:
        table.add(Line(f"{name}: llama.cpp measured", "", (0,), 1))
    return found


def sizes_of(path: Path) -> Sizes:
    """Of a file."""
    ops = [op for op in build_graph(open_model(path)).ops if isinstance(op.attrs, Moe)]
    return Sizes(path.stat().st_size, [sum(w.nbytes for w in op.weights[1:MIXTURE]) for op in ops])


def ways(options: str, sizes: Sizes, vram: int, memory: int) -> dict[str, Mapping[str, object]]:
    """llama.cpp's settings that take no more than `vram` of a GPU with so much memory, as far as its options
    know them."""
    layers, room = len(sizes.experts), vram - BESIDES
    left = next((n for n in range(layers + 1) if sizes.whole - sum(sizes.experts[:n]) <= room), layers)
    found: dict[str, Mapping[str, object]] = {
        f"--n-cpu-moe {left}": {"-ngl": ALL_LAYERS, "-ncmoe": left},
    }
    if "--fit-target" in options:
        found["--fit"] = {"-fitt": max(0, memory - vram) // MIB}
    cache = room - (sizes.whole - sum(sizes.experts))
    if "--moe-cache" in options and cache > 0:
        cached = {"-ngl": ALL_LAYERS, "-ncmoe": layers, "--moe-cache": cache // MIB}
        warm = {"--n-gen-warmup": WARMUP} if "--n-gen-warmup" in options else {}
        found["--moe-cache"] = cached | warm
    return found
