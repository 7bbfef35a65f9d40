"""Layers with states on the emulator, against numpy: every width and company."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from hetrun.backend import Backend, Floats, Pass, Segment
from hetrun.backend.conformance.runner import brought_in
from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.reference import descriptor
from hetrun.graph import Constant, Op, Value, Weight
from hetrun.graph.ops import CausalConv, DeltaNet
from hetrun.graph.quant import by_name
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.kv.states import NONE
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.kernels import needs_compiler
from tests.support.tiers import exhaustive
from tests.unit.test_recurrent_kernels import (
    NOTHING,
    Given,
    Layer,
    Tokens,
    error,
    kept,
    kind_of,
    numbers,
    parts,
    states,
    total,
)

pytestmark = needs_compiler
CLOSE = 1e-5  # of a number, in parts of a usual one: some roundings of float32
F32 = by_name("F32")

NETS = {
    "one number": DeltaNet(0, 2, 2, 24, 1, log=True),
    "neighbours": DeltaNet(0, 2, 4, 32, 16, log=True),
    "odd tiled": DeltaNet(0, 3, 6, 24, 45, tiled=True, log=True),
    "usual": DeltaNet(0, 1, 2, 128, 128, log=True),
    "usual tiled": DeltaNet(0, 2, 4, 128, 20, tiled=True),
    "mamba": DeltaNet(0, 2, 4, 128, 20, log=True, mamba=True),
    "uneven": DeltaNet(0, 1, 2, 150, 20, log=True, eps=1e-5),
    "widest": DeltaNet(0, 1, 1, 500, 9, log=True),
}
CONVOLUTIONS = {
    "of two": CausalConv(0, 2, 16),
    "of three": CausalConv(0, 3, 37),
    "of three, with a bias": CausalConv(0, 3, 37, silu=False),
    "of four": CausalConv(0, 4, 300),
    "of eight": CausalConv(0, 8, 129),
}
LAYERS: dict[str, Layer] = {**NETS, **CONVOLUTIONS}
# Some are as many as are made ready at once or as a thread has, and one more or less.
COMPANIES: dict[str, tuple[Tokens, ...]] = {
    "a first token": (Tokens(1, NONE, {1: 0}),),
    "a token": (Tokens(1, 3, {1: 0}),),
    "two": (Tokens(2, 3, {1: 1, 2: 0}),),
    "17": (Tokens(17, 5, {1: 1, 7: 2, 16: 3, 17: 0}),),
    "33": (Tokens(33, NONE, {8: 1, 9: 2, 33: 0}),),
    "in place": (Tokens(20, 5, {20: 5}), Tokens(2, 6, {1: 7, 2: 6})),
    "several": (Tokens(3, NONE, {1: 0, 2: 1, 3: 2}), Tokens(1, 9, {1: 11}), Tokens(33, 10, {7: 12, 33: 13})),
    "forks": (Tokens(2, 8, {2: 0}), Tokens(5, 8, {5: 1}), Tokens(1, 8, {1: 2})),
}
BEGUN = 100  # tokens that a state which is read knows


@cache
def device() -> CudaBackend:
    made = emulated()
    made.start()
    return made


@cache
def reference() -> Backend:
    return descriptor.create()


def weight(numbers: Floats, name: str) -> Weight:
    rows, cols = numbers.shape
    return Weight(name, (rows, cols), F32, (Constant(np.ascontiguousarray(numbers).tobytes(), rows),))


def op_of(a: Layer, data: Given) -> Op:
    inputs = tuple([Value(f"x{i}", x.shape[1], "tokens") for i, x in enumerate(data.x)])
    weights = tuple([weight(w, f"w{i}") for i, w in enumerate(data.w)])
    out = a.width if isinstance(a, CausalConv) else a.v_width
    return Op(kind_of(a), inputs, Value("out", out, "tokens"), weights, a, "test")


def computed(a: Layer, data: Given, tokens: Sequence[Tokens], kv: KvCache, on: Backend, begun: int) -> Floats:
    """What a backend makes of it; states in the cache change."""
    op = op_of(a, data)
    positions = np.concatenate([np.arange(t.n) + begun * (t.read != NONE) for t in tokens])
    work = Pass(NOTHING, positions, (), NOTHING, parts(tokens))
    work.tokens = np.zeros(len(positions), np.int64)
    work.values.update({v.name: x for v, x in zip(op.inputs, data.x, strict=True)})
    segment = Segment("test", on.name, (op,), op.inputs, (op.out,), "the test says so")
    with brought_in(on, op) as buffers:
        runner = on.compile(segment, work.shape, buffers, kv)
        runner.submit(work).wait()
        found = work.values["out"].copy()
        runner.close()
    assert kv.states
    for part in work.parts:
        assert part.states
        for i in np.flatnonzero(part.states.write != NONE).tolist():
            kv.states.settle(int(part.states.write[i]), int(positions[part.a + i]) + 1)
    return found


def costly(name: str, company: str) -> bool:
    """What only `make test-all` has: programs that no other test needs, and every second of the others."""
    return name == "widest" or (list(LAYERS).index(name) + list(COMPANIES).index(company)) % 2 == 1


CASES = [
    pytest.param(name, company, marks=[exhaustive] if costly(name, company) else [])
    for name in LAYERS
    for company in COMPANIES
]


@pytest.mark.parametrize(("name", "company"), CASES)
def test_a_layer_is_as_the_reference_says(name: str, company: str) -> None:
    a, tokens = LAYERS[name], COMPANIES[company]
    data, theirs, ours = numbers(a, total(tokens)), states(a), states(a)
    right = computed(a, data, tokens, theirs, reference(), BEGUN)
    assert error(computed(a, data, tokens, ours, device(), BEGUN), right) < CLOSE
    written = {slot for t in tokens for slot in t.write.values()}
    for slot, (found, wanted) in enumerate(zip(kept(a, ours), kept(a, theirs), strict=True)):
        if slot in written:
            assert error(found, wanted) < CLOSE, slot
        else:
            assert np.array_equal(found, wanted), slot


@pytest.mark.parametrize("name", ["odd tiled", "usual", "of four"])
@pytest.mark.parametrize("read", [NONE, 5])
def test_the_bits_are_the_same_however_a_text_is_cut(name: str, read: int) -> None:
    a, marks = LAYERS[name], {10: 1, 17: 2}
    data, whole, cut = numbers(a, 40), states(a), states(a)
    right = computed(a, data, [Tokens(40, read, {**marks, 40: 0})], whole, device(), BEGUN)
    found = []
    for begin, end in pairwise((0, 1, 3, 17, 18, 36, 40)):
        # Between two passes the state lies where it is in the end, or where it is kept.
        write = {p - begin: slot for p, slot in marks.items() if begin < p <= end}
        write.setdefault(end - begin, 0)
        tokens, now = [Tokens(end - begin, read, write)], begin + BEGUN * (begin > 0 and read != NONE)
        found.append(computed(a, data.rows(begin, end), tokens, cut, device(), now or BEGUN))
        read = write[end - begin]
    assert np.array_equal(np.concatenate(found), right)
    assert np.array_equal(kept(a, whole), kept(a, cut))


def test_what_no_kernel_can_have_is_left_to_others() -> None:
    for a in (CausalConv(0, 9, 16), DeltaNet(0, 1, 1, 513, 8, log=True)):
        assert not device().supports(op_of(a, numbers(a, 1)))
