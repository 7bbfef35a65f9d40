"""Attention as ggml nodes: the pass's rows go into the cache, then each sequence attends to what it sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetrun.backend import sees_whole
from hetrun.backends.llamacpp import decode_attention, ggml_api
from hetrun.backends.llamacpp.attention_layout import TILE_COST, TILE_COST_LEFT_OVER, HeadLayout, layout
from hetrun.backends.llamacpp.graph_builder import FLOAT, TensorRef
from hetrun.backends.llamacpp.inputs import KvSlice, Mask, PaddedQueries
from hetrun.graph import Op, Rows
from hetrun.graph.ops import Attention
from hetrun.memory.kv.cache import KvTable

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter

TILED = (ggml_api.F32, ggml_api.F16)  # the types of keys and values that ggml has tiles for


def _store(e: GgmlEmitter, group: int, table: KvTable, x: TensorRef) -> None:
    """Write this pass's rows into a KV table."""
    if group not in e.inputs.slots:
        e.inputs.slots[group] = e.w.input(ggml_api.I64, e.shape.tokens)
    width = table.n_heads * table.head_dim
    rows = e.w.external(table.quant.ggml_id, width, len(table.raw), table.address, table.row_bytes)
    e.w.expand(e.lib.ggml_set_rows(e.ctx, rows, e.w.plain(x), e.inputs.slots[group]))


def _seen(e: GgmlEmitter, group: int, table: KvTable, part: int) -> int:
    """A KV table's rows of one sequence as [head_dim, rows, heads]."""
    head_bytes = table.quant.row_bytes(table.head_dim)
    base = e.w.external(table.quant.ggml_id, table.n_heads * table.head_dim, 1, e.w.anchor.ctypes.data)
    tensor: int = e.lib.ggml_view_3d(
        e.ctx, base, table.head_dim, 1, table.n_heads, head_bytes * table.n_heads, head_bytes, 0
    )
    ggml_api.tensor_at(tensor).nb[1] = table.row_bytes
    e.inputs.kv.append(KvSlice(tensor, table, group, part))
    return tensor


def _mask(e: GgmlEmitter, group: int, part: int, rows: Rows, made: HeadLayout) -> int | None:
    """The mask of one sequence for one group of layers; a single token sees all of its rows."""
    tokens, _ = e.shape.parts[part]
    if tokens == 1:
        return None
    key = (group, part, rows, made)
    if key not in e.inputs.masks:
        tensor = e.w.external(ggml_api.F16, 1, made.rows, e.w.anchor.ctypes.data)
        e.inputs.masks[key] = Mask(tensor, group, part, rows, e.kv.groups[group].window, made.together)
    return e.inputs.masks[key].tensor


def _gathered(e: GgmlEmitter, width: int, rows: int, first_head: int) -> TensorRef:
    """Where the attention results of some rows meet. Every layer uses the same memory; shares of one layer
    have their own, as their results are used together."""
    key = width, rows, first_head
    if key not in e.gathered:
        e.gathered[key] = e.w.matrix(width, rows)
    return e.gathered[key]


def attention(e: GgmlEmitter, op: Op) -> None:
    a = op.attrs
    assert isinstance(a, Attention)
    q, *own = (e.values.get(value) for value in op.inputs)
    group = e.kv.group(a.layer)
    keys, values = e.kv.heads(a.layer, a.first, a.n_kv_heads)
    for table, x in zip((keys, values), own, strict=False):
        assert x is not None
        _store(e, group, table, x)
    if q is None:  # no row of this pass is wanted: it only fills the cache
        return
    sinks = next(iter(e.weights(op)), 0)
    spans, sees_all = _spans(e, op.rows), sees_whole(e.shape.whole, a.window)
    small = [
        s
        for s in spans
        if not sees_all
        and decode_attention.takes(e.kernels, keys)
        and s[1][1] - s[1][0] <= decode_attention.MOST_ROWS
    ]
    if small and len(small) == len(spans):
        e.values[op.out] = decode_attention.attend(e, a, op.rows, q, small, None, sinks)
        return
    large = [s for s in spans if s not in small]
    nodes = [small] if small else []
    # Our kernel knows where each row's keys end, and by that where its window begins.
    if not sees_all and decode_attention.takes_many(e.kernels, keys, _is_tiled(keys, values)):
        nodes += [[piece] for s in large for piece in decode_attention.pieces(s)]
        large = []
    results = [(span, _attend(e, a, op.rows, q, i, span, sinks)) for i, span in large]
    if len(spans) == 1 and results:
        e.values[op.out] = results[0][1]
        return
    whole = _gathered(e, op.out.width, q.rows, a.first)
    for node in nodes:
        decode_attention.attend(e, a, op.rows, q, node, whole, sinks)
    for (lo, hi), result in results:
        e.w.expand(e.lib.ggml_cpy(e.ctx, e.w.plain(result), e.w.plain(whole.part(lo, hi))))
    e.values[op.out] = whole


def _is_tiled(keys: KvTable, values: KvTable) -> bool:
    """Whether ggml has tiles for these; if not, it computes row by row."""
    return keys.quant.ggml_id == values.quant.ggml_id and keys.quant.ggml_id in TILED


def _spans(e: GgmlEmitter, rows: Rows) -> list[tuple[int, tuple[int, int]]]:
    """For each sequence that has rows of a kind: its number and its first and last row."""
    out, at = [], 0
    for i, part in enumerate(e.shape.parts):
        n = part[0] if rows == "tokens" else part[1]
        if n:
            out.append((i, (at, at + n)))
        at += n
    return out


def _attend(
    e: GgmlEmitter, a: Attention, rows: Rows, q: TensorRef, part: int, span: tuple[int, int], sinks: int
) -> TensorRef:
    group = e.kv.group(a.layer)
    keys, values = e.kv.heads(a.layer, a.first, a.n_kv_heads)
    n = span[1] - span[0]
    made = HeadLayout(1, n)
    if _is_tiled(keys, values) and not sinks:  # heads that are laid together would have one
        left_over = keys.quant.ggml_id == ggml_api.F16 and a.head_dim % e.lib.f16_step
        cost = TILE_COST_LEFT_OVER if left_over else TILE_COST
        made = layout(n, a.n_heads, a.n_kv_heads, e.threads, cost)
    laid_out, own = _laid_out(e, a, q.part(*span), made), n * made.together
    result = e.lib.ggml_flash_attn_ext(
        e.ctx, laid_out, _seen(e, group, keys, part), _seen(e, group, values, part),
        _mask(e, group, part, rows, made), a.scale, 0.0, a.softcap,
    )  # fmt: skip
    if sinks:
        e.lib.ggml_flash_attn_ext_add_sinks(result, sinks)
    if own < made.rows:
        e.inputs.padded.append(PaddedQueries(laid_out, result, group, part, own, made.rows))
    return _put_back(e, a, result, n, made)


def _laid_out(e: GgmlEmitter, a: Attention, q: TensorRef, made: HeadLayout) -> int:
    """The query rows as [head_dim, rows, heads]; of heads laid together, a token's rows are neighbours."""
    lib, ctx, g = e.lib, e.ctx, made.together
    head, heads, rows = a.head_dim * FLOAT, a.n_heads // g, q.rows * g
    tensor: int
    if g == 1:
        tensor = lib.ggml_permute(ctx, e.w.heads(q, a.head_dim), 0, 2, 1, 3)
    else:
        tensor = lib.ggml_view_4d(
            ctx, q.tensor, a.head_dim, g, heads, q.rows, head, g * head, q.stride, q.offset
        )
        tensor = lib.ggml_cont(ctx, lib.ggml_permute(ctx, tensor, 0, 1, 3, 2))
        tensor = lib.ggml_reshape_3d(ctx, tensor, a.head_dim, rows, heads)
    if rows < made.rows:
        tensor = lib.ggml_pad(ctx, tensor, 0, made.rows - rows, 0, 0)
        # A view, so that its rows can be fewer than there are.
        tensor = lib.ggml_view_3d(ctx, tensor, a.head_dim, made.rows, heads, head, head * made.rows, 0)
    return tensor


def _put_back(e: GgmlEmitter, a: Attention, result: int, n: int, made: HeadLayout) -> TensorRef:
    """What became of the query rows, each token's heads in their order again."""
    lib, ctx, g, width = e.lib, e.ctx, made.together, a.n_heads * a.head_dim
    if g == 1:
        tensor = lib.ggml_reshape_2d(ctx, result, width, made.rows)
        return e.w.result(tensor, width, made.rows).part(0, n)
    head, heads = a.head_dim * FLOAT, a.n_heads // g
    tensor = lib.ggml_view_4d(ctx, result, a.head_dim, heads, g, n, head, heads * head, width * FLOAT, 0)
    tensor = lib.ggml_cont(ctx, lib.ggml_permute(ctx, tensor, 0, 2, 1, 3))
    return e.w.result(lib.ggml_reshape_2d(ctx, tensor, width, n), width, n)
