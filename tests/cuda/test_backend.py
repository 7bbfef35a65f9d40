"""The CUDA backend as a whole on the emulator: beside other backends, with little memory, again and again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hetrun import LLM, SamplingParams
from hetrun.backend import Available, Backend, Descriptor, PassShape, Segment, TopLogits, registry
from hetrun.backends.cuda import fusion, kv_mirror, runner
from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.cuda.int8 import launch as int8
from hetrun.backends.cuda.lowering import CudaEmitter, CudaPlace
from hetrun.backends.reference import descriptor
from hetrun.errors import BackendError, BudgetError, Cancelled
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.graph import Op, Value
from hetrun.loader.open_model import open_model
from hetrun.loader.weight_reader import FileReader
from hetrun.planner.options import Options, Wishes
from tests.cuda.emulated.device import NAME, emulated
from tests.cuda.emulated.driver import CONTEXT, EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler
from tests.models.tiny import TinyLlama
from tests.support.rig import Rig, graph_of, model_file, rig
from tests.support.tiers import exhaustive

pytestmark = [needs_compiler, pytest.mark.slow]  # every kernel is built
MODEL = TinyLlama("cuda", layers=3, embd=128, ffn=128, heads=4, kv_heads=2, head_dim=32)
VOCABULARY = 100


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCABULARY, n)]


def both(
    placed: dict[str, str] | None = None,
    driver: EmulatedDriver | None = None,
    grant: int | None = None,
    windows: Sequence[int] = (),
    context: int = 256,
) -> tuple[Rig, Rig]:
    """A model with layers on the GPU, and the same on the reference."""
    backends: dict[str, Backend] = {"cuda": emulated(driver, grant, "cuda")}
    if placed:
        backends["reference"] = descriptor.create()
    here = {"reference": descriptor.create()}
    mine = rig(MODEL, backends, placed, windows=windows, context=context, ubatch=64)
    return mine, rig(MODEL, here, windows=windows, context=context, ubatch=64)


def close(found: np.ndarray, right: np.ndarray, error: float = 1e-4) -> None:
    assert found.shape == right.shape
    assert np.square(found - right).sum() <= error * np.square(right).sum()


# What rounding makes of three layers of a model that shows more of it than a trained one.
IN_BF16, IN_BYTES = 5e-4, 3e-3


def cuda(r: Rig) -> CudaBackend:
    found = r.backends["cuda"]
    assert isinstance(found, CudaBackend)
    return found


PLACES = [
    {"": "cuda"},
    {"": "reference", "blk.1": "cuda"},
    {"": "cuda", "blk.1.attn": "reference"},
    {"": "cuda", "blk.0.ffn": "reference", "blk.2.attn.score": "reference"},
    {"": "reference", "blk.0.attn.q": "cuda", "blk.1.ffn": "cuda", "blk.2": "cuda"},
]


# In `make test` places take turns at having windows.
SEEN = [
    pytest.param(placed, windows, id=f"{placed}-{name}", marks=[exhaustive] if (i + j) % 2 else [])
    for i, placed in enumerate(PLACES)
    for j, (name, windows) in enumerate([("all", ()), ("windows", (40, 0, 40))])
]


@pytest.mark.parametrize(("placed", "windows"), SEEN)
def test_wherever_layers_are_it_is_the_same_model(placed: dict[str, str], windows: tuple[int, ...]) -> None:
    mine, right = both(placed, windows=windows)
    seqs = [(mine.kv.alloc(), right.kv.alloc()) for _ in range(2)]
    for i, n in enumerate([7, 1, 1, 1, 40, 1, 64, 2, 1]):
        text = tokens(n, seed=i)
        mine_steps = [(a, text, range(n)) for a, _ in seqs[: 1 + i % 2]]
        right_steps = [(b, text, range(n)) for _, b in seqs[: 1 + i % 2]]
        close(mine.step(*mine_steps), right.step(*right_steps))
    mine.close()
    right.close()


def test_forks_and_cuts_and_rows_of_others() -> None:
    """The device has copies of rows; whatever happens to them at home is seen."""
    mine, right = both({"": "reference", "blk.1": "cuda", "blk.2.attn": "cuda"})
    rng = np.random.default_rng(5)
    pairs = [(mine.kv.alloc(), right.kv.alloc())]
    for i in range(30):
        at = int(rng.integers(len(pairs)))
        a, b = pairs[at]
        length = mine.kv.length(a)
        what = rng.integers(4)
        if what == 0 and length and len(pairs) < 5:
            n = int(rng.integers(1, length + 1))
            pairs.append((mine.kv.fork(a, n), right.kv.fork(b, n)))
            continue
        if what == 1 and length:
            n = int(rng.integers(0, length))
            mine.kv.truncate(a, n)
            right.kv.truncate(b, n)
        if what == 2 and len(pairs) > 1:
            pairs.pop(at)
            mine.kv.free(a)
            right.kv.free(b)
            continue
        n = int(rng.choice([1, 1, 3, 33]))
        if mine.kv.length(a) + n <= 250:
            text = tokens(n, seed=i)
            close(mine.logits(a, text), right.logits(b, text))
    mine.close()
    right.close()


def test_what_has_left_a_device_comes_home_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = EmulatedDriver()
    mine, right = both(driver=driver)
    a, b = mine.kv.alloc(), right.kv.alloc()
    for i in range(3):
        close(mine.logits(a, tokens(1, i)), right.logits(b, tokens(1, i)))
    assert mine.kv.arrivals

    def failing(event: int) -> bool:
        raise BackendError("no more")

    for call in ("synchronize", "happened"):
        monkeypatch.setattr(driver, call, failing)
    rows = (kv.export(seq, 3) for kv, seq in ((mine.kv, a), (right.kv, b)))
    for x, y in zip(*(map(lambda raw: np.frombuffer(raw, np.float32), r) for r in rows), strict=True):
        close(x, y)


def test_a_recording_that_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that only notes what it is given takes no other work."""
    driver = EmulatedDriver()
    mine, right = both(driver=driver)
    a, b = mine.kv.alloc(), right.kv.alloc()
    close(mine.logits(a, tokens(1)), right.logits(b, tokens(1)))
    launch = driver.launch

    def failing(*given: object) -> None:
        raise BackendError("no more")

    monkeypatch.setattr(driver, "launch", failing)
    with pytest.raises(BackendError, match="no more"):
        mine.logits(a, tokens(1))
    monkeypatch.setattr(driver, "launch", launch)
    close(mine.logits(a, tokens(1, 1)), right.logits(b, tokens(1, 1)))
    mine.close()
    right.close()


def test_passes_are_as_long_as_the_device_has_room_for() -> None:
    """Whatever the host's cores could do."""
    ops = graph_of(MODEL).ops
    much = emulated(EmulatedDriver(1 << 30))
    assert much.most_at_once(ops) == 0
    much.grant(1 << 30)
    assert much.most_at_once(ops) == 2048
    little = emulated(EmulatedDriver(64 << 20), 24 << 20)
    assert little.most_at_once(ops) in (0, 512, 1024)


QUANTISED = replace(MODEL, name="cuda-q4_0", quant="Q4_0")


@pytest.mark.parametrize("exact", [False, True])
def test_long_passes_round_to_bytes_where_results_may_be_fast(exact: bool) -> None:
    driver = EmulatedDriver()
    backend, reference = emulated(driver, name="cuda"), {"reference": descriptor.create()}
    backend.exact = exact
    mine, right = rig(QUANTISED, {"cuda": backend}, ubatch=64), rig(QUANTISED, reference, ubatch=64)
    a, b = mine.kv.alloc(), right.kv.alloc()
    for n in (50, 1):
        found, expected = mine.step((a, tokens(n), [n - 1])), right.step((b, tokens(n), [n - 1]))
        close(found, expected, IN_BF16 if exact else IN_BYTES)
    in_bytes = {"round_int8", "products_64", "gated_64"}
    assert in_bytes & set(driver.launches) == (set() if exact else in_bytes)
    assert ("unpack_bf16" in driver.launches) == exact
    roundings = {backend.rounding(op) for op in graph_of(QUANTISED).ops if op.kind == "linear"}
    assert roundings == ({2.4e-3} if exact else {6e-3})
    mine.close()
    right.close()


@pytest.mark.parametrize("placed", [{"": "cuda"}, {"": "reference", "blk.1": "cuda"}], ids=str)
def test_sums_are_made_inside_of_long_products(placed: dict[str, str]) -> None:
    """Of what others read as well, too."""
    driver = EmulatedDriver()
    mine, right = both(placed, driver)
    a, b = mine.kv.alloc(), right.kv.alloc()
    for i in range(3):
        found, expected = mine.step((a, tokens(40, i), [39])), right.step((b, tokens(40, i), [39]))
        close(found, expected, IN_BF16)
    # What a segment passes on lies where others find it, so its last sum is a kernel of its own.
    assert driver.launches.count("add") == (0 if placed[""] == "cuda" else 3)
    mine.close()
    right.close()


def test_very_long_passes_are_unpacked_where_bf16_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, unpacked in (((9, 0), True), ((8, 9), False)):
        monkeypatch.setattr(int8, "FEW_ENOUGH", 40)
        driver = EmulatedDriver()
        driver.device = replace(driver.device, capability=capability)
        backend = emulated(driver, name="cuda")
        backend.exact = False
        mine = rig(QUANTISED, {"cuda": backend}, ubatch=64)
        mine.step((mine.kv.alloc(), tokens(41), [40]))
        assert ("unpack_bf16" in driver.launches) == unpacked
        assert ("products_64" in driver.launches) != unpacked
        mine.close()


@pytest.mark.parametrize("placed", [{"": "cuda"}, {"": "reference", "blk.1": "cuda"}], ids=str)
def test_rows_come_home_while_others_are_computed(
    placed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piece by piece, with few places to land; whatever needs them before has them."""
    monkeypatch.setattr(kv_mirror, "PIECE", 1 << 13)
    monkeypatch.setattr(kv_mirror, "MOST_LANDINGS", 3)
    mine, right = both(placed)
    rng, late = np.random.default_rng(0), 0
    pairs: list[tuple[int, int]] = []
    for i in range(25):
        pairs.append((mine.kv.alloc(), right.kv.alloc()))
        a, b = pairs[-1]
        for n in (int(rng.choice([1, 5, 30, 60])), 1, 1):
            close(mine.logits(a, tokens(n, i)), right.logits(b, tokens(n, i)))
        late += bool(mine.kv.arrivals)
        if i % 3 == 0:
            pairs.append((mine.kv.fork(a), right.kv.fork(b)))
            close(mine.logits(pairs[-1][0], [3]), right.logits(pairs[-1][1], [3]))
        while len(pairs) > 4:
            a, b = pairs.pop(int(rng.integers(len(pairs))))
            mine.kv.free(a)
            right.kv.free(b)
    assert late > 10 or "reference" in placed.values()
    for a, b in pairs:
        rows = (kv.export(seq, kv.length(seq)) for kv, seq in ((mine.kv, a), (right.kv, b)))
        for x, y in zip(*(map(lambda raw: np.frombuffer(raw, np.float32), r) for r in rows), strict=True):
            close(x, y)
    assert not mine.kv.arrivals
    mine.close()
    right.close()


def test_what_runs_again_is_recorded() -> None:
    driver = EmulatedDriver()
    mine, right = both(driver=driver)
    a, b = mine.kv.alloc(), right.kv.alloc()
    for i in range(40):  # past the end of a slab
        close(mine.logits(a, tokens(1, i)), right.logits(b, tokens(1, i)))
    assert driver.replays == 39
    mine.close()
    right.close()
    assert driver.closed


def test_the_work_of_a_shape_is_written_down_once_if_its_values_fit_where_others_lay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []

    class Counted(CudaEmitter):
        def __init__(self, place: CudaPlace, segment: Segment, shape: PassShape, *where: int) -> None:
            written.append(shape.tokens)
            super().__init__(place, segment, shape, *where)

    monkeypatch.setattr(runner, "CudaEmitter", Counted)
    mine, right = both()
    a, b = mine.kv.alloc(), right.kv.alloc()
    for n in (16, 7, 12, 1, 16):
        close(mine.logits(a, tokens(n, n)), right.logits(b, tokens(n, n)))
    assert written == [16, 16, 7, 12, 1], "of the first no one knew how much it takes"
    mine.close()
    right.close()


def test_what_does_not_depend_on_the_length_of_a_prompt_is_found_out_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused = list[int]()

    def counted(ops: Sequence[Op], kept: Sequence[Value]) -> Sequence[fusion.Item]:
        fused.append(len(ops))
        return fuse(ops, kept)

    fuse = fusion.fuse
    mine, _ = both()
    monkeypatch.setattr(fusion, "fuse", counted)
    a = mine.kv.alloc()
    for n in (20, 21, 30, 25):
        mine.logits(a, tokens(n, n))
    assert len(fused) == 1
    mine.close()


def test_an_answer_takes_eight_kernels_a_layer() -> None:
    """Each costs about two microseconds, however little it does."""
    driver = EmulatedDriver()
    mine, right = both(driver=driver)
    a, b = mine.kv.alloc(), right.kv.alloc()
    for _ in range(2):
        driver.launches.clear()
        close(mine.logits(a, tokens(1)), right.logits(b, tokens(1)))
    of_layer = ["rms_norm", "few_1", "turn_and_write", "attend_few", "few_1"]
    of_layer += ["rms_norm", "gated_1", "few_1"]
    # Of the last layer only what is wanted is computed; what was written goes home.
    around = ["lookup", "angles", "select_rows", "select_rows", "few_1", "rms_norm", "few_1", "pack_rows"]
    assert sorted(driver.launches) == sorted(MODEL.layers * of_layer + around)
    mine.close()
    right.close()


def test_rows_that_have_no_room_are_dropped_and_come_again() -> None:
    """Two sequences, and room for the rows of little more than one."""
    driver = EmulatedDriver()
    mine, right = both(driver=driver, context=512)
    memory = cuda(mine).gpu.memory
    seqs = [(mine.kv.alloc(), right.kv.alloc()) for _ in range(2)]
    for a, b in seqs:
        close(mine.logits(a, tokens(20)), right.logits(b, tokens(20)))
    slab = 32 * 3 * 2 * 2 * 32 * 4  # rows, layers, keys and values, heads, numbers, bytes
    filler = []
    while memory.arena.left > 0:  # everything but room for four slabs
        try:
            filler.append(memory.arena.take(slab, "a filler"))
        except BudgetError:
            break
    for address in filler[-4:]:
        memory.give(address)
    dropped = 0
    original = memory.give_up

    def give_up() -> bool:
        nonlocal dropped
        dropped += 1
        return original()

    memory.give_up = give_up
    for i in range(8):
        a, b = seqs[i % 2]
        close(mine.logits(a, tokens(20, i)), right.logits(b, tokens(20, i)))
    assert dropped
    for address in filler[:-4]:
        memory.give(address)
    mine.close()
    right.close()


def test_memory_is_what_was_granted() -> None:
    driver = EmulatedDriver(64 << 20)
    mine, _ = both(driver=driver, grant=24 << 20)
    mine.logits(mine.kv.alloc(), tokens(50))
    assert driver.most_allocated + CONTEXT <= 24 << 20
    mine.close()


@pytest.mark.parametrize(("grant", "words"), [
    (2 << 20, "--vram 2 MiB is too little: CUDA itself and what kernels work in take"),
    (80 << 20, "--vram 80 MiB is more than is free of an emulated GPU: 64 MiB of 64 MiB"),
])  # fmt: skip
def test_a_grant_that_cannot_work_is_refused(grant: int, words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        emulated(EmulatedDriver(64 << 20), grant).start()


def test_what_weights_take_is_known_before() -> None:
    made = emulated(grant=32 << 20)
    wanted = made.wants(graph_of(MODEL).ops)
    made.start()
    before, reader = made.gpu.memory.arena.used, FileReader()
    for use in wanted:
        made.upload(use, reader.read)
    reader.close()
    assert made.device_bytes(wanted) == made.gpu.memory.arena.used - before > 0
    assert made.resident_bytes(wanted) == 0
    made.close()


@pytest.mark.parametrize("nbytes", [None, 32 << 20])
def test_a_grant_says_what_is_left_for_weights(nbytes: int | None) -> None:
    driver = EmulatedDriver(64 << 20)
    made = emulated(driver)
    own = made.gpu.grant(nbytes)
    assert own.limit == (nbytes or CONTEXT + int(0.95 * (driver.device.memory - CONTEXT)))
    assert driver.most_allocated == 0
    made.start()
    assert driver.most_allocated <= own.limit - CONTEXT
    assert 0 < own.room < made.gpu.memory.arena.left
    made.close()


@pytest.mark.parametrize("asked", [None, 32 << 20])
def test_what_others_took_before_it_started_is_theirs(asked: int | None) -> None:
    driver = EmulatedDriver(64 << 20)
    made = emulated(driver)
    before = made.gpu.grant(asked)
    driver.others = 40 << 20
    made.start()
    after = made.granted
    assert after
    assert after.limit <= 24 << 20 < before.limit
    assert driver.most_allocated + CONTEXT <= after.limit
    assert 0 < after.room < made.gpu.memory.arena.left
    made.close()


def test_models_on_one_gpu_take_what_they_need() -> None:
    """Where no limit says how much may be taken, the second one finds what the first does not need."""
    first = EmulatedDriver(80 << 20)
    mine, right = both(driver=first)
    a, b = mine.kv.alloc(), right.kv.alloc()
    close(mine.logits(a, tokens(9)), right.logits(b, tokens(9)))
    second = EmulatedDriver(80 << 20)
    second.others = first.held_memory()
    theirs, again = both(driver=second)
    c, d = theirs.kv.alloc(), again.kv.alloc()
    first.others = second.held_memory()
    for i in range(3):
        close(mine.logits(a, tokens(40, i)), right.logits(b, tokens(40, i)))
        close(theirs.logits(c, tokens(40, i)), again.logits(d, tokens(40, i)))
    assert first.most_allocated + second.most_allocated <= 80 << 20
    own = cuda(mine).granted
    assert own
    assert first.most_allocated < own.limit / 2
    for model in (mine, right, theirs, again):
        model.close()


def test_what_others_take_while_it_runs_is_not_promised_any_more() -> None:
    driver = EmulatedDriver(128 << 20)
    made = emulated(driver)
    made.start()
    before = made.granted
    assert before
    driver.others = driver._free
    memory = made.gpu.memory
    with pytest.raises(BudgetError, match="no room in GPU memory for weights"):
        memory.take(40 << 20, "weights")
    after = made.granted
    assert after
    assert after.limit == driver.held_memory() < before.limit
    assert after.room < before.room
    made.close()


def test_where_others_leave_nothing_it_says_so() -> None:
    driver = EmulatedDriver(64 << 20)
    made = emulated(driver, 32 << 20)
    driver.others = 62 << 20
    with pytest.raises(BudgetError, match="MiB of GPU memory that are free are too little"):
        made.start()
    made.close()


def test_a_model_is_opened_within_its_vram() -> None:
    driver, vram = EmulatedDriver(64 << 20), 24 << 20
    add = Descriptor(NAME, lambda: Available(""), lambda: emulated(driver), preference=1000, own_memory=True)
    remove = registry.register(add)
    try:
        options = Options(Wishes(), (NAME, "reference"), ctx=64, vram=vram)
        model = PlannedModel(open_model(model_file(MODEL)), options)
    finally:
        remove()
    assert model.plans.backends == [NAME]
    assert model.plans.memory["weights"] == 0
    assert model.plans.devices[NAME]["limit"] == vram
    right = rig(MODEL, {"reference": descriptor.create()}, context=64)
    ids = np.arange(20)
    found = model.step(Step((Chunk(model.alloc(), ids, ids),)))
    close(found, right.logits(right.kv.alloc(), ids.tolist()))
    assert driver.most_allocated + CONTEXT <= vram
    model.close()
    right.close()
    assert driver.closed


def test_a_gpu_that_was_only_asked_is_closed() -> None:
    driver = EmulatedDriver()
    made = emulated(driver, 32 << 20)
    made.close()
    assert driver.closed


def test_a_model_that_has_no_room_is_refused_by_name() -> None:
    made, reader = emulated(grant=24 << 20), FileReader()
    made.start()
    memory = made.gpu.memory
    memory.take(memory.arena.left - (32 << 10), "others")
    with pytest.raises(BudgetError, match=r"no room in GPU memory for \S+: .* grant more with --vram"):
        deque(made.upload(use, reader.read) for use in made.wants(graph_of(MODEL).ops))
    reader.close()
    made.close()


def test_who_cancels_is_heard() -> None:
    mine, right = both()
    seq = mine.kv.alloc()
    mine.logits(seq, tokens(5))
    cuda(mine).cancel()
    with pytest.raises(Cancelled):
        mine.logits(seq, tokens(1))
    cuda(mine).rearm()
    other = right.kv.alloc()
    right.logits(other, tokens(5))
    close(mine.logits(seq, tokens(1)), right.logits(other, tokens(1)))
    mine.close()
    right.close()


def test_few_rows_have_the_same_bits_in_any_company() -> None:
    mine, _ = both()
    backend = cuda(mine)
    most = backend.alike(mine.graph.ops)
    seqs = [mine.kv.alloc() for _ in range(4)]
    texts = [tokens(n, seed=n) for n in (9, 4, 12, 7)]
    assert sum(map(len, texts)) <= most
    together = mine.step(*[(s, t, range(len(t))) for s, t in zip(seqs, texts, strict=True)])
    at = 0
    for text in texts:
        alone, seq = [], mine.kv.alloc()
        for token in text:
            alone.append(mine.logits(seq, [token])[0])
        assert (np.stack(alone) == together[at : at + len(text)]).all()
        at += len(text)
    mine.close()


@pytest.mark.parametrize("k", [1, 40])
def test_the_greatest_logits_come_alone(k: int) -> None:
    """Of several sequences and shapes, again and again; steps that want whole rows still get them."""
    mine, right = both()
    pairs = [(mine.kv.alloc(), right.kv.alloc()) for _ in range(2)]
    # As few tokens as products do not round: logits that are nearly the same keep their order.
    for i, n in enumerate([9, 1, 30, 16, 1, 1]):
        ids = np.array(tokens(n, i))
        wanted = np.array([n - 1])
        some = pairs[: 1 + i % 2]
        found = mine.executor.choose(Step(tuple(Chunk(a, ids, wanted) for a, _ in some)), k)
        whole = right.executor.run(Step(tuple(Chunk(b, ids, wanted) for _, b in some)))
        assert isinstance(found, TopLogits)
        assert found.ids.shape == (len(some), k)
        order = np.argsort(-whole, axis=1)[:, :k]
        close(found.logits, np.take_along_axis(whole, order, 1))
        close(np.take_along_axis(whole, found.ids.astype(np.int64), 1), found.logits)
    a, b = pairs[0]
    close(mine.logits(a, tokens(3)), right.logits(b, tokens(3)))
    mine.close()
    right.close()


def test_where_memory_is_full_rows_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What chooses needs memory in the middle of a pass: there is another way for it."""
    mine, right = both()
    memory = cuda(mine).gpu.memory
    take = memory.take

    def full(nbytes: int, what: str) -> int:
        if what == "greatest of rows":
            raise BudgetError("no room")
        return take(nbytes, what)

    monkeypatch.setattr(memory, "take", full)
    a, b = mine.kv.alloc(), right.kv.alloc()
    for i in range(2):
        ids = np.array(tokens(5, i))
        found = mine.executor.choose(Step((Chunk(a, ids, np.array([4])),)), 40)
        assert not isinstance(found, TopLogits)
        close(found, right.executor.run(Step((Chunk(b, ids, np.array([4])),))))
    mine.close()
    right.close()


@pytest.mark.parametrize(("long", "sleeps"), [(0.0, True), (1e9, False)])
def test_waiting_for_a_long_pass_keeps_no_core_busy(
    monkeypatch: pytest.MonkeyPatch, long: float, sleeps: bool
) -> None:
    monkeypatch.setattr("hetrun.backends.cuda.runner.LONG_S", long)
    driver = EmulatedDriver()
    mine, _ = both(driver=driver)
    seq = mine.kv.alloc()
    for i in range(3):
        mine.logits(seq, tokens(1, i))
    assert bool(driver.sleeping) is sleeps
    assert len(driver.sleeping) <= 1, "from the first long pass of a shape on"
    mine.close()


def test_what_cublas_works_in_counts() -> None:
    """32 MiB on a GPU; the emulator has less, so that tests are quick."""
    made = emulated(EmulatedDriver(128 << 20, workspace=32 << 20))
    with pytest.raises(BudgetError, match="--vram 24 MiB is too little"):
        made.grant(24 << 20)
    own = made.grant(made.gpu.least + (2 << 20))
    assert own
    assert 1 << 20 <= own.room <= 2 << 20
    made.start()
    assert made.gpu.memory.arena.left >= own.room
    made.close()


def test_where_the_host_makes_the_logits_rows_are_whole() -> None:
    mine, _ = both({"": "cuda", "output": "reference"})
    step = Step((Chunk(mine.kv.alloc(), np.array(tokens(5)), np.array([4])),))
    found = mine.executor.choose(step, 40)
    assert not isinstance(found, TopLogits)
    assert found.shape == (1, mine.graph.logits.width)
    mine.close()


def test_answers_are_chosen_on_the_device() -> None:
    driver = EmulatedDriver()
    add = Descriptor(NAME, lambda: Available(""), lambda: emulated(driver), preference=1000)
    remove = registry.register(add)
    prompt, usual = tokens(12), SamplingParams(max_tokens=4, seed=3, ignore_eos=True)
    greedy, scored = replace(usual, temperature=0.0), replace(usual, temperature=0.0, logprobs=1)
    try:
        with LLM(str(model_file(MODEL)), backends=[NAME], ctx=64, spec="off") as llm:
            llm.generate([prompt], usual)
            assert driver.launches.count("greatest") == 4
            found = llm.generate([prompt], greedy)[0].tokens
            chosen = driver.launches.count("greatest")
            assert chosen == 8
            assert llm.generate([prompt], scored)[0].tokens == found
            assert driver.launches.count("greatest") == chosen, "scores need whole rows"
    finally:
        remove()
