"""attention.c and recurrent.c: layers of any shape, for sequences of any lengths."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np

from hetrun.backends.llamacpp.kernels import FIELDS, LEVELS, AttentionLayer, PassPart, kernels, partial_size
from hetrun.backends.llamacpp.kernels.delta_net import Convolution, DeltaRule, PassStates, delta_nets
from hetrun.graph.ops import CausalConv, DeltaNet
from hetrun.memory.kv.states import NONE
from tests.backends import test_kernels as attention_tests
from tests.backends.test_kernels import Given, Shape
from tests.sanitizers.inputs import Input, close, node, spread
from tests.sanitizers.memory import Array
from tests.unit import test_recurrent_kernels as recurrent_tests
from tests.unit.test_recurrent_kernels import Layer, Tokens

NUMBER = {"F32": 4, "F16": 2, "Q8_0": 2}  # bytes that keys and values are aligned to
OTHER = 0x7F  # bytes of a key that no sequence has


def levels(case: Input) -> list[int]:
    """The numbers of the instructions that may be used by functions over floats."""
    found = kernels()
    assert found is not None
    return [level for level in range(found.best + 1) if LEVELS[level] in case.levels]


def company_of(case: Input) -> list[Given]:
    """Some sequences, with few or many keys before their rows, anywhere in a text."""
    rng, found = case.rng, list[Given]()
    for _ in range(rng.randint(1, 4)):
        rows = rng.choice((1, 2, rng.randint(1, 12), rng.randint(1, 32)))
        before = rng.randint(0, 1200) if case.chance(40) else rng.randint(0, rng.choice((20, 140, 300)))
        position = rng.choice((0, 0, 1, 100, 127, 128, 4000, 4096, 5100))
        found.append(Given(position, before + rows, rows, rng.randint(0, 3)))
    return found


def shape_of(case: Input) -> Shape:
    rng, kind = case.rng, case.rng.choice(("F32", "F16", "Q8_0"))
    kv_heads, group = rng.randint(1, 4), rng.randint(1, 6)
    dim = (
        32 * rng.randint(1, 4)
        if kind == "Q8_0"
        else rng.choice((1, 7, 16, 33, 64, 80, 128, rng.randint(1, 140)))
    )
    window, softcap = rng.choice((0, 0, 1, 50, 200, rng.randint(1, 700))), rng.choice((0.0, 0.0, 1.5, 30.0))
    return Shape(group * kv_heads, kv_heads, dim, kind, window, softcap)


def sequences_of(case: Input, company: list[Given]) -> Array:
    """The table of a pass; between two sequences lies a key of another."""
    table = case.memory.full((len(company), FIELDS), 0, np.int64)
    table[:, 1] = [s.length for s in company]
    table[:, 0] = np.cumsum(table[:, 1] + 1) - table[:, 1]
    table[:, 2] = [s.position for s in company]
    table[:, 4] = [s.rows for s in company]
    table[:, 3] = np.cumsum(table[:, 4]) - table[:, 4]
    return table


def attended(case: Input, shape: Shape, company: list[Given], level: int, threads: int, slots: int) -> Array:
    """What the library under test makes of a pass, in memory that ends where it does."""
    lib, memory = kernels(), case.memory
    assert lib is not None
    each = [attention_tests.numbers(shape, s) for s in company]
    other = np.full((1, each[0].keys.shape[1]), OTHER, np.uint8)
    keys = memory.copy(np.concatenate([x for n in each for x in (other, n.keys)]), NUMBER[shape.kv_type])
    values = memory.copy(np.concatenate([x for n in each for x in (other, n.values)]), NUMBER[shape.kv_type])
    n, width = sum(s.rows for s in company), shape.heads * shape.head_dim
    queries, out = (
        spread(case, n, width, case.rng.randint(0, 3)),
        spread(case, n, width, case.rng.randint(0, 3)),
    )
    queries.rows[...] = np.concatenate([x.queries for x in each])
    sequences = sequences_of(case, company)
    ends = memory.copy(np.concatenate([np.arange(s.length - s.rows + 1, s.length + 1) for s in company]))
    counters = memory.full(2 + len(company) * shape.kv_heads, 0, np.int32)
    part = PassPart(
        n=len(company), sequences=sequences.ctypes.data, ends=ends.ctypes.data, window=shape.window,
        counters=counters.ctypes.data,
    )  # fmt: skip
    partials = memory.full(lib.plan(part) * shape.heads * partial_size(shape.head_dim), np.nan)
    part.memory = partials.ctypes.data
    size = lib.scratch(max(s.rows for s in company), shape.heads, shape.kv_heads, shape.head_dim)
    scratch = memory.full(size * slots, np.nan)
    layer = AttentionLayer(
        pass_part=ctypes.pointer(part), keys=keys.ctypes.data, values=values.ctypes.data,
        key_stride=keys.shape[1], value_stride=values.shape[1], head_bytes=keys.shape[1] // shape.kv_heads,
        type=shape.quant.ggml_id, head_dim=shape.head_dim, heads=shape.heads, kv_heads=shape.kv_heads,
        queries=queries.address, out=out.address, query_stride=queries.stride, out_stride=out.stride,
        scratch=scratch.ctypes.data, scratch_size=size, slots=slots, level=level, scale=shape.attrs.scale,
        softcap=shape.attrs.softcap,
    )  # fmt: skip
    node(lib.address, layer, threads)
    assert not counters.any(), "counters are not ready for the next layer"
    return out.read()


def attention(case: Input) -> None:
    """As numpy has it, and with any threads the same bits."""
    shape, company = shape_of(case), company_of(case)
    if shape.window:  # a pass keeps what its first row sees
        company = [replace(s, position=0) for s in company]
    right, size = (
        np.concatenate([attention_tests.expected(shape, s, of) for s in company]) for of in (np.array, np.abs)
    )
    for level in levels(case):
        threads = case.rng.randint(1, 4)
        found = attended(case, shape, company, level, threads + case.rng.randint(0, 1), threads)
        assert attention_tests.close(found, right, size), f"not what numpy makes of it, with {LEVELS[level]}"
        if case.chance(4):
            alone = attended(case, shape, company, level, 1, 1)
            assert np.array_equal(found, alone), "bits depend on the number of threads"


# --- states


def layer_of(case: Input) -> Layer:
    rng = case.rng
    if case.chance(2):
        taps = rng.choice((2, 3, 4, 4, rng.randint(2, 64)))
        return CausalConv(0, taps, rng.choice((1, 5, 16, 255, 257, rng.randint(1, 600))), silu=case.chance(2))
    k_heads = rng.randint(1, 3)
    k_dim, v_dim = (
        rng.choice((1, 8, 24, 32, 128, rng.randint(1, 140))),
        rng.choice((1, 16, 20, rng.randint(1, 70))),
    )
    return DeltaNet(
        0, k_heads, k_heads * rng.randint(1, 3), k_dim, v_dim,
        tiled=case.chance(2), log=case.chance(2), mamba=case.chance(3),
    )  # fmt: skip


def tokens_of(case: Input) -> list[Tokens]:
    """Sequences whose states lie in different slots, and are put aside after any tokens."""
    rng, found = case.rng, list[Tokens]()
    slots = rng.sample(range(recurrent_tests.SLOTS), recurrent_tests.SLOTS)
    for _ in range(rng.randint(1, 3)):
        n, read = rng.choice((1, 2, 31, 32, 33, rng.randint(1, 70))), rng.choice((NONE, slots.pop()))
        write = {n: read if read != NONE and case.chance(3) else slots.pop()}
        for at in rng.sample(range(1, n), min(n - 1, rng.randint(0, 2))):
            write[at] = slots.pop()
        found.append(Tokens(n, read, write))
    return found


def remembered(
    case: Input,
    a: Layer,
    data: recurrent_tests.Given,
    tokens: list[Tokens],
    table: Array,
    level: int,
    threads: int,
) -> Array:
    """What the library under test makes of it; states in the table change."""
    lib, memory = delta_nets(), case.memory
    assert lib is not None
    parts = recurrent_tests.parts(tokens)
    sequences = memory.copy(
        np.array([(p.a, p.b, t.read) for p, t in zip(parts, tokens, strict=True)], np.int64)
    )
    write = memory.copy(np.concatenate([t.view.write for t in tokens]))
    common = PassStates(n=len(tokens), sequences=sequences.ctypes.data, write=write.ctypes.data)
    xs = [spread(case, len(x), x.shape[1], case.rng.randint(0, 4)) for x in data.x]
    for made, x in zip(xs, data.x, strict=True):
        made.rows[...] = x
    out = spread(
        case, len(data.x[0]), a.width if isinstance(a, CausalConv) else a.v_width, case.rng.randint(0, 4)
    )
    weights = [memory.copy(w) for w in data.w]
    shared = {
        "pass_states": ctypes.pointer(common), "states": table.ctypes.data, "stride": table.shape[1],
        "x": xs[0].address, "out": out.address, "x_stride": xs[0].stride, "out_stride": out.stride,
        "level": level,
    }  # fmt: skip
    if isinstance(a, CausalConv):
        given = {name: w.ctypes.data for name, w in zip(("kernel", "bias"), weights, strict=False)}
        node(
            lib.convolve_address,
            Convolution(**shared, **given, width=a.width, taps=a.kernel, silu=a.silu),
            threads,
        )
        return out.read()
    counters, size = memory.full(2, 0, np.int32), lib.scratch(a.row)
    slots = max(1, threads - case.rng.randint(0, 1))
    scratch = memory.full(size * slots, np.nan)
    names = ("k_heads", "v_heads", "k_dim", "v_dim", "row", "tiled", "mamba", "log", "eps")
    places = dict(zip(("q_at", "k_at", "v_at"), a.columns, strict=True))
    made_of = {name: getattr(a, name) for name in names} | places
    rule = DeltaRule(
        **shared, **made_of, decay=xs[1].address, rate=xs[2].address, decays=weights[0].ctypes.data,
        biases=weights[1].ctypes.data, skips=weights[2].ctypes.data if a.mamba else None,
        decay_stride=xs[1].stride, rate_stride=xs[2].stride, scratch=scratch.ctypes.data, scratch_size=size,
        slots=slots, counters=counters.ctypes.data,
    )  # fmt: skip
    node(lib.remember_address, rule, threads)
    assert not counters.any(), "counters are not ready for the next layer"
    return out.read()


def states(case: Input) -> None:
    """Convolutions, delta rules and Mamba's, as the reference computes them; other slots stay as they are."""
    a, tokens = layer_of(case), tokens_of(case)
    data = recurrent_tests.numbers(a, recurrent_tests.total(tokens), case.rng.randint(0, 1000))
    kv = recurrent_tests.states(a)
    before = recurrent_tests.kept(a, kv)
    right = recurrent_tests.expected(a, data, tokens, kv)
    after = recurrent_tests.kept(a, kv)
    written = [slot for t in tokens for slot in t.write.values()]
    others = [slot for slot in range(len(before)) if slot not in written]
    for level in levels(case):
        table = case.memory.copy(before)
        found = remembered(case, a, data, tokens, table, level, case.rng.randint(1, 4))
        assert close(found, right), f"not what numpy makes of it, with {LEVELS[level]}"
        assert close(table[written], after[written]), "another state than the reference leaves"
        assert np.array_equal(table[others], before[others]), "a slot was written that is not of the pass"
