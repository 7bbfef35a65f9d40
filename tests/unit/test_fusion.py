"""What llamacpp makes of a segment's ops: how many products and rotations, and of which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetrun.backend import WeightUse, use_of
from hetrun.backends.llamacpp.fusion import fuse, members, wants
from hetrun.graph import Constant, Extent, Op, Value, Weight
from hetrun.graph.ops import NONE, Attrs, Moe, RmsNorm, Rope
from hetrun.graph.quant import by_name
from hetrun.loader.weight_reader import FileReader

X = Value("x", 64, "tokens")
ROPE = Rope(n_heads=2, head_dim=16, n_rot=16, base=1e4, interleaved=False)


def weight(name: str, rows: int, cols: int, quant: str = "F32", first: float = 0.0) -> Weight:
    kind = by_name(quant)
    numbers = np.arange(first, first + rows * cols, dtype=np.float32).reshape(rows, cols)
    return Weight(name, (rows, cols), kind, (Constant(kind.quantise(numbers).tobytes(), rows),))


def op(kind: str, name: str, inputs: Sequence[Value], weights: Sequence[Weight], attrs: Attrs = NONE) -> Op:
    width = weights[0].shape[0] if kind == "linear" else inputs[0].width
    return Op(kind, tuple(inputs), Value(name, width, inputs[0].rows), tuple(weights), attrs, "")


def linear(name: str, rows: int = 32, bias: str = "", quant: str = "F32") -> Op:
    biases = [weight(f"{name}.bias", 1, rows, bias, 100)] if bias else []
    return op("linear", name, [X], [weight(f"{name}.weight", rows, 64, quant), *biases])


def turned(of: Op, factors: Sequence[Weight] = (), attrs: Rope = ROPE) -> Op:
    return op("rope", f"{of.out.name}.turned", [of.out], factors, attrs)


def together(ops: Sequence[Op]) -> list[list[str]]:
    """The names of the results that are made together."""
    return [[o.out.name for o in members(item)] for item in fuse(ops)]


def test_products_of_one_input_are_one_and_so_are_their_rotations() -> None:
    q, k, v = linear("q"), linear("k"), linear("v")
    assert together([q, k, v, turned(q), turned(k)]) == [["q", "k", "v"], ["q.turned", "k.turned"]]


def test_products_with_biases_are_stacked_and_so_are_the_biases() -> None:
    q, k, v = linear("q", 32, "F32"), linear("k", 16, "F32"), linear("v", 16, "F32")
    ops = [q, k, v, turned(q), turned(k, attrs=replace(ROPE, n_heads=1))]
    assert together(ops) == [["q", "k", "v"], ["q.turned", "k.turned"]]
    product, bias = wants(ops)
    assert (product.use, product.weight.shape) == ("product", (64, 64))
    assert (bias.use, bias.weight.shape) == ("vector", (64, 1))
    raw = np.empty(bias.weight.nbytes, np.uint8)
    FileReader().read(bias.weight, raw)
    expected = np.concatenate([np.arange(100, 100 + n) for n in (32, 16, 16)])
    assert np.array_equal(raw.view(np.float32), expected)


def test_a_bias_in_a_file_is_stacked_as_it_lies_there() -> None:
    q, k = linear("q", 32, "F16"), linear("k", 32, "F16")
    parts = (Extent("file", 4096, 1, 64, 64),)
    q = replace(q, weights=(q.weights[0], replace(q.weights[1], parts=parts)))
    bias = wants([q, k])[1].weight
    assert bias.parts[0] == Extent("file", 4096, 32, 2, 2)
    assert bias.nbytes == 128


def test_products_stay_apart_with_and_without_bias_and_by_type() -> None:
    assert together([linear("q", bias="F32"), linear("k"), linear("v", bias="F32")]) == [["q", "v"], ["k"]]
    assert together([linear("q", bias="F32"), linear("k", bias="F16")]) == [["q"], ["k"]]
    assert together([linear("q"), linear("k", quant="F16"), linear("v")]) == [["q", "v"], ["k"]]


def test_a_bias_in_blocks_is_no_column() -> None:
    q, k = linear("q", bias="Q8_0"), linear("k", bias="Q8_0")
    assert together([q, k]) == [["q"], ["k"]]
    assert wants([q])[1] == WeightUse(q.weights[1], "vector")


def test_what_lies_between_keeps_rotations_apart() -> None:
    q, k = linear("q"), linear("k")
    gain = weight("gain", 1, 16)
    norms = [op("rms_norm", f"{o.out.name}.norm", [o.out], [gain], RmsNorm(1e-6, heads=2)) for o in (q, k)]
    ropes = [turned(n) for n in norms]
    found = together([q, k, *norms, *ropes])
    assert found == [["q", "k"], ["q.norm"], ["k.norm"], ["q.norm.turned"], ["k.norm.turned"]]


def test_rotations_by_other_angles_stay_apart() -> None:
    q, k = linear("q"), linear("k")
    other = replace(ROPE, base=1e6)
    assert together([q, k, turned(q), turned(k, attrs=other)])[1:] == [["q.turned"], ["k.turned"]]
    factors = [weight("factors", 1, 8)]
    assert together([q, k, turned(q, factors), turned(k)])[1:] == [["q.turned"], ["k.turned"]]
    assert together([q, k, turned(q, factors), turned(k, factors)])[1:] == [["q.turned", "k.turned"]]


def test_the_offset_of_a_norm_is_part_of_its_vector() -> None:
    gain = weight("gain", 1, 64)
    norm = op("rms_norm", "n", [X], [gain], RmsNorm(1e-6, offset=1.0))
    assert wants([norm]) == (WeightUse(gain, "vector", offset=1.0),)
    assert use_of(norm, 0) == WeightUse(gain, "vector")


def test_experts_are_wanted_as_matrices_and_their_router_in_floats() -> None:
    attrs = Moe(n_experts=4, n_used=2, n_ff=32, normalise=True)
    shapes = [(4, 64, "F16"), (128, 64, "Q8_0"), (128, 64, "Q8_0"), (256, 32, "Q8_0")]
    weights = [weight(f"w{i}", *shape) for i, shape in enumerate(shapes)]
    moe = op("moe", "y", [X], weights, attrs)
    experts = tuple(WeightUse(w, "experts", matrices=4) for w in weights[1:])
    assert wants([moe]) == (WeightUse(weights[0], "vector"), *experts)
    assert tuple(use_of(moe, i) for i in range(4)) == (WeightUse(weights[0], "product"), *experts)
