"""The C library's attention, for each set of instructions that this CPU has, against numpy's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend import Available, Floats, Pass, Segment, SequencePart
from hetrun.backends import llamacpp
from hetrun.backends.llamacpp import kernels as module
from hetrun.backends.llamacpp.backend import LlamacppBackend
from hetrun.backends.llamacpp.kernels import FIELDS, LEVELS, AttentionLayer, Kernels, PassPart, partial_size
from hetrun.backends.reference.attention import attend, attention
from hetrun.graph import KvShape, Op, Value
from hetrun.graph.ops import Attention
from hetrun.graph.quant import QuantType, by_name
from hetrun.memory.kv.cache import KvCache

AT_ONCE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
BUILT = module.kernels()
pytestmark = pytest.mark.skipif(BUILT is None, reason="hetrun was installed without a C compiler")


def library() -> Kernels:
    assert BUILT is not None
    return BUILT


@dataclass(frozen=True)
class Given:
    """One sequence of a pass: what its query rows see, which begins at a position of the text."""

    position: int
    length: int
    rows: int
    seed: int = 0


@dataclass(frozen=True)
class Shape:
    """A layer."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_type: str = "F16"
    window: int = 0
    softcap: float = 0.0

    @property
    def quant(self) -> QuantType:
        return by_name(self.kv_type)

    @property
    def attrs(self) -> Attention:
        scale = 0.7 * self.head_dim**-0.5
        return Attention(
            0, self.heads, self.kv_heads, self.head_dim, scale, self.window, softcap=self.softcap
        )


@dataclass
class Numbers:
    """What a sequence has: stored keys and values, and queries. One seed gives one text's numbers."""

    keys: np.ndarray
    values: np.ndarray
    queries: Floats


@cache
def text(shape: Shape, seed: int) -> Numbers:
    """Numbers for 500 positions; longer texts begin again."""
    rng = np.random.default_rng(seed)
    width = shape.kv_heads * shape.head_dim
    keys, values = (shape.quant.quantise(rng.standard_normal((500, width), dtype=np.float32)) for _ in "kv")
    return Numbers(keys, values, rng.standard_normal((500, shape.heads * shape.head_dim), dtype=np.float32))


def numbers(shape: Shape, s: Given) -> Numbers:
    whole, at = text(shape, s.seed), np.arange(s.position, s.position + s.length) % 500
    return Numbers(whole.keys[at], whole.values[at], whole.queries[at[s.length - s.rows :]])


def expected(shape: Shape, s: Given, of: Callable[[Floats], Floats] = lambda values: values) -> Floats:
    """What numpy makes of a sequence; `of` its values instead of these."""
    mine, width = numbers(shape, s), shape.kv_heads * shape.head_dim
    k, v = (
        shape.quant.dequantise(x, width).reshape(s.length, shape.kv_heads, shape.head_dim)
        for x in (mine.keys, mine.values)
    )
    ends = np.arange(s.length - s.rows + 1, s.length + 1)
    return attend(shape.attrs, mine.queries, k, of(v), ends)


def computed(
    shape: Shape, company: list[Given], level: int = 0, threads: int = 1, slots: int | None = None
) -> list[Floats]:
    """What the kernel makes of a pass, by sequence."""
    lib, attrs = library(), shape.attrs
    each = [numbers(shape, s) for s in company]
    # A row of something else between the sequences, which must not be read.
    other = np.full((1, each[0].keys.shape[1]), 0x7F, np.uint8)
    keys, values = (
        np.concatenate([x for n in each for x in (other, getattr(n, name))]) for name in ("keys", "values")
    )
    queries = np.concatenate([n.queries for n in each])
    out = np.zeros_like(queries)
    sequences = np.zeros((len(company), FIELDS), np.int64)
    sequences[:, 1] = [s.length for s in company]
    sequences[:, 0] = np.cumsum(sequences[:, 1] + 1) - sequences[:, 1]
    sequences[:, 2] = [s.position for s in company]
    sequences[:, 4] = [s.rows for s in company]
    sequences[:, 3] = np.cumsum(sequences[:, 4]) - sequences[:, 4]
    ends = np.concatenate([np.arange(s.length - s.rows + 1, s.length + 1) for s in company])
    counters = np.zeros(2 + len(company) * shape.kv_heads, np.int32)
    part = PassPart(
        n=len(company),
        sequences=sequences.ctypes.data,
        ends=ends.ctypes.data,
        window=shape.window,
        counters=counters.ctypes.data,
    )
    memory = np.full(lib.plan(part) * shape.heads * partial_size(shape.head_dim), np.nan, np.float32)
    part.memory = memory.ctypes.data
    slots = slots or threads
    size = lib.scratch(max(s.rows for s in company), shape.heads, shape.kv_heads, shape.head_dim)
    scratch = np.full(size * slots, np.nan, np.float32)
    layer = AttentionLayer(
        pass_part=ctypes.pointer(part),
        keys=keys.ctypes.data,
        values=values.ctypes.data,
        key_stride=keys.shape[1],
        value_stride=values.shape[1],
        head_bytes=keys.shape[1] // shape.kv_heads,
        type=shape.quant.ggml_id,
        head_dim=shape.head_dim,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        queries=queries.ctypes.data,
        out=out.ctypes.data,
        query_stride=queries.shape[1],
        out_stride=out.shape[1],
        scratch=scratch.ctypes.data,
        scratch_size=size,
        slots=slots,
        level=level,
        scale=attrs.scale,
        softcap=attrs.softcap,
    )
    call = AT_ONCE(lib.address)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda i: call(None, i, threads, ctypes.addressof(layer)), range(threads)))
    assert not counters.any()  # ready for the next layer
    return np.split(out, np.cumsum([s.rows for s in company])[:-1])


def close(a: Floats, b: Floats, size: Floats | None = None) -> bool:
    """`size`: of what was added up, where numbers cancel; `b` without."""
    return bool(np.square(a - b).sum() <= 1e-11 * np.square(b if size is None else size).sum())


levels = st.integers(0, BUILT.best if BUILT else 0)
givens = st.builds(
    lambda before, rows, position, seed: Given(position, before + rows, rows, seed),
    st.integers(0, 300),
    st.integers(1, 20),
    st.sampled_from((0, 0, 1, 100, 127, 128, 4000, 4096, 5100)),
    st.integers(0, 3),
)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_type = draw(st.sampled_from(("F32", "F16", "Q8_0")))
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    dims = (32, 64, 96, 128) if kv_type == "Q8_0" else (1, 16, 33, 64, 80, 128)
    window, softcap = draw(st.sampled_from((0, 0, 1, 50, 200))), draw(st.sampled_from((0.0, 0.0, 1.5, 30.0)))
    return Shape(group * kv_heads, kv_heads, draw(st.sampled_from(dims)), kv_type, window, softcap)


@settings(max_examples=40, deadline=None)
@given(shapes(), st.lists(givens, min_size=1, max_size=5), levels, st.integers(1, 3))
def test_the_kernel_computes_what_numpy_does(
    shape: Shape, company: list[Given], level: int, threads: int
) -> None:
    found = computed(shape, company, level, threads)
    assert all(close(f, expected(shape, s)) for f, s in zip(found, company, strict=True))


@settings(max_examples=20, deadline=None)
@given(shapes(), st.lists(givens, min_size=2, max_size=4), levels, st.integers(2, 4))
def test_a_result_is_the_same_bits_in_any_company_and_with_any_number_of_threads(
    shape: Shape, company: list[Given], level: int, threads: int
) -> None:
    together = computed(shape, company, level, threads)
    for found, s in zip(together, company, strict=True):
        assert np.array_equal(found, computed(shape, [s], level)[0])


@settings(max_examples=20, deadline=None)
@given(shapes(), givens, levels)
def test_a_token_has_the_same_bits_alone_and_behind_others_of_its_pass(
    shape: Shape, s: Given, level: int
) -> None:
    # A pass keeps what its first row sees; a pass of one row begins later, where there is a window.
    start = 0 if not shape.window else max(0, s.position + s.length - s.rows + 1 - shape.window)
    s = replace(s, position=start, length=s.position + s.length - start)
    found = computed(shape, [s], level)[0]
    for row in range(s.rows):
        end = s.position + s.length - s.rows + row + 1
        begin = max(0, end - shape.window) if shape.window else s.position
        alone = computed(shape, [replace(s, position=begin, length=end - begin, rows=1)], level)[0]
        assert np.array_equal(found[row : row + 1], alone)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from((16, 64, 80)),
    st.integers(2, 5),
    st.sampled_from((0, 0, 40, 200)),
    st.sampled_from((0.0, 0.0, 30.0)),
    st.builds(Given, st.integers(0, 200), st.integers(32, 400), st.integers(2, 32)),
    levels,
)
def test_many_rows_take_halves_differently_and_have_the_same_bits(
    head_dim: int, group: int, window: int, softcap: float, s: Given, level: int
) -> None:
    shape = Shape(2 * group, 2, head_dim, "F16", window, softcap)
    if window:
        s = replace(s, position=0)
    found = computed(shape, [s], level, 2)[0]
    assert close(found, expected(shape, s))
    for row in (0, s.rows - 1):
        end = s.position + s.length - s.rows + row + 1
        begin = max(0, end - window) if window else s.position
        alone = computed(shape, [replace(s, position=begin, length=end - begin, rows=1)], level)[0]
        assert np.array_equal(found[row : row + 1], alone)


@pytest.mark.parametrize("level", range(BUILT.best + 1 if BUILT else 0), ids=LEVELS.__getitem__)
@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 36),
    st.integers(2, 32),
    st.sampled_from(("F16", "Q8_0", "F32")),
    st.sampled_from((0, 0, 700, 3000)),
    st.lists(st.builds(Given, st.just(0), st.integers(32, 1200), st.integers(1, 32)), max_size=2),
)
def test_keys_that_a_row_does_not_see_change_no_bit(
    level: int, chunk: int, rows: int, kv_type: str, window: int, others: list[Given]
) -> None:
    """A pass that reaches into another piece of keys has more of them than its first rows see."""
    shape = Shape(16, 2, 32, kv_type, window)  # many heads: a sum that differs may be rounded to the same
    first = chunk * 128 - rows // 2 + 1  # keys that the first row sees
    start = max(0, first - window) if window else 0
    whole = Given(start, first + rows - 1 - start, rows)
    found = computed(shape, [*others, whole], level, 2)[-1]
    for row in {0, rows // 2 - 1, rows // 2, rows - 1}:
        begin = max(0, first + row - window) if window else 0
        alone = computed(shape, [Given(begin, first + row - begin, 1)], level)[0]
        assert np.array_equal(found[row : row + 1], alone)


@pytest.mark.parametrize("level", range(BUILT.best + 1 if BUILT else 0), ids=LEVELS.__getitem__)
def test_long_texts(level: int) -> None:
    """Behind 4096 keys chunks are longer; and a window has short ones everywhere."""
    for window in (0, 3000):
        company = [Given(0, 9000, 2, 1), Given(0, 4097, 1, 2), Given(0, 130, 1, 3)]
        shape = Shape(2, 1, 32, window=window)
        found = computed(shape, company, level, 2)
        assert all(close(f, expected(shape, s)) for f, s in zip(found, company, strict=True))


def test_threads_that_have_no_memory_leave_the_work_to_others() -> None:
    shape, s = Shape(4, 2, 64), Given(0, 300, 1)
    assert np.array_equal(computed(shape, [s], threads=5, slots=2)[0], computed(shape, [s])[0])


@pytest.mark.parametrize("kv_type", ["F16", "Q8_0"])
def test_numbers_of_any_size_are_read_as_they_are(kv_type: str) -> None:
    """Also the smallest halves there are, and scales that are such."""
    shape = Shape(1, 1, 32, kv_type)
    for level in range(library().best + 1):
        for size in (3e-8, 1e-6, 1e-4, 1.0, 6e4):
            raw = shape.quant.quantise(np.full((1, 32), size, np.float32))
            mine = Numbers(raw * 0, raw, np.ones((1, 32), np.float32))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(f"{__name__}.numbers", lambda *_, mine=mine: mine)
                found = computed(shape, [Given(0, 1, 1)], level)[0]
            assert np.array_equal(found, shape.quant.dequantise(raw, 32))


@pytest.fixture
def backend() -> Iterator[LlamacppBackend]:
    made = LlamacppBackend()
    yield made
    made.close()


@pytest.mark.parametrize("kv_type", ["F16", "Q8_0"])
def test_one_graph_serves_a_growing_text(backend: LlamacppBackend, kv_type: str) -> None:
    attrs = Attention(0, 4, 2, 64, 0.1)
    kv = KvCache({0: KvShape(2, 64, 0)}, by_name(kv_type), 1024, 1, 512)
    values = tuple(Value(name, width, "tokens") for name, width in (("q", 256), ("k", 128), ("v", 128)))
    op = Op("attention", values, Value("out", 256, "tokens"), (), attrs, "test")
    segment = Segment("test", backend.name, (op,), op.inputs, (op.out,), "the test says so")
    rng, seq, runner, booked = np.random.default_rng(1), kv.alloc(), None, []
    for skipped in (0, 5, 122, 1, 400):  # tokens that are there before the one of the pass
        if skipped:
            (rows,) = kv.extend(seq, skipped)
            for table in kv.tables[0]:
                table.write(rows, rng.standard_normal((skipped, 128), dtype=np.float32))
        at = kv.length(seq)
        slots = kv.extend(seq, 1)
        part = SequencePart(0, 1, 0, 1, kv.views(seq, at, at + 1))
        work = Pass(np.array([7]), np.array([at]), slots, np.array([0]), (part,))
        for value in op.inputs:
            work.values[value.name] = rng.standard_normal((1, value.width), dtype=np.float32)
        runner = runner or backend.compile(segment, work.shape, {}, kv)
        runner.submit(work)
        inputs = [work.values[v.name] for v in op.inputs]
        assert close(work.values["out"], attention(op, inputs, [], work, kv))
        booked.append(backend.overhead_bytes)
    assert booked[0] < booked[-1]  # partial results of 530 tokens take more than those of one
    assert runner is not None
    runner.close()
    assert backend.overhead_bytes == 0


def test_a_library_from_other_sources_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAYOUT", module.LAYOUT + 1)
    assert module.kernels.__wrapped__() is None
    monkeypatch.setattr(module, "LAYOUT", module.LAYOUT - 1)
    monkeypatch.setattr(module, "NAME", "not_there.so")
    assert module.kernels.__wrapped__() is None


def test_devices_say_whether_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = llamacpp.probe()
    assert isinstance(probe, Available)
    assert f"own kernels: attention by {LEVELS[library().best]}" in probe.detail
    monkeypatch.setattr(module, "kernels", lambda: None)
    monkeypatch.setattr(module, "products", lambda: None)
    probe = llamacpp.probe()
    assert isinstance(probe, Available)
    assert "no kernels of our own (they need a C compiler" in probe.detail
