"""The small kernels on the emulator, against numpy: norms, rotations, activations, rows, choices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
import pytest

from hetrun.backends.cuda import top_k
from hetrun.backends.cuda.driver import Argument
from hetrun.backends.cuda.moe import route_shared, routing_of
from hetrun.backends.cuda.programs import Source
from hetrun.backends.reference.activations import erf, silu
from hetrun.backends.reference.moe import route
from hetrun.graph.ops import Moe, MoreWeight
from tests.cuda.emulated.kernels import needs_compiler, run

pytestmark = needs_compiler
SMALL = Source("small")
MARGIN = 16
NULL = ctypes.c_void_p(None)
Given = Argument | np.ndarray | int | float


def placed(array: np.ndarray, aside: int = 0) -> np.ndarray:
    """A copy that begins `aside` numbers after a multiple of 16 bytes: with 0 it may be read as float4."""
    room = np.empty(array.size + 16, array.dtype)
    begin = (-room.ctypes.data % 16) // array.itemsize + aside
    found = room[begin : begin + array.size].reshape(array.shape)
    found[...] = array
    return found


def numbers(*shape: int, aside: int = 0, seed: int = 1) -> np.ndarray:
    return placed(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), aside)


@dataclass
class Result:
    """What a kernel writes; it may write nowhere else."""

    shape: tuple[int, ...]
    dtype: type = np.float32
    aside: int = 0
    room: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        size = int(np.prod(self.shape))
        self.room = placed(np.full(size + 2 * MARGIN, 113, self.dtype), self.aside)

    @property
    def array(self) -> np.ndarray:
        return self.room[MARGIN:-MARGIN].reshape(self.shape)

    def checked(self) -> np.ndarray:
        assert (self.room[:MARGIN] == 113).all()
        assert (self.room[-MARGIN:] == 113).all()
        return self.array


def each(name: str, result: Result, *arguments: Given, threads: int = 64, blocks: int = 3) -> np.ndarray:
    """A kernel for which it does not matter how many threads there are."""
    run(SMALL, name, (blocks,), threads, *arguments)
    return result.checked()


def long(n: int) -> ctypes.c_longlong:
    return ctypes.c_longlong(n)


def close(found: np.ndarray, right: np.ndarray, limit: float = 2e-6) -> None:
    assert np.abs(found - right).max() <= limit * max(1.0, float(np.abs(right).max()))


# --- norms


def rms(x: np.ndarray, w: np.ndarray, heads: int, eps: float, result: Result, threads: int) -> np.ndarray:
    shared = 4 * threads // 32
    arguments = x, w, result.array, ctypes.c_void_p(None), x.shape[1], heads, eps
    run(SMALL, "rms_norm", (len(x) * heads,), threads, *arguments, shared=shared)
    return result.checked()


@pytest.mark.parametrize("aside", [0, 1])
@pytest.mark.parametrize(
    ("width", "heads", "threads"), [(1, 1, 32), (64, 4, 32), (130, 2, 32), (300, 1, 64), (4096, 1, 512)]
)
def test_rms_norm(width: int, heads: int, threads: int, aside: int) -> None:
    x, w = 5 * numbers(7, width), numbers(width // heads, seed=2)
    found = rms(placed(x, aside), w, heads, 1e-3, Result(x.shape, aside=aside), threads)
    slices = x.astype(np.float64).reshape(7, heads, -1)
    right = slices / np.sqrt((slices**2).mean(-1, keepdims=True) + 1e-3) * w
    close(found, right.reshape(x.shape))


def test_a_norm_does_not_depend_on_other_rows_and_may_be_written_over_its_input() -> None:
    x, w = numbers(9, 260), numbers(260)
    together = rms(x, w, 1, 1e-5, Result(x.shape), 64)
    alone = rms(placed(x[5:6]), w, 1, 1e-5, Result((1, 260)), 64)
    assert (alone == together[5]).all()
    over = Result(x.shape)
    over.array[...] = x
    assert (rms(over.array, w, 1, 1e-5, over, 64) == together).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_gain", [False, True])
@pytest.mark.parametrize(("width", "threads"), [(3, 32), (768, 96)])
def test_layer_norm(width: int, threads: int, with_gain: bool, with_bias: bool) -> None:
    x, gain, bias = numbers(5, width) + 30, numbers(width, seed=2), numbers(width, seed=3)
    result = Result(x.shape)
    arguments = x, gain if with_gain else NULL, bias if with_bias else NULL, result.array, width, 1e-5
    run(SMALL, "layer_norm", (5,), threads, *arguments, shared=4 * threads // 32)
    z = x.astype(np.float64)
    z = (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + 1e-5)
    right = z * (gain if with_gain else 1) + (bias if with_bias else 0)
    close(result.checked(), right, 1e-5)


# --- rotations


def test_angles_are_rounded_once() -> None:
    positions = np.array([0, 1, 7, 4095, 131071, 1_000_003], np.int32)
    frequencies = 500000.0 ** (-2 * np.arange(24) / 48) / np.linspace(1, 8, 24)
    result = Result((6, 24, 2))
    each("angles", result, frequencies, positions, result.array, 1.25, 24, 6)
    angles = (positions[:, None] * frequencies).astype(np.float32).astype(np.float64)
    close(result.checked(), 1.25 * np.stack([np.cos(angles), np.sin(angles)], -1), 3e-7)


@pytest.mark.parametrize("token_of", [None, [3, 0, 5]])
def test_rows_grow_with_positions(token_of: list[int] | None) -> None:
    positions = np.array([0, 4095, 4096, 131071, 7, 1_000_003], np.int32)
    whose = np.array(token_of if token_of else range(6), np.int32)
    x, result = numbers(len(whose), 20), Result((len(whose), 20))
    each("grow", result, x, positions, whose if token_of else NULL, result.array, long(x.size), 20, 0.1, 4096)
    growth = 1 + 0.1 * np.log1p(positions[whose] // 4096)
    close(result.checked(), x * growth[:, None], 3e-7)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n_rot", [32, 20])
@pytest.mark.parametrize("token_of", [None, [3, 0, 3, 2, 1]])
@pytest.mark.parametrize("over", [False, True])
def test_rope(interleaved: bool, n_rot: int, token_of: list[int] | None, over: bool) -> None:
    rows, heads, dim = 5, 3, 32
    x, turns = numbers(rows, heads, dim), numbers(rows, n_rot // 2, 2, seed=2)
    result = Result(x.shape)
    if over:
        result.array[...] = x
    whose = NULL if token_of is None else np.array(token_of, np.int32)
    source = result.array if over else x
    each("rope", result, source, turns, whose, result.array, rows, heads, dim, n_rot, int(interleaved))

    cos, sin = np.moveaxis(turns[token_of if token_of else slice(None)][:, None], -1, 0)
    first = slice(0, n_rot, 2) if interleaved else slice(0, n_rot // 2)
    second = slice(1, n_rot, 2) if interleaved else slice(n_rot // 2, n_rot)
    right = x.copy()
    right[..., first] = x[..., first] * cos - x[..., second] * sin
    right[..., second] = x[..., first] * sin + x[..., second] * cos
    assert (result.checked() == right).all()


# --- one number at a time

EXTREMES = np.array([0.0, -0.0, 1e30, -1e30, 90, -90, 1e-30, np.inf, -np.inf, np.nan], np.float32)


def gelu(x: np.ndarray, exact: bool) -> np.ndarray:
    inner = erf(x / np.sqrt(2)) if exact else np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    found: np.ndarray = 0.5 * x * (1 + inner)
    return found


ONE: dict[str, tuple[tuple[float | ctypes.c_void_p, ...], Callable[[np.ndarray], np.ndarray]]] = {
    "gelu tanh": ((0,), lambda x: gelu(x, False)),
    "gelu erf": ((1,), lambda x: gelu(x, True)),
    "relu": ((), lambda x: np.maximum(x, 0)),
    "scale": ((-2.5, ctypes.c_void_p(0)), lambda x: x * -2.5),
    "softcap": ((30.0,), lambda x: np.tanh(x / 30) * 30),
}
TWO: dict[str, tuple[tuple[float, ...], Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "swiglu": ((), lambda x, y: silu(x) * y),
    "sigmoid_gate": ((), lambda x, y: y / (1 + np.exp(-x))),
    "multiply": ((), lambda x, y: x * y),
    "geglu tanh": ((0,), lambda x, y: gelu(x, False) * y),
    "geglu erf": ((1,), lambda x, y: gelu(x, True) * y),
    "add": ((), lambda x, y: x + y),
}


def many_numbers(n: int, aside: int) -> np.ndarray:
    """Some of them extreme."""
    x = 4 * numbers(n, aside=aside)
    x[: len(EXTREMES)] = EXTREMES[:n]
    return x


def alike(found: np.ndarray, right: np.ndarray) -> None:
    """Within some units in the last place of float32, and where one is no number the other is none."""
    with np.errstate(over="ignore"):  # 1e30 cubed
        rounded = right.astype(np.float32)
    np.testing.assert_allclose(found, rounded, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("asides", [(0, 0), (1, 0), (0, 1)])
@pytest.mark.parametrize("n", [1, 4, 1027])
@pytest.mark.parametrize("case", ONE)
def test_one_number_of_one(case: str, n: int, asides: tuple[int, int]) -> None:
    x, result = many_numbers(n, asides[0]), Result((n,), aside=asides[1])
    more, meaning = ONE[case]
    each(case.split()[0], result, x, result.array, long(n), *more)
    with np.errstate(all="ignore"):
        alike(result.checked(), meaning(x.astype(np.float64)))


@pytest.mark.parametrize("asides", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("n", [1, 4, 1027])
@pytest.mark.parametrize("case", TWO)
def test_one_number_of_two(case: str, n: int, asides: tuple[int, int, int]) -> None:
    x, y = many_numbers(n, asides[0]), numbers(n, aside=asides[1], seed=2)
    result = Result((n,), aside=asides[2])
    more, meaning = TWO[case]
    each(case.split()[0], result, x, y, result.array, long(n), *more)
    with np.errstate(all="ignore"):
        alike(result.checked(), meaning(x.astype(np.float64), y.astype(np.float64)))


def test_results_may_be_written_over_either_input() -> None:
    x, y = numbers(203), numbers(203, seed=2)
    for place in (0, 1):
        result = Result((203,))
        result.array[...] = (x, y)[place]
        both = [x, y]
        both[place] = result.array
        each("add", result, *both, result.array, long(203))
        assert (result.array == x + y).all()


@pytest.mark.parametrize("aside", [0, 1])
def test_rounding_to_bf16_is_to_the_nearest_and_ties_to_even(aside: int) -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF800000, 0x00008001], np.uint32
    )
    x = placed(np.concatenate([bits.view(np.float32), numbers(40)]), aside)
    result = Result((47,), np.uint16)
    found = each("round_bf16", result, x, result.array, long(47))
    assert found[:7].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80, 0x0001]
    values = (found[7:].astype(np.uint32) << 16).view(np.float32)
    assert (np.abs(values - x[7:]) <= np.abs(x[7:]) * 2**-8).all()


# --- rows and columns


@pytest.mark.parametrize("aside", [0, 1])
@pytest.mark.parametrize("widths", [(8, 4, 20), (3, 7, 1), (8, 5, 3), (8, 5)])
def test_columns_come_beside_each_other(widths: tuple[int, ...], aside: int) -> None:
    parts = [numbers(6, n, aside=aside, seed=n) for n in widths]
    result, column = Result((6, sum(widths))), 0
    for part in parts:
        target = ctypes.c_void_p(result.array.ctypes.data + 4 * column)
        each("copy_columns", result, part, target, part.shape[1], sum(widths), long(part.size))
        column += part.shape[1]
    assert (result.checked() == np.concatenate(parts, axis=1)).all()


@pytest.mark.parametrize("width", [1, 7, 64])
def test_rows_are_selected(width: int) -> None:
    x, wanted = numbers(9, width), np.array([8, 0, 0, 5], np.int32)
    result = Result((4, width))
    each("select_rows", result, x, wanted, result.array, width, long(4 * width))
    assert (result.array == x[wanted]).all()


@pytest.mark.parametrize("width", [1, 7, 64])
def test_a_row_is_added_to_each(width: int) -> None:
    y, row = numbers(5, width), numbers(width, seed=2)
    result = Result((5, width))
    result.array[...] = y
    each("add_row", result, result.array, row, width, long(5 * width))
    assert (result.array == y + row).all()


@pytest.mark.parametrize("width", [1, 7, 64])
@pytest.mark.parametrize("over", [False, True])
def test_a_number_gates_a_row(width: int, over: bool) -> None:
    gates, x = many_numbers(11, 0)[:9].reshape(9, 1), numbers(9, width, seed=2)
    result = Result(x.shape)
    result.array[...] = x
    arguments = gates, result.array if over else x, result.array, width, long(x.size)
    each("sigmoid_gate_rows", result, *arguments)
    with np.errstate(over="ignore"):
        alike(result.array, x / (1 + np.exp(-gates.astype(np.float64))))


@pytest.mark.parametrize("aside", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("width", "heads"), [(1, 1), (7, 3), (64, 2)])
def test_every_second_slice(width: int, heads: int, first: int, aside: int) -> None:
    x, result = numbers(5, heads, 2, width, aside=aside), Result((5, heads, width))
    each("every_second", result, x, result.array, width, first, long(result.array.size))
    assert (result.checked() == x[:, :, first]).all()


@pytest.mark.parametrize("width", [1, 7, 64])
@pytest.mark.parametrize("used", [1, 3])
def test_pairs_are_summed_in_the_order_of_places(width: int, used: int) -> None:
    pairs, result = numbers(4, used, width), Result((4, width))
    each("experts_sum", result, pairs, result.array, width, used, long(4 * width))
    right = pairs[:, 0].copy()
    for place in range(1, used):
        right += pairs[:, place]
    assert (result.array == right).all()


def test_entries_of_a_table_are_set() -> None:
    index, value = np.array([5, 0, 99], np.int64), np.array([1 << 60, 3, 7], np.uint64)
    result = Result((100,), np.uint64)
    each("set_entries", result, result.array, index, value, 3)
    right = np.full(100, 113, np.uint64)
    right[index] = value
    assert (result.checked() == right).all()


# --- choices


def routed(
    a: Moe, scores: np.ndarray, more: Mapping[MoreWeight, np.ndarray] = MappingProxyType({})
) -> tuple[np.ndarray, np.ndarray]:
    chosen, shares = Result((len(scores), a.n_used), np.int32), Result((len(scores), a.n_used))
    arguments = len(scores), routing_of(a, {name: numbers.ctypes.data for name, numbers in more.items()})
    blocks, shared = -(-len(scores) // 4), route_shared(a)
    run(SMALL, "route", (blocks,), 128, scores, chosen.array, shares.array, *arguments, shared=shared)
    return chosen.checked(), shares.checked()


def mixture(n_experts: int, n_used: int, normalise: bool, scale: float) -> Moe:
    return Moe(n_experts, n_used, 32, normalise, scale)


@pytest.mark.parametrize(("n_experts", "n_used"), [(4, 1), (8, 2), (60, 4), (128, 8), (40, 32), (40, 40)])
@pytest.mark.parametrize(("normalise", "scale"), [(True, 1.0), (False, 2.5)])
def test_experts_are_chosen(n_experts: int, n_used: int, normalise: bool, scale: float) -> None:
    a, scores = mixture(n_experts, n_used, normalise, scale), numbers(7, n_experts)
    scores[1] = 3.0  # all alike
    scores[2] = np.round(scores[2])  # some alike
    scores[3, ::2] = -np.inf
    chosen, shares = routed(a, scores)
    right, parts = route(a, scores, {})
    assert (chosen == right).all()
    close(shares, parts)


@pytest.mark.parametrize("scores_by", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("groups", "used", "best", "names"),
    [
        (1, 1, 2, ("router_bias",)),
        (1, 1, 2, ("choice_bias", "expert_scale")),
        (8, 3, 2, ("router_bias", "choice_bias")),
        (40, 6, 1, ()),
    ],
)
def test_experts_are_chosen_by_groups_and_biases(
    scores_by: Literal["softmax", "sigmoid"], groups: int, used: int, best: int, names: tuple[MoreWeight, ...]
) -> None:
    n = 40
    a = Moe(
        n, 6, 32, True, 2.5, scores=scores_by, groups=groups, groups_used=used, group_best=best, more=names
    )
    more = {name: numbers(1, n, seed=i + 5) for i, name in enumerate(names)}
    scores = numbers(7, n)
    chosen, shares = routed(a, scores, more)
    right, parts = route(a, scores, more)
    assert (chosen == right).all()
    close(shares, parts)


def test_scores_that_are_no_numbers_choose_experts_that_there_are() -> None:
    scores = numbers(3, 16)
    scores[0] = np.nan
    scores[1, 3:] = np.nan
    chosen, _ = routed(mixture(16, 8, True, 1.0), scores)
    assert chosen[0].tolist() == list(range(8))
    assert chosen[1].tolist() == [*np.argsort(-scores[1, :3]), 3, 4, 5, 6, 7]
    assert (chosen[2] == np.argsort(-scores[2])[:8]).all()


def greatest(logits: np.ndarray, k: int, parts: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    rows, width = logits.shape
    parts = parts or top_k.parts(width)
    keys = Result((rows, parts, k), np.uint64)
    common = top_k.THREADS
    arguments = logits, keys.array, width, k
    run(SMALL, "greatest_parts", (parts, rows), common, *arguments, shared=top_k.SHARED)
    keys.checked()
    ids, values = Result((rows, k), np.int32), Result((rows, k))
    last = keys.array, ids.array, values.array, parts, k
    run(SMALL, "greatest", (rows,), common, *last, shared=top_k.SHARED)
    return ids.checked(), values.checked()


def best_first(logits: np.ndarray, k: int) -> np.ndarray:
    """Ties to the lower id, and before all numbers what is none."""
    return np.lexsort((-logits, ~np.isnan(logits)), axis=-1)[:, :k]


def check_greatest(logits: np.ndarray, k: int, parts: int | None = None) -> None:
    ids, values = greatest(logits, k, parts)
    right = best_first(logits, k)
    assert (ids == right).all()
    np.testing.assert_array_equal(values, np.take_along_axis(logits, right, -1))


@pytest.mark.parametrize("k", [1, 2, 40, 256])
@pytest.mark.parametrize(("width", "parts"), [(257, 1), (5000, 3), (16500, None)])
def test_the_greatest(k: int, width: int, parts: int | None) -> None:
    check_greatest(numbers(3, width), k, parts)


@pytest.mark.parametrize("k", [1, 256])
@pytest.mark.parametrize("parts", [1, 3])
def test_rows_that_are_hard(k: int, parts: int) -> None:
    logits = numbers(8, 5000)
    logits[0] = np.arange(5000)  # each is better than all before it
    logits[1] = -np.arange(5000)
    logits[2] = 1.5  # all alike
    logits[3] = np.round(logits[3])  # many alike
    logits[4] = np.nan
    logits[5, 7:] = np.nan
    logits[6, 100:] = -np.inf
    logits[7, ::2], logits[7, 1::2] = -0.0, 0.0  # alike as well
    logits[7, :5] = np.inf, -np.inf, np.nan, 1e-45, -1e-45
    check_greatest(logits, k, parts)


def test_rows_with_fewer_numbers_than_are_wanted() -> None:
    logits = numbers(2, 5)
    ids, values = greatest(logits, 40, 3)
    right = best_first(logits, 5)
    assert (ids[:, :5] == right).all()
    assert (ids[:, 5:] == -1).all()
    assert np.isnan(values[:, 5:]).all()
    found, _ = greatest(logits, 1, 9)  # parts without any
    assert (found == right[:, :1]).all()


def test_sizes_are_those_of_the_source() -> None:
    text = SMALL.path.read_text()
    assert f"#define GREATEST_MOST {top_k.MOST}\n" in text
    assert f"#define GREATEST_THREADS {top_k.THREADS}\n" in text
    assert top_k.SHARED == 8 * (2 * 4 * top_k.THREADS + 1)
    assert [top_k.parts(n) for n in (5, 4096, 32000, 128256, 1 << 20)] == [1, 1, 7, 31, 64]
    assert top_k.keys_bytes(2, 32000, 10) == 8 * 2 * 7 * 10
