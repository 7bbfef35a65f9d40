"""Attention: this pass's keys and values are stored, and its rows look at what they see.

A layer may have the keys and values of one before it, and in others a row is both key and value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetrun.backend import FLOAT_BYTES
from hetrun.backends.cuda import attention_launch
from hetrun.backends.cuda.attention_launch import AttentionResults, KvTableStruct, QueryRotation
from hetrun.backends.cuda.driver import Address, Argument
from hetrun.backends.cuda.fusion import RotatedAttention
from hetrun.backends.cuda.kernel_cache import at, number, real
from hetrun.backends.cuda.matmul_launch import ROUNDED
from hetrun.backends.cuda.pass_args import AttentionTiles, in_tile
from hetrun.backends.cuda.programs import Source
from hetrun.graph import Op
from hetrun.graph.ops import Attention, Rope
from hetrun.memory.kv.cache import KvCache

if TYPE_CHECKING:
    from hetrun.backends.cuda.lowering import CudaEmitter

AT_ONCE, PARTS_BYTES = 64, 16 << 20  # rows whose parts are held at once, and memory of these
WARPS = 4  # of a block of `write_rows`, each with a head


def looks(kv: KvCache, op: Op) -> AttentionTiles:
    """How an op looks at the cache."""
    a = op.attrs
    assert isinstance(a, Attention)
    most = in_tile(a.n_heads // a.n_kv_heads, a.head_dim)
    return AttentionTiles(kv.group(a.layer), a.window, op.rows, most)


def attend(e: CudaEmitter, op: Op, turned: RotatedAttention | None = None) -> None:
    """The kernels of one attention; `turned`: with what turns its queries and keys."""
    a, kv = op.attrs, e.place.kv
    assert isinstance(a, Attention)
    q, *own = op.inputs
    group, part = kv.group(a.layer), (a.layer, a.first, a.n_kv_heads)
    slabs = e.place.slabs_of(group, part)
    keys = slabs.planes[part, 0]
    values = slabs.planes.get((part, 1), keys)
    table = KvTableStruct(slabs.table, keys.at, values.at, keys.size)
    source = Source("attention", (("KV", kv.quant.name), ("HEAD", str(a.head_dim))))
    if turned:
        _turn_and_write(e, turned, source, table, f"slots {group}")
    elif own:
        warps, tokens = len(own) * a.n_kv_heads * e.shape.tokens, number(e.shape.tokens)
        kept = at(e.at[own[0]]), at(e.at[own[-1]]), e.told(f"slots {group}")
        sizes = number(a.n_kv_heads), tokens
        e.do(source, "write_rows", (-(-warps // WARPS),), 32 * WARPS, *kept, table, *sizes)
    if not e.rows(q):
        return
    target, kind = e.make(op.out), looks(kv, op)
    i, seeing = next((i, s) for i, s in enumerate(e.seeing) if s.looking == kind)
    sinks = at(next((held.address for held in e.held(op)), 0))
    facts = real(a.scale), real(a.softcap), number(a.n_heads), number(a.n_kv_heads)
    if seeing.rows:
        begin = e.given_at + e.given.offset(f"rows {i}")
        in_bytes = e.room_in_bytes(op.out) if a.head_dim % ROUNDED == 0 and not seeing.tiles else 0
        joined = AttentionResults(target, sinks.value, in_bytes, e.given_at + e.given.offset("ended"))
        _one_by_one(e, a, source, (begin, seeing.rows), (at(e.at[q]), table), joined, facts)
    if seeing.tiles:
        grid, shared = (seeing.tiles, a.n_kv_heads), attention_launch.many_shared(a.head_dim)
        given = at(e.at[q]), e.told(f"tiles {i}"), table, at(target), sinks, *facts
        source = Source("attention_tiles", source.defines)
        e.do(source, "attend_many", grid, attention_launch.THREADS, *given, shared=shared)


def _turn_and_write(
    e: CudaEmitter, turned: RotatedAttention, source: Source, table: KvTableStruct, slots: str
) -> None:
    """Keys on their way to where they stay, with values; and queries."""
    a, r = turned.attention.attrs, turned.key.attrs
    assert isinstance(a, Attention)
    assert isinstance(r, Rope)
    query, key, tokens = turned.query.inputs[0], turned.key.inputs[0], e.shape.tokens
    values, rows = turned.attention.inputs[2], e.rows(query)
    q, k = e.turns(turned.query), e.turns(turned.key)
    target = e.make(turned.query.out) if rows else 0
    whose = e.told("wanted") if turned.query.rows == "wanted" else at(0)
    queries = QueryRotation(e.at[query] if rows else 0, target, q, whose.value, rows, a.n_heads)
    warps = 2 * a.n_kv_heads * tokens + rows * a.n_heads
    e.do(
        source,
        "turn_and_write",
        (-(-warps // WARPS),),
        32 * WARPS,
        queries,
        at(e.at[key]),
        at(k),
        at(e.at[values]),
        e.told(slots),
        table,
        number(a.n_kv_heads),
        number(tokens),
        number(r.n_rot // 2),
        number(r.interleaved),
        shared=FLOAT_BYTES * WARPS * a.head_dim,
    )


def at_once(a: Attention, rows: int, processors: int) -> tuple[int, int]:
    """Of rows that are not in tiles, how many are computed at once, and the parts of what each sees."""
    splits = attention_launch.splits(processors, a.n_heads, a.n_kv_heads, a.head_dim)
    fit = PARTS_BYTES // attention_launch.partial_bytes(1, a.n_heads, a.head_dim, splits)
    return max(1, min(rows, AT_ONCE, fit)), splits


def counts(op: Op, rows: int, processors: int) -> int:
    """Of blocks that have ended: by row, KV head, and group of its query heads."""
    a = op.attrs
    assert isinstance(a, Attention)
    groups = attention_launch.groups_of(a.n_heads, a.n_kv_heads, a.head_dim)
    return at_once(a, rows, processors)[0] * a.n_kv_heads * groups


def _one_by_one(
    e: CudaEmitter,
    a: Attention,
    source: Source,
    rows: tuple[Address, int],
    where: tuple[Argument, Argument],
    joined: AttentionResults,
    facts: tuple[Argument, ...],
) -> None:
    """Rows that are not in tiles, some at a time: each leaves many parts, and what ends last joins them."""
    (begin, total), (q, table) = rows, where
    step, splits = at_once(a, total, e.place.processors)
    shared = attention_launch.few_shared(a.n_heads // a.n_kv_heads, a.head_dim, splits)
    groups = attention_launch.groups_of(a.n_heads, a.n_kv_heads, a.head_dim)
    for first in range(0, total, step):
        n = min(step, total - first)
        mine = at(begin + attention_launch.ROW.itemsize * first)
        size = attention_launch.partial_bytes(n, a.n_heads, a.head_dim, splits)
        parts = e.arena.take(size, "parts of attention")
        given = q, mine, table, at(parts), *facts, number(splits), joined
        grid = n * splits, a.n_kv_heads, groups
        e.do(source, "attend_few", grid, attention_launch.THREADS, *given, shared=shared)
        e.arena.give(parts)
