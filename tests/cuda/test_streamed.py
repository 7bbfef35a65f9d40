"""Weights that cross the link for each pass: the same numbers, whatever lies on top of what in the ring."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hetrun.backend import Available, Backend, Descriptor, Done, Pass, WeightUse, registry
from hetrun.backends.cuda import backend as device
from hetrun.backends.cuda.backend import CudaBackend, StreamedBackend
from hetrun.backends.cuda.driver import Stream
from hetrun.backends.cuda.memory import CudaMemory
from hetrun.backends.cuda.runner import CudaRunner
from hetrun.backends.cuda.streamed import file_feed, weight_ring
from hetrun.backends.cuda.streamed.file_feed import FileFeed
from hetrun.backends.cuda.streamed.weight_ring import RingBlock, WeightRing
from hetrun.backends.cuda.weights import InFile, OnHost, expert_bytes
from hetrun.backends.reference import descriptor
from hetrun.errors import BackendError
from hetrun.executor.autotune.measurement.prober import Prober
from hetrun.executor.loading.device_memory import with_streaming
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Extent, Weight, in_scope, kv_shapes
from hetrun.graph.ops import Moe
from hetrun.graph.quant import by_name
from hetrun.loader.open_model import open_model
from hetrun.loader.weight_reader import SharedReader
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.options import Options, Wishes
from hetrun.planner.plan import BUCKETS
from hetrun.planner.trials import Trial
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.driver import CONTEXT, EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler
from tests.cuda.test_backend import close, tokens
from tests.models import cases_hf
from tests.models.tiny import TinyLlama
from tests.support.rig import Rig, graph_of, model_file, rig
from tests.support.tiers import first

DENSE = TinyLlama("streamed", layers=4, embd=128, ffn=256, heads=4, kv_heads=2, head_dim=32)
WEIGHTS = sum(w.nbytes for w in graph_of(DENSE).weights().values())
LARGEST = 256 << 10  # of one of its layers, and some


@pytest.fixture
def all_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are."""
    monkeypatch.setattr(device, "SMALL", 1 << 10)


def both_ways(
    driver: EmulatedDriver, largest: int = LARGEST, grant: int = 24 << 20
) -> tuple[CudaBackend, StreamedBackend]:
    """A GPU with weights in its memory, and the same with weights that cross."""
    stays = emulated(driver, grant, "cuda")
    streaming = stays.streaming(largest)
    assert streaming
    crosses, _ = streaming
    assert isinstance(crosses, StreamedBackend)
    return stays, crosses


def rigs(driver: EmulatedDriver, placed: dict[str, str], largest: int = LARGEST) -> tuple[Rig, Rig]:
    stays, crosses = both_ways(driver, largest)
    backends: dict[str, Backend] = {
        "cuda": stays,
        "cuda-streamed": crosses,
        "reference": descriptor.create(),
    }
    mine = rig(DENSE, backends, placed, context=256, ubatch=64)
    return mine, rig(DENSE, {"reference": descriptor.create()}, context=256, ubatch=64)


PLACES = [
    {"": "cuda-streamed", "token_embd": "cuda"},
    {"": "cuda", "blk.1": "cuda-streamed", "blk.3.ffn": "cuda-streamed"},
    {"": "reference", "blk.0.ffn": "cuda-streamed", "blk.1": "cuda", "blk.2.attn.q": "cuda-streamed"},
]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("long", first([(20, 40), (40, 64)]), ids=str)
@pytest.mark.parametrize("seed", first(range(2)))
@pytest.mark.parametrize("placed", PLACES, ids=["all", "beside the same GPU", "beside two"])
@pytest.mark.usefixtures("all_cross")
def test_what_crosses_is_what_is_computed_with(
    placed: dict[str, str], seed: int, long: tuple[int, int]
) -> None:
    """Sizes take turns, so that recorded work of one lies where that of another was."""
    driver = EmulatedDriver(seed=seed)
    mine, right = rigs(driver, placed)
    seqs = [(mine.kv.alloc(), right.kv.alloc()) for _ in range(2)]
    for i, n in enumerate([7, 1, 1, 1, long[0], 1, long[1], 2, 1, 1]):
        text = tokens(n, seed=i)
        mine_steps = [(a, text, range(n)) for a, _ in seqs[: 1 + i % 2]]
        right_steps = [(b, text, range(n)) for _, b in seqs[: 1 + i % 2]]
        close(mine.step(*mine_steps), right.step(*right_steps))
    assert driver.replays
    mine.close()
    right.close()
    assert driver.closed


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("all_cross")
def test_a_pass_brings_each_weight_once_and_the_next_one_nothing_that_is_there() -> None:
    driver = EmulatedDriver()
    mine, right = rigs(driver, {"": "reference", "blk.0.ffn": "cuda-streamed", "blk.2": "cuda-streamed"})
    backend = mine.backends["cuda-streamed"]
    assert isinstance(backend, StreamedBackend)
    seq, other = mine.kv.alloc(), right.kv.alloc()
    crossed = []
    assert backend.crossed == 0
    for i in range(5):
        close(mine.logits(seq, tokens(1, i)), right.logits(other, tokens(1, i)))
        crossed.append(backend.crossed)
    ops = [op for op in mine.graph.ops if in_scope(op.scope, "blk.0.ffn") or in_scope(op.scope, "blk.2")]
    size = backend.resident_bytes(backend.wants(ops))
    # Once, and some of it for the next one; then what lies in the ring is not asked for again.
    assert crossed[0] <= 2 * size
    assert crossed[4] - crossed[3] <= size
    mine.close()
    right.close()


@pytest.mark.usefixtures("all_cross")
def test_what_crosses_takes_memory_of_the_host() -> None:
    stays, crosses = both_ways(EmulatedDriver())
    ops = rig(DENSE, {"reference": descriptor.create()}).graph.ops
    wanted = crosses.wants([op for op in ops if crosses.supports(op)])
    crossing = [use for use in wanted if use.use == "product"]
    assert crosses.resident_bytes(wanted) == sum(use.weight.nbytes for use in crossing)
    assert crosses.device_bytes(wanted) == 0 < stays.device_bytes(wanted)
    assert all(crosses.streams(use) for use in crossing)
    stays.close()
    crosses.close()


def room_of(backend: CudaBackend) -> int:
    own = backend.granted
    assert own
    return own.room


def test_the_window_is_no_room_for_weights() -> None:
    stays = emulated(EmulatedDriver(), 24 << 20, "cuda")
    before = room_of(stays)
    assert stays.streaming(before) is None, "a window as large as all"
    streaming = stays.streaming(1 << 20)
    assert streaming
    crosses, left = streaming
    assert stays.gpu.long_passes == (before - (2 << 20)) // 16
    assert left.room == before - (2 << 20) - stays.gpu.long_passes
    assert crosses.grant(None) is None
    crosses.close()
    stays.close()


def saved(file: Path, placed: dict[str, str]) -> Path:
    """A plan as people write it."""
    placements = [{"scope": scope, "backend": name, "why": "a test"} for scope, name in placed.items()]
    plans = [{"bucket": bucket, "threads": 1, "placements": placements} for bucket in BUCKETS]
    file.write_text(json.dumps({"format": 1, "plans": plans, "ubatch": 64}))
    return file


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("all_cross")
def test_a_model_that_is_larger_than_the_gpu_runs_on_all_three(tmp_path: Path) -> None:
    driver = EmulatedDriver()
    make = partial(emulated, driver, name="cuda")
    undo = registry.register(
        Descriptor("cuda", lambda: Available(""), make, preference=1000, own_memory=True)
    )
    placed = {"": "reference", "blk.0": "cuda-streamed", "blk.1": "cuda", "blk.3.ffn": "cuda-streamed"}
    vram = 20 << 20
    wishes = Wishes(plan=saved(tmp_path / "plan.json", placed))
    try:
        model = PlannedModel(
            open_model(model_file(DENSE)), Options(wishes, ("cuda", "reference"), ctx=64, vram=vram)
        )
    finally:
        undo()
    assert model.plans.backends == ["reference", "cuda-streamed", "cuda"]
    assert 0 < model.plans.devices["cuda"]["weights"] < WEIGHTS
    right, ids = rig(DENSE, {"reference": descriptor.create()}, context=64), tokens(20)
    found = model.step(Step((Chunk(model.alloc(), np.array(ids), np.arange(20)),)))
    close(found, right.logits(right.kv.alloc(), ids))
    assert driver.most_allocated + CONTEXT <= vram
    model.close()
    right.close()
    assert driver.closed


def on_host(driver: EmulatedDriver, nbytes: int) -> OnHost:
    memory = driver.pinned(nbytes)
    memory[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes)
    return OnHost(memory, (1, nbytes // 4), by_name("F32"))


@pytest.mark.parametrize("seed", range(20))
def test_blocks_in_any_order_are_whole_when_work_begins(seed: int) -> None:
    """Work that copies a block out of the ring always finds all of it, and only it."""
    driver, rng = EmulatedDriver(seed=seed), np.random.default_rng(seed)
    memory = CudaMemory(driver, 8 << 20)
    ring = WeightRing(memory, 64 << 10)
    weights = [on_host(driver, 4 * int(rng.integers(100, 5000))) for _ in range(12)]
    blocks = [ring.block([w]) for w in weights]
    seen = []
    for i in rng.integers(0, len(blocks), 60):
        block = blocks[i]
        out = driver.pinned(weights[i].nbytes)
        ring.need(block)
        driver.copy(int(out.ctypes.data), block.begin, len(out), memory.computing)
        ring.done(block)
        ring.ahead()
        seen.append((out, weights[i].memory))
    done = driver.event()
    driver.record(done, memory.computing)
    driver.synchronize(done)
    assert all((out == right).all() for out, right in seen)
    for block in blocks:
        ring.forget(block)
    memory.close()
    driver.close()


@pytest.mark.parametrize("seed", range(6))
def test_blocks_from_files_are_whole_in_any_order(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that come in an order that could not be known, from a disk that is late now and then."""
    monkeypatch.setattr(file_feed, "PIECE", 4096)
    driver, rng = EmulatedDriver(seed=seed), np.random.default_rng(seed)
    memory = CudaMemory(driver, 8 << 20)
    ring = WeightRing(memory, 64 << 10)
    uses = [in_file(tmp_path / f"{i}", int(rng.integers(3, 40)), rng) for i in range(10)]
    reader = SharedReader()
    ring.feed = FileFeed(memory, reader.read, lambda: None)
    blocks = [ring.block([InFile(use)]) for use in uses]
    order = [*range(10), *rng.integers(0, 10, 20).tolist(), *range(10)]
    seen = []
    for i in order:
        use = uses[i]
        out = driver.pinned(use.weight.nbytes)
        ring.need(blocks[i])
        driver.copy(int(out.ctypes.data), blocks[i].begin, len(out), memory.computing)
        ring.done(blocks[i])
        ring.ahead()
        seen.append((out, np.fromfile(tmp_path / f"{i}", np.uint8)))
    done = driver.event()
    driver.record(done, memory.computing)
    driver.synchronize(done)
    assert all((out == right).all() for out, right in seen)
    sizes = [uses[i].weight.nbytes for i in order]
    assert 10 * 4096 < ring.crossed <= sum(sizes), "what lies there need not come again"
    for block in blocks:
        ring.forget(block)
    ring.close()
    reader.close()
    memory.close()
    driver.close()


def in_file(path: Path, rows: int, rng: np.random.Generator) -> WeightUse:
    """A weight that is a file."""
    path.write_bytes(rng.integers(0, 256, rows * 1024, np.uint8).tobytes())
    part = Extent(str(path), 0, rows, 1024, 1024)
    return WeightUse(Weight(path.name, (rows, 256), by_name("F32"), (part,)), "product")


def test_what_follows_is_brought_ahead() -> None:
    """Also in the first round, as work is compiled in its order: only what comes first is late, and
    what comes after the last one, which is not known then. Asking again later brings nothing."""
    driver = EmulatedDriver()
    memory = CudaMemory(driver, 8 << 20)
    ring = WeightRing(memory, 40 << 10)
    blocks = [ring.block([on_host(driver, 16 << 10)]) for _ in range(4)]
    late = []
    for i in range(12):
        block = blocks[i % 4]
        late.append(not block.there)
        ring.need(block)
        ring.done(block)
        ring.ahead()
        crossed = ring.crossed
        ring.ahead()
        assert ring.crossed == crossed
    assert late == [True, False, False, False, True] + 7 * [False]
    assert ring.crossed <= (12 + 2) * (16 << 10), "nothing twice"
    for block in blocks:
        ring.forget(block)
    memory.close()
    driver.close()


def test_large_weights_cross_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them what others send gets its turn."""
    monkeypatch.setattr(weight_ring, "PIECE", 4096)
    driver = EmulatedDriver()
    memory = CudaMemory(driver, 8 << 20)
    ring = WeightRing(memory, 40 << 10)
    weight, sizes, copy = on_host(driver, 9000), list[int](), driver.copy
    weight.memory[:] = np.arange(9000) % 251

    def copied(target: int, source: int, nbytes: int, stream: Stream) -> None:
        sizes.append(nbytes)
        copy(target, source, nbytes, stream)

    monkeypatch.setattr(driver, "copy", copied)
    block = ring.block([weight])
    ring.need(block)
    found = driver.pinned(9000)
    copied(int(found.ctypes.data), block.parts[0][0], 9000, memory.computing)
    ring.done(block)
    driver.synchronize(block.left)
    assert sizes == [4096, 4096, 808, 9000]
    assert (found == weight.memory).all()
    assert ring.crossed == 9000
    ring.forget(block)


@pytest.mark.parametrize("seed", range(5))
def test_all_that_follows_and_has_room_is_there_after_any_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of several shapes, one after the other, some of which are forgotten; and in the end the same one
    again and again, for which each block is looked at once or twice, however many are on their way."""
    driver, rng = EmulatedDriver(seed=seed), np.random.default_rng(seed)
    memory = CudaMemory(driver, 8 << 20)
    ring = WeightRing(memory, 128 << 10)
    shapes = [
        [ring.block([on_host(driver, 1024 * int(rng.integers(1, 20)))]) for _ in range(n)] for n in (3, 12, 9)
    ]
    looks = 0
    met = RingBlock.met

    def counted(block: RingBlock, others: Iterable[RingBlock]) -> list[RingBlock]:
        nonlocal looks
        looks += 1
        return met(block, others)

    monkeypatch.setattr(RingBlock, "met", counted)
    for turn in range(16):
        for block in shapes[int(rng.integers(len(shapes))) if turn < 12 else -1]:
            looks = 0
            ring.need(block)
            ring.done(block)
            ring.ahead()
            coming: list[RingBlock] = []
            follows = block.next
            while follows and not follows.is_forgotten and not any(follows.meets(b) for b in coming):
                assert follows.there
                coming.append(follows)
                follows = follows.next
        if turn == 8:
            for block in shapes.pop(0):
                ring.forget(block)
    assert 0 < looks <= 12, "of the last one of a pass"
    for block in [block for shape in shapes for block in shape]:
        ring.forget(block)
    memory.close()
    driver.close()


@needs_compiler
@pytest.mark.usefixtures("all_cross")
def test_what_is_measured_crosses_in_every_run() -> None:
    """As in a pass, where other layers come in between, however few weights there are."""
    driver, graph, times = EmulatedDriver(), graph_of(DENSE), list[float]()
    stays, crosses = both_ways(driver)
    backends: dict[str, Backend] = {"cuda": stays, "cuda-streamed": crosses}
    kv = KvCache(kv_shapes(graph), by_name("F16"), 256, 4, 64)
    prober = Prober(graph, backends, WeightStore(backends), kv, WorkTimes(), 256)
    ops = tuple(op for op in graph.ops if in_scope(op.scope, "blk.0.ffn.gate"))
    submit, runs = CudaRunner.submit, list[int]()

    def counted(self: CudaRunner, work: Pass) -> Done:
        found = submit(self, work)
        runs.append(crosses.crossed)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaRunner, "submit", counted)
        prober.measure(Trial("a test", "a form", (ops,), "cuda-streamed", 1, 1), times.append)
    size = crosses.resident_bytes(crosses.wants(ops))
    assert len(runs) > 2
    assert runs == [size * (i + 1) for i in range(len(runs))]
    stays.close()
    crosses.close()


def test_what_is_forgotten_is_not_brought() -> None:
    """Also where a block that made room since was followed by it."""
    driver = EmulatedDriver()
    memory = CudaMemory(driver, 8 << 20)
    ring = WeightRing(memory, 40 << 10)
    blocks = [ring.block([on_host(driver, 16 << 10)]) for _ in range(4)]
    for block in blocks:
        ring.need(block)
        ring.done(block)
    assert not blocks[0].there
    assert blocks[0].next is blocks[1]
    ring.forget(blocks[1])
    crossed = ring.crossed
    ring.need(blocks[0])
    ring.done(blocks[0])
    ring.ahead()
    assert ring.crossed == crossed + (16 << 10)
    for block in (blocks[0], *blocks[2:]):
        ring.forget(block)
    memory.close()
    driver.close()


def test_what_is_needed_at_once_must_fit() -> None:
    driver = EmulatedDriver()
    memory = CudaMemory(driver, 8 << 20)
    ring = WeightRing(memory, 64 << 10)
    with pytest.raises(BackendError, match="needed at once, and 64 KiB of GPU memory are kept"):
        ring.block([on_host(driver, 40 << 10), on_host(driver, 40 << 10)])
    memory.close()
    driver.close()


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("all_cross")
def test_with_one_engine_nothing_waits_behind_weights_that_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results, rows and choices come home by kernels; only weights, and long inputs, are copied."""
    driver = EmulatedDriver(engines=1)
    mine, right = rigs(driver, {"": "cuda-streamed", "token_embd": "cuda"})
    copy, home = driver.copy, list[int]()

    def copied(target: int, source: int, nbytes: int, stream: Stream) -> None:
        if driver._device.holds(source, nbytes) and driver._pinned.holds(target, nbytes):
            home.append(nbytes)
        copy(target, source, nbytes, stream)

    monkeypatch.setattr(driver, "copy", copied)
    seq, other = mine.kv.alloc(), right.kv.alloc()
    for i, n in enumerate([7, 1, 40, 1]):
        close(mine.logits(seq, tokens(n, i)), right.logits(other, tokens(n, i)))
    mine.kv.settle()
    rows = [
        np.frombuffer(raw, np.float32)
        for kv, s in ((mine.kv, seq), (right.kv, other))
        for raw in kv.export(s, 9)
    ]
    for x, y in zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True):
        close(x, y)
    assert home == []
    mine.close()
    right.close()


def test_layers_that_are_too_large_together_cross_call_by_call() -> None:
    graph, made = graph_of(DENSE), emulated(name="cuda", driver=EmulatedDriver())
    ffn = [op for op in graph.ops if in_scope(op.scope, "blk.0.ffn")]
    whole, least = made.device_bytes(made.wants(ffn)), made.most_needed_at_once(graph.ops[1:-1])
    assert whole / 2 < least < whole, "two of three matrices are read at once"
    own = made.grant(made.gpu.least + 2 * whole + 2 * least)
    assert own
    backends: dict[str, Backend] = {"cuda": made}
    after = with_streaming(graph, backends, {"cuda": own}, lambda ops: 0)
    assert own.room - after["cuda"].room == 2 * least + made.gpu.long_passes
    crosses = backends["cuda-streamed"]
    assert all(crosses.supports(op) for op in ffn)
    made.close()
    crosses.close()


MIXTRAL = cases_hf.MIXTRAL[0]


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("all_cross")
@pytest.mark.parametrize("experts", first([2, 1, 4]))
def test_a_mixture_that_is_too_large_crosses_some_experts_at_a_time(experts: int) -> None:
    """In passes of few tokens and of many; the window has room for `experts` of six, twice."""
    graph, driver = graph_of(MIXTRAL), EmulatedDriver()
    ops = [op for op in graph.ops if isinstance(op.attrs, Moe)]
    each = expert_bytes(ops[0])
    stays, crosses = both_ways(driver, experts * each)
    assert all(map(crosses.supports, ops))
    parts = crosses._in_groups(ops[:1])
    assert sum(op.attrs.held for op in parts if isinstance(op.attrs, Moe)) == 6
    assert len([op for op in parts if op.kind == "moe"]) == -(-6 // experts)
    whole = sum(w.nbytes for op in ops for w in op.weights[1:4])
    wanted = crosses.wants(ops)
    assert len(set(wanted)) == len(wanted)
    assert crosses.resident_bytes(wanted) == whole, "each expert once, and routers stay"
    backends: dict[str, Backend] = {"cuda": stays, "cuda-streamed": crosses, "reference": descriptor.create()}
    placed = {"": "reference"} | {op.scope: "cuda-streamed" for op in ops}
    mine = rig(MIXTRAL, backends, placed, context=256, ubatch=64)
    right = rig(MIXTRAL, {"reference": descriptor.create()}, context=256, ubatch=64)
    a, b = mine.kv.alloc(), right.kv.alloc()
    crossed = []
    for i, n in enumerate((3, 1, 40, 1, 2)):
        close(mine.logits(a, tokens(n, i)), right.logits(b, tokens(n, i)))
        crossed.append(crosses.crossed)
    assert crossed[-1] - crossed[-2] <= whole + crosses.gpu.window
    mine.close()
    right.close()
    assert driver.closed


def test_a_mixture_of_any_size_may_cross_if_an_expert_has_room() -> None:
    graph, made = graph_of(MIXTRAL), emulated(name="cuda", driver=EmulatedDriver())
    op = next(op for op in graph.ops if isinstance(op.attrs, Moe))
    whole, each = made.device_bytes(made.wants([op])), expert_bytes(op)
    others = max(made.most_needed_at_once([o]) for o in graph.ops[1:] if not isinstance(o.attrs, Moe))
    assert max(2 * each, others) < whole
    own = made.grant(made.gpu.least + 4 * max(2 * each, others) + (64 << 10))
    assert own
    backends: dict[str, Backend] = {"cuda": made}
    after = with_streaming(graph, backends, {"cuda": own}, lambda ops: 0)
    crosses = backends["cuda-streamed"]
    assert isinstance(crosses, StreamedBackend)
    assert crosses.supports(op)
    assert own.room // 4 - 1024 <= crosses.gpu.window // 2 < whole
    assert after["cuda"].room < own.room
    made.close()
    crosses.close()
