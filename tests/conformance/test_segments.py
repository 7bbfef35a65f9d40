"""Ops that backends fuse, and what they hold of them: whole segments against the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from hetrun.backend import Segment
from hetrun.backend.conformance.cases import EXACT, FLOORS, HALF, QUANT_LIMITS, Company, OpCase, single
from hetrun.backend.conformance.random_weights import packed
from hetrun.backend.conformance.runner import REFERENCE, nmse, prepared
from hetrun.graph import Constant, Op, Rows, Value, Weight
from hetrun.graph.ops import NONE, Attrs, Gelu, LayerNorm, Moe, RmsNorm, Rope
from hetrun.graph.quant import by_name
from hetrun.loader.weight_reader import FileReader
from tests.conformance.test_ops import BUILT, BUILT_FOR_EXPERTS, EMULATED, create, device, others
from tests.support.tiers import exhaustive, pairwise

X = Value("x", 256, "tokens")
needs_ggml = pytest.mark.skipif("llamacpp" not in others(), reason="llama-cpp-python is not installed")
COMPANIES = (single(1), single(5), single(64), Company(((100, 3, 1), (7, 2, 2))))


@dataclass(slots=True)
class Writer:
    """Ops one behind the other, with random weights."""

    rng: np.random.Generator
    ops: list[Op] = field(default_factory=list)

    def weight(self, rows: int, cols: int, quant: str) -> Weight:
        numbers = self.rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(cols**-0.5)
        raw = packed(numbers, by_name(quant))
        name = f"{len(self.ops)}.{rows}x{cols}"
        return Weight(name, (rows, cols), by_name(quant), (Constant(raw.tobytes(), rows),))

    def op(
        self,
        kind: str,
        inputs: Sequence[Value],
        width: int,
        attrs: Attrs = NONE,
        shapes: Sequence[tuple[int, int, str]] = (),
    ) -> Value:
        rows: Rows = "wanted" if kind == "select" else inputs[0].rows
        out = Value(f"v{len(self.ops)}", width, rows)
        weights = tuple(self.weight(*shape) for shape in shapes)
        self.ops.append(Op(kind, tuple(inputs), out, weights, attrs, "test"))
        return out

    def linear(self, x: Value, width: int, quant: str, bias: str = "") -> Value:
        shapes = [(width, x.width, quant), *([(1, width, bias)] if bias else [])]
        return self.op("linear", [x], width, shapes=shapes)


ROPE = Rope(n_heads=4, head_dim=32, n_rot=32, base=1e4, interleaved=False)
KV_ROPE = replace(ROPE, n_heads=2)


def biased(w: Writer, quant: str, bias: str) -> list[Value]:
    """qwen2: q, k and v with biases."""
    q, k, v = (w.linear(X, n, quant, bias) for n in (128, 64, 64))
    return [w.op("rope", [q], 128, ROPE), w.op("rope", [k], 64, KV_ROPE), v]


def partly_biased(w: Writer, quant: str, bias: str) -> list[Value]:
    """Biases for q and v only, of two types."""
    q, k, v = w.linear(X, 128, quant, bias), w.linear(X, 64, quant), w.linear(X, 64, quant, "F16")
    return [w.op("rope", [q], 128, ROPE), w.op("rope", [k], 64, KV_ROPE), v]


def with_head_norms(w: Writer, quant: str, bias: str) -> list[Value]:
    """qwen3 and gemma3: q and k are normalised head by head before they turn."""
    q, k, v = (w.linear(X, n, quant) for n in (128, 64, 64))
    q = w.op("rms_norm", [q], 128, RmsNorm(1e-6, 1.0, 4), [(1, 32, bias)])
    k = w.op("rms_norm", [k], 64, RmsNorm(1e-6, 0.0, 2), [(1, 32, bias)])
    return [w.op("rope", [q], 128, ROPE), w.op("rope", [k], 64, KV_ROPE), v]


def gated(w: Writer, quant: str, bias: str) -> list[Value]:
    """Gate and up as one product, with biases."""
    gate, up = (w.linear(X, 96, quant, bias) for _ in range(2))
    return [w.op("geglu", [gate, up], 96, Gelu()), w.op("swiglu", [up, gate], 96)]


def gated_once(w: Writer, quant: str, bias: str) -> list[Value]:
    """Gate and up that nothing else reads."""
    gate, up = (w.linear(X, 256, quant, bias) for _ in range(2))
    return [w.linear(w.op("swiglu", [gate, up], 256), 64, quant)]


def mixture(w: Writer, quant: str, bias: str) -> list[Value]:
    """A block of qwen3moe, its last layer: only the wanted rows go on."""
    a = Moe(n_experts=16, n_used=4, n_ff=256, normalise=True, scale=0.7)
    x = w.op("select", [X], 256)
    h = w.op("rms_norm", [x], 256, RmsNorm(1e-6), [(1, 256, bias)])
    inner, down = (a.n_experts * a.n_ff, 256, quant), (a.n_experts * 256, a.n_ff, quant)
    y = w.op("moe", [h], 256, a, [(a.n_experts, 256, "F32"), inner, inner, down])
    return [w.op("add", [x, y], 256)]


def opt(w: Writer, quant: str, bias: str) -> list[Value]:
    """Layer norm, biases, relu."""
    h = w.op("layer_norm", [X], 256, LayerNorm(1e-5), [(1, 256, bias), (1, 256, bias)])
    return [w.linear(w.op("relu", [w.linear(h, 512, quant, bias)], 512), 256, quant, bias)]


Build = Callable[[Writer, str, str], list[Value]]
BLOCKS: Sequence[Build] = (biased, partly_biased, with_head_norms, gated, gated_once, mixture, opt)
# By the types of matrices and of vectors. Where there is a table of float16 in a block, it counts.
LIMITS: Mapping[tuple[str, str], float] = {
    ("F32", "F32"): 1e-6,
    ("F16", "BF16"): 2 * HALF,
    ("Q4_0", "F32"): 3 * QUANT_LIMITS["Q4_0"],
    ("Q8_0", "F32"): 3 * QUANT_LIMITS["Q8_0"],
    ("Q4_K", "F16"): 3 * QUANT_LIMITS["Q4_K"],
}


def block(build: Build, quant: str = "F32", bias: str = "F32") -> Segment:
    w = Writer(np.random.default_rng(7))
    writes = tuple(build(w, quant, bias))
    return Segment("test", "", tuple(w.ops), (X,), writes, "the test says so")


def run(name: str, segment: Segment, company: Company, threads: int = 1) -> list[np.ndarray]:
    """What the segment makes of the same numbers on any backend."""
    rng = np.random.default_rng(11)
    work, kv = prepared(OpCase("select", (256,), 256, company, EXACT), rng)
    work.values[X.name] = rng.standard_normal((len(work.tokens), X.width), dtype=np.float32)
    backend = device(name)
    backend.set_threads(threads)
    reader = FileReader()
    buffers = {use: backend.upload(use, reader.read) for use in backend.wants(segment.ops)}
    reader.close()
    runner = backend.compile(segment, work.shape, buffers, kv)
    runner.submit(work).wait()
    found = [work.values[v.name].copy() for v in segment.writes]
    runner.close()
    for buffer in buffers.values():
        backend.release(buffer)
    return found


def often(build: Build, types: tuple[str, str], backend: str) -> bool:
    """Whether `make test` may have it: it wants no program of the emulator that no other test does."""
    return backend != EMULATED or types[0] in (BUILT_FOR_EXPERTS if build is mixture else BUILT)


Row = tuple[Build, tuple[str, str], str, int]  # a block, types, a backend and its threads


def marked(backends: Sequence[str], threads: Sequence[int]) -> list[ParameterSet]:
    """The whole table for `make test-all`; for `make test` what has every two of its facts together."""
    table: list[Row] = [
        (build, types, backend, n)
        for build, types, backend, n in product(BLOCKS, LIMITS, backends, threads)
        if backend != EMULATED or n == 1  # it has no threads of the host's
    ]
    chosen = {id(row) for row in pairwise([row for row in table if often(*row[:3])], lambda row: row)}
    found = []
    for row in table:
        build, types, backend, n = row
        marks = [] if id(row) in chosen else [exhaustive]
        if backend == EMULATED:
            marks.append(pytest.mark.slow)
        said = f"{build.__name__}-{'-'.join(types)}-{n}-{backend}"
        found.append(pytest.param(build, types, backend, n, id=said, marks=marks))
    return found


@pytest.mark.parametrize(("build", "types", "backend", "threads"), marked(others(), (1, 2)))
def test_a_segment_is_what_its_ops_are(
    build: Build, types: tuple[str, str], backend: str, threads: int
) -> None:
    segment = block(build, *types)
    floor = FLOORS[device(backend).arithmetic].get("moe", 0.0)  # it has as many products as any block
    for company in COMPANIES:
        expected, found = run(REFERENCE, segment, company), run(backend, segment, company, threads)
        for value, a, b in zip(segment.writes, expected, found, strict=True):
            assert a.shape == b.shape
            assert nmse(a, b) <= max(LIMITS[types], floor), f"{value.name} with {company}"


@pytest.mark.parametrize(("build", "types", "backend", "threads"), marked([REFERENCE, *others()], (1,)))
def test_what_weights_take_is_known_before(
    build: Build, types: tuple[str, str], backend: str, threads: int
) -> None:
    made = create(backend)
    made.start()
    made.set_threads(threads)
    wanted = made.wants(block(build, *types).ops)
    reader = FileReader()
    assert made.resident_bytes(wanted) == sum(made.upload(use, reader.read).nbytes for use in wanted)
    made.close()


@needs_ggml
@pytest.mark.parametrize("quant", ["Q4_0", "Q4_K", "Q6_K"])
def test_weights_that_are_brought_in_by_slices_are_the_same(
    quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetrun.backends.llamacpp import weight_memory

    segments = [block(build, quant) for build in (biased, mixture)]
    found = []
    for scratch in (weight_memory.SCRATCH, 100_000, 5_000):  # all at once; some experts; one, and 32 rows
        monkeypatch.setattr(weight_memory, "SCRATCH", scratch)
        device.cache_clear()  # it would have the weights already
        found.append([value for s in segments for value in run("llamacpp", s, single(5))])
    for values in zip(*found, strict=True):
        assert all(np.array_equal(value, values[0]) for value in values)


@needs_ggml
def test_ggml_is_not_said_to_have_products_that_it_has_not() -> None:
    doubles = replace(by_name("F32"), name="F64", ggml_id=28, block_bytes=8)
    weight = Weight("w", (8, 8), doubles, (Constant(bytes(512), 8),))
    vector = Weight("b", (1, 8), doubles, (Constant(bytes(64)),))
    x, y = Value("x", 8, "tokens"), Value("y", 8, "tokens")
    llamacpp = device("llamacpp")
    assert not llamacpp.supports(Op("linear", (x,), y, (weight,), NONE, ""))
    assert not llamacpp.supports(Op("embed", (), y, (weight,), NONE, ""))
    assert not llamacpp.supports(Op("convolution", (x,), y, (), NONE, ""))
    assert llamacpp.supports(Op("rms_norm", (x,), y, (vector,), RmsNorm(1e-5), ""))
