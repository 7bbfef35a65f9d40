"""What is computed inside of our own products, and when it is not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from hetrun.backend import WeightUse
from hetrun.backends.llamacpp.epilogues import join
from hetrun.backends.llamacpp.fusion import Fused, StackedProduct, fuse, members, uses
from hetrun.graph import Constant, Op, Value, Weight
from hetrun.graph.ops import NONE, Attrs, Gelu, RmsNorm
from hetrun.graph.quant import by_name

WIDTH = 64
STREAM, ATTENDED = Value("stream", WIDTH, "tokens"), Value("attended", WIDTH, "tokens")


def weight(name: str, rows: int) -> Weight:
    quant = by_name("F32")
    return Weight(name, (rows, WIDTH), quant, (Constant(bytes(rows * quant.row_bytes(WIDTH)), rows),))


def op(kind: str, name: str, inputs: Sequence[Value], rows: int = 0, attrs: Attrs = NONE) -> Op:
    weights = {"linear": (weight(f"{name}.weight", rows),), "rms_norm": (weight(f"{name}.gain", 1),)}.get(
        kind, ()
    )
    return Op(kind, tuple(inputs), Value(name, rows or inputs[0].width, "tokens"), weights, attrs, "")


def norm(name: str = "normed", of: Value = STREAM, heads: int = 1) -> Op:
    return op("rms_norm", name, [of], attrs=RmsNorm(1e-5, heads=heads))


def linear(name: str, of: Value, rows: int = WIDTH) -> Op:
    return op("linear", name, [of], rows)


def ours(use: WeightUse) -> bool:
    return "theirs" not in use.weight.name


def names(ops: Sequence[Op], kept: Collection[Value] = ()) -> list[set[str]]:
    """The names of the results that are made together."""
    return [{o.out.name for o in members(item)} for item in join(fuse(ops), kept, ours)]


def only(items: Sequence[Fused]) -> StackedProduct:
    (item,) = items
    assert isinstance(item, StackedProduct)
    return item


def test_a_feed_forward_part_is_two_products() -> None:
    n = norm()
    gate, up = linear("gate", n.out, 128), linear("up", n.out, 128)
    both = op("swiglu", "both", [gate.out, up.out])
    down = linear("down", both.out)
    total = op("add", "total", [STREAM, down.out])
    first, second = join(fuse([n, gate, up, both, down, total]), (total.out,), ours)
    assert isinstance(first, StackedProduct)
    assert isinstance(second, StackedProduct)
    assert (first.input, first.norm, first.gate, first.last) == (STREAM, n, both, both)
    assert first.added is None
    assert (second.input, second.norm, second.added, second.last) == (both.out, None, STREAM, total)
    assert [u.use for u in uses(first)] == ["product", "vector"]
    assert uses(first)[1].weight is n.weights[0]


def test_a_norm_goes_into_every_product_that_reads_it() -> None:
    n = norm()
    q, v = linear("q", n.out), linear("v", n.out, 32)
    apart = [StackedProduct((o,), o.weights[0], None) for o in (q, v)]  # of two types, say
    joined = join([n, *apart], (), ours)
    assert [p.norm for p in joined if isinstance(p, StackedProduct)] == [n, n]
    assert len(joined) == 2


@pytest.mark.parametrize("reader", ["another op", "a product of ggml", "another segment", "heads"])
def test_a_norm_that_others_read_stays(reader: str) -> None:
    n = norm(heads=2 if reader == "heads" else 1)
    ops = [n, linear("q", n.out)]
    if reader == "another op":
        ops.append(op("relu", "relu", [n.out]))
    if reader == "a product of ggml":
        ops.append(linear("theirs", n.out, 32))
    kept = (n.out,) if reader == "another segment" else ()
    assert {"normed"} in [{o.out.name for o in members(i)} for i in join(unfused(ops), kept, ours)]


def unfused(ops: Sequence[Op]) -> list[Fused]:
    return [StackedProduct((o,), o.weights[0], None) if o.kind == "linear" else o for o in ops]


@pytest.mark.parametrize("why", ["the other way round", "one is read elsewhere", "odd", "kept", "bias"])
def test_a_gate_stays_outside_if_it_is_not_of_two_halves_alone(why: str) -> None:
    rows = 40 if why == "odd" else 64
    gate, up = linear("gate", STREAM, rows), linear("up", STREAM, rows)
    halves = [up.out, gate.out] if why == "the other way round" else [gate.out, up.out]
    ops = [gate, up, op("swiglu", "both", halves)]
    if why == "one is read elsewhere":
        ops.append(op("relu", "relu", [up.out]))
    fused = fuse(ops)
    if why == "bias":
        first = fused[0]
        assert isinstance(first, StackedProduct)
        fused[0] = StackedProduct(first.ops, first.weight, weight("bias", 1))
    joined = join(fused, (up.out,) if why == "kept" else (), ours)
    assert {"both"} in [{o.out.name for o in members(i)} for i in joined]


@pytest.mark.parametrize("exact", [False, True])
def test_a_gelu_gate_goes_in_as_well(exact: bool) -> None:
    gate, up = linear("gate", STREAM), linear("up", STREAM)
    both = op("geglu", "both", [gate.out, up.out], attrs=Gelu(exact))
    assert only(join(fuse([gate, up, both]), (), ours)).gate == both


def test_a_sum_stays_outside_if_the_other_side_comes_later() -> None:
    a, b = linear("a", STREAM), linear("b", ATTENDED)
    total = op("add", "total", [a.out, b.out])
    # It can go into the later of the two only.
    assert names([a, b, total]) == [{"a"}, {"b", "total"}]


def test_a_sum_with_itself_and_a_result_that_is_kept_stay_outside() -> None:
    a = linear("a", STREAM)
    assert names([a, op("add", "twice", [a.out, a.out])]) == [{"a"}, {"twice"}]
    assert names([a, op("add", "total", [STREAM, a.out])], [a.out]) == [{"a"}, {"total"}]


def test_products_of_ggml_take_nothing_in() -> None:
    n = norm()
    theirs = linear("theirs", n.out)
    ops = [n, theirs, op("add", "total", [STREAM, theirs.out])]
    assert names(ops) == [{"normed"}, {"theirs"}, {"total"}]
