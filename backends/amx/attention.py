"""Attention on a CPU: torch's flash kernel, called so that its products are as large as they can be.

The kernel is fast when it has many query rows for the keys it packs, and no mask: 880 GFLOP/s against 450
with one, where that was measured. So the query heads that share a KV head are folded into rows, and the keys
are cut into strips: what all rows see is one call without a mask, the corners where some rows see a key and
others do not are small calls with one, and the results are put together by their log-sum-exp. Strips that
no row sees are never computed.

Keys and values are bf16. Those of this pass are used as they came; older ones are read from the KV tables
into a scratch, some thousand at a time. A few rows over an F16 table are computed in F16 where it lies:
converting it would take longer than the attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetrun.backend import Ints, Pass, SequencePart
from hetrun.backends.amx.bf16_matmul import BF16
from hetrun.backends.amx.weight_slices import spans
from hetrun.graph import Op
from hetrun.graph.ops import Attention
from hetrun.memory.kv.cache import KvCache, KvTable

PIECE_BYTES = 8 << 20  # of keys, and as much of values: what is read from the tables at a time
STAGE_BYTES = 1 << 20  # of float32 numbers between two types: they stay in a core's own cache
MASK_BYTES = 4 << 20  # the largest mask; more rows are cut
MASKS_BYTES = 16 << 20  # kept from one layer to the next
CHUNK_ROWS = 256  # whose own keys are one corner; smaller ones waste less and cost more calls
ASIDE = 1 << 29  # products in scores, about 3 ms, before others may run
BEGIN_ROWS = 192  # the same for the beginning of a sequence
BEGIN_BY_ITSELF = 768  # rows of a beginning that the kernel cuts better than we do
WHOLE_ROWS = 64  # with the heads of a group: so few are not worth a cut
HALF_ROWS = 16  # with the heads of a group: so few do not pay for a conversion
NEVER = -6e4  # a score that counts for nothing, also in F16; a row sees one key at least

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_PLAIN = {"F16": torch.float16, "F32": torch.float32}
Place = slice | Tensor  # rows of a table, as one run where they are one
Partial = tuple[Tensor, Tensor]  # what rows got from some keys [1, heads, rows, dim], and its log-sum-exp


class AttentionScratch:
    """Memory that attention uses again and again: one for all layers."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._masks: dict[tuple[bytes, int, int, int, torch.dtype], Tensor] = {}
        self._slots: Ints | None = None
        self._place: Place = slice(0)

    @property
    def nbytes(self) -> int:
        """Memory held now; a pass takes `passing_bytes` more, and gives them back."""
        return sum(t.nbytes for t in (*self._buffers.values(), *self._masks.values()))

    def take(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """A buffer whose numbers are anything; the next one of that name lies in the same memory."""
        held = self._buffers.get((name, dtype))
        if held is None or held.numel() < rows * width:
            self._buffers.pop((name, dtype), None)
            held = self._buffers[name, dtype] = torch.empty(rows * width, dtype=dtype)
        return held[: rows * width].view(rows, width)

    def place(self, slots: Ints) -> Place:
        """Where the rows of a pass lie in the tables: found once for all layers that lie alike."""
        if slots is not self._slots:
            self._slots, self._place = slots, _place(slots)
        return self._place

    def mask(self, ends: Ints, width: int, window: int, group: int, dtype: torch.dtype) -> Tensor:
        """What rows that see the keys before ends[i], or a window of them, add to scores of `width` keys."""
        key = (ends.tobytes(), width, window, group, dtype)
        found = self._masks.get(key)
        if found is None:
            column, end = torch.arange(width), torch.from_numpy(ends)[:, None]
            hidden = column >= end
            if window:
                hidden |= column < end - window
            found = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, NEVER)
            found = found.repeat_interleave(group, 0)
            while self._masks and found.nbytes + sum(m.nbytes for m in self._masks.values()) > MASKS_BYTES:
                del self._masks[next(iter(self._masks))]
            self._masks[key] = found
        return found


def passing_bytes(a: Attention, tokens: int) -> int:
    """Memory that attention of a pass takes and gives back, besides its result.

    It is q folded, two partial results, and the keys and values once more as the kernel packs them.
    """
    return 3 * 2 * tokens * a.n_heads * a.head_dim + 2 * PIECE_BYTES


@dataclass(frozen=True, slots=True)
class Strip:
    """Query rows a to b over the keys lo to hi; `masked` where not every row sees every key."""

    a: int
    b: int
    lo: int
    hi: int
    masked: bool


def strips(ends: Ints, window: int, group: int) -> list[Strip]:
    """All that rows see, each key once: row i sees the keys before ends[i], or a window of them."""
    n = len(ends)
    starts = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
    outer = Strip(0, n, int(starts.min()), int(ends.max()), n > 1)
    if n == 1 or (n * group <= WHOLE_ROWS and _mask_fits(outer, group)):
        return [outer]
    # The last key of the first row is its own: it goes with the corner, whose edge then is that of a piece.
    lo, hi = int(starts.max()), int(ends.min()) - 1
    found = [Strip(0, n, lo, hi, False)] if hi > lo else []
    for at in range(0, n, CHUNK_ROWS):
        found += _chunk_strips(starts, ends, at, min(n, at + CHUNK_ROWS), group, (lo, max(lo, hi)))
    return found


def _mask_fits(s: Strip, group: int) -> bool:
    return 2 * (s.b - s.a) * group * (s.hi - s.lo) <= MASK_BYTES


def _chunk_strips(starts: Ints, ends: Ints, a: int, b: int, group: int, done: tuple[int, int]) -> list[Strip]:
    """What rows a to b see besides the keys that are done."""
    first, last = int(starts[a:b].min()), int(ends[a:b].max())
    if b == a + 1:
        cut = [Strip(a, b, first, last, False)]
    else:
        lo, hi = int(starts[a:b].max()), int(ends[a:b].min()) - 1
        if hi > lo:
            cut = [Strip(a, b, first, lo, True), Strip(a, b, lo, hi, False), Strip(a, b, hi, last, True)]
        else:
            cut = [Strip(a, b, first, last, True)]
    if any(s.masked and not _mask_fits(s, group) for s in cut) and b > a + 1:
        middle = (a + b) // 2
        return [
            s for x, y in ((a, middle), (middle, b)) for s in _chunk_strips(starts, ends, x, y, group, done)
        ]
    below, above = (last, last) if done[0] == done[1] else done
    return [
        Strip(a, b, lo, hi, s.masked)
        for s in cut
        for lo, hi in ((s.lo, min(s.hi, below)), (max(s.lo, above), s.hi))
        if lo < hi
    ]


def attend(
    op: Op,
    q: Tensor,
    own: Sequence[Tensor],
    sinks: Tensor | None,
    work: Pass,
    kv: KvCache,
    scratch: AttentionScratch,
) -> Tensor:
    """Write this pass's K and V rows, if there are such; what each row of q gets from those that it sees, in
    q's type."""
    a = op.attrs
    assert isinstance(a, Attention)
    group = kv.group(a.layer)
    keys, values = kv.heads(a.layer, a.first, a.n_kv_heads)
    slots = work.slots[group]
    place = scratch.place(slots)
    for table, x in zip((keys, values), own, strict=False):
        store(table, slots, place, x)
    k, v = (own[0], own[-1]) if own else [q.new_empty((0, a.n_kv_heads * a.head_dim))] * 2
    if own and len(work.parts) == 1 and _begins(op, work.parts[0], group, len(q)):
        return _beginning(a, q, k, v, sinks, scratch)
    out = torch.empty(len(q), a.n_heads * a.head_dim, dtype=q.dtype)
    for part in work.parts:
        lo, hi, ends = _rows(op, part, work, part.kv[group].length)
        if hi > lo:
            view = part.kv[group]
            mine = slice(part.a, part.b)
            seen = _AttendedRows(a, view.length, view.first, keys, values, k[mine], v[mine], sinks, scratch)
            _attend_part(seen, q[lo:hi], ends, out[lo:hi], work.between)
    return out


def _begins(op: Op, part: SequencePart, group: int, rows: int) -> bool:
    """Whether a pass begins a sequence, and its rows see all that is before them: the kernel's own case."""
    a, length = op.attrs, part.kv[group].length
    assert isinstance(a, Attention)
    plain = not a.softcap and (not a.window or a.window >= length)
    return plain and op.rows == "tokens" and length == part.b - part.a == rows and rows > WHOLE_ROWS


def _beginning(
    a: Attention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scratch: AttentionScratch
) -> Tensor:
    """Rows that see each other, and nothing before them: nothing is merged, and nothing copied to be read.

    The kernel computes all scores in blocks of 512 keys, seen or not, so the keys behind some rows are cut
    off. The mask that this takes costs less.
    """
    n = len(q)
    of_heads = None if sinks is None else sinks.view(-1, 1)
    rows, keys, values = (x.to(BF16).view(1, n, -1, a.head_dim).transpose(1, 2) for x in (q, k, v))
    if n <= BEGIN_ROWS or n >= BEGIN_BY_ITSELF:
        whole = _sunk(_flash(rows, keys, values, 0.0, True, scale=a.scale), of_heads)
        joined: Tensor = whole.transpose(1, 2).reshape(n, -1)
        return joined.to(q.dtype)
    out = torch.empty(n, a.n_heads, a.head_dim, dtype=q.dtype)
    for lo, hi in spans(n, BEGIN_ROWS):
        mask = scratch.mask(np.arange(lo + 1, hi + 1), hi, 0, 1, BF16)
        seen = keys[:, :, :hi], values[:, :, :hi]
        part = _sunk(_flash(rows[:, :, lo:hi], *seen, attn_mask=mask, scale=a.scale), of_heads)
        out[lo:hi].copy_(part[0].transpose(0, 1))
    return out.view(n, -1)


def _sunk(partial: Partial, sinks: Tensor | None) -> Tensor:
    """What rows got from all keys that they see, less the share that their heads' sinks take."""
    out, weight = partial
    if sinks is None:
        return out
    share = torch.sigmoid(weight.float() - sinks)
    return (out * share[..., None]).to(out.dtype)


def _rows(op: Op, part: SequencePart, work: Pass, length: int) -> tuple[int, int, Ints]:
    """The rows of q that are a part's, and the key behind the last one that each sees."""
    behind = length - (part.b - part.a) + 1
    if op.rows == "tokens":
        return part.a, part.b, np.arange(behind, length + 1)
    own = work.wanted[part.wanted_a : part.wanted_b] - part.a
    return part.wanted_a, part.wanted_b, own + behind


@dataclass(frozen=True, slots=True)
class _AttendedRows:
    """One sequence in one layer: its rows in the tables, and those of this pass as they came."""

    attrs: Attention
    length: int
    first: int  # row in the tables
    keys: KvTable
    values: KvTable
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    scratch: AttentionScratch

    def pieces(
        self, first: int, last: int, dtype: torch.dtype, small: bool, most: int
    ) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """The keys and values from `first` to `last`, in runs of `most` at most, of which each is only there
        until the next."""
        # A short pass is read back from the tables, in one piece with what came before it.
        own = last if small else max(first, self.length - len(self.k))
        width = self.attrs.n_kv_heads * self.attrs.head_dim
        step = max(1, min(most, PIECE_BYTES // (2 * width)))
        for lo in range(first, min(own, last), step):
            hi = min(lo + step, own, last)
            k = self._load(self.keys, lo, hi, dtype, "k")
            yield lo, hi, k, self._load(self.values, lo, hi, dtype, "v")
        if own < last:
            skip = own - (self.length - len(self.k))
            n = last - own
            yield own, last, self.k[skip : skip + n].to(dtype), self.v[skip : skip + n].to(dtype)

    def _load(self, table: KvTable, lo: int, hi: int, dtype: torch.dtype, name: str) -> Tensor:
        """Tokens lo to hi [tokens, width]: the table's own memory if they lie there just so."""
        raw = torch.from_numpy(table.raw)
        plain = _PLAIN.get(table.quant.name)
        if plain == dtype:
            return raw[self.first + lo : self.first + hi].view(dtype)
        width = table.n_heads * table.head_dim
        out = self.scratch.take(name, hi - lo, width, dtype)
        step = max(1, STAGE_BYTES // (4 * width))
        for at in range(lo, hi, step):
            end = min(hi, at + step)
            rows = raw[self.first + at : self.first + end]
            out[at - lo : end - lo].copy_(_numbers(table, rows, plain, self.scratch))
        return out


def _attend_part(
    seen: _AttendedRows, q: Tensor, ends: Ints, out: Tensor, between: Callable[[], None] | None
) -> None:
    a, n = seen.attrs, len(q)
    group = a.n_heads // a.n_kv_heads
    half = n * group <= HALF_ROWS and seen.keys.quant.name == "F16"
    dtype = torch.float16 if half else BF16
    cut = strips(ends, a.window, group)
    # Row i of a KV head's query heads is row i * group + head: the rows of some tokens lie together.
    folded = q.to(dtype).view(n, a.n_kv_heads, group, a.head_dim).transpose(0, 1)
    folded = folded.reshape(1, a.n_kv_heads, n * group, a.head_dim)
    total = _Total(n, group)
    first, last = min(s.lo for s in cut), max(s.hi for s in cut)
    most = sys.maxsize if between is None else max(1, ASIDE // (n * a.n_heads * a.head_dim))
    for x, y, k, v in seen.pieces(first, last, dtype, n * group <= WHOLE_ROWS, most):
        heads_k = k.view(y - x, a.n_kv_heads, a.head_dim).transpose(0, 1)[None]
        heads_v = v.view(y - x, a.n_kv_heads, a.head_dim).transpose(0, 1)[None]
        for s in cut:
            lo, hi = max(s.lo, x), min(s.hi, y)
            if lo >= hi:
                continue
            mask = (
                seen.scratch.mask(ends[s.a : s.b] - lo, hi - lo, a.window, group, dtype) if s.masked else None
            )
            rows = folded[:, :, s.a * group : s.b * group]
            total.add(
                s, _partial(a, rows, heads_k[:, :, lo - x : hi - x], heads_v[:, :, lo - x : hi - x], mask)
            )
        if between and y < last:  # nothing of this piece is needed any more: others may use its memory
            between()
    of_rows = None if seen.sinks is None else seen.sinks.view(a.n_kv_heads, group).repeat(1, n)
    heads_out = total.result(of_rows).view(a.n_kv_heads, n, group, a.head_dim).transpose(0, 1)
    out.view(n, a.n_kv_heads, group, a.head_dim).copy_(heads_out)


def _partial(a: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Partial:
    if a.softcap:
        return _capped(q, k, v, mask, a.scale, a.softcap)
    out, weight = _flash(q, k, v, attn_mask=mask, scale=a.scale)
    return out, weight


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float) -> Partial:
    """The same with a softcap, which the kernel does not know: a head and some rows at a time, in float32."""
    out, weight = torch.empty_like(q), torch.empty(q.shape[:3])
    step = max(1, PIECE_BYTES // (4 * k.shape[2]))
    for h in range(q.shape[1]):
        keys, values = k[0, h].float().T, v[0, h].float()
        for at in range(0, q.shape[2], step):
            scores = (q[0, h, at : at + step].float() * (scale / cap)) @ keys
            scores.tanh_().mul_(cap)
            if mask is not None:
                scores += mask[at : at + step]
            total = scores.logsumexp(-1)
            weight[0, h, at : at + step] = total
            out[0, h, at : at + step] = scores.sub_(total[:, None]).exp_() @ values
    return out, weight


class _Total:
    """What rows have got from the strips so far: a mean of the values, and the logarithm of its weight."""

    def __init__(self, n: int, group: int) -> None:
        self._group = group
        self._n = n
        self._fresh = np.ones(n, np.bool_)  # rows that have nothing yet
        self._sum: Partial | None = None

    def add(self, s: Strip, partial: Partial) -> None:
        """Rows s.a to s.b saw more keys."""
        new, weight = partial
        fresh = self._fresh[s.a : s.b].copy()
        self._fresh[s.a : s.b] = False
        if self._sum is None:
            if s.b - s.a == self._n:
                self._sum = partial
                return
            _, heads, _, dim = new.shape
            rows = self._n * self._group
            nothing = weight.new_full((1, heads, rows), -torch.inf)
            self._sum = new.new_zeros(1, heads, rows, dim), nothing
        here = slice(s.a * self._group, s.b * self._group)
        out, total = self._sum[0][:, :, here], self._sum[1][:, :, here]
        if fresh.all():
            out.copy_(new)
            total.copy_(weight)
        else:
            share = torch.sigmoid(weight - total).to(new.dtype)
            out.lerp_(new, share[..., None])
            torch.logaddexp(total, weight, out=total)

    def result(self, sinks: Tensor | None) -> Tensor:
        """The mean [heads, rows, dim]; `sinks`: of each of these rows."""
        assert self._sum is not None
        return _sunk(self._sum, sinks)[0]


def store(table: KvTable, slots: Ints, place: Place, x: Tensor) -> None:
    """Write a row of x for each slot."""
    if table.quant.name not in _PLAIN:
        table.write(slots, x.float().numpy())
        return
    rows = torch.from_numpy(table.raw).view(_PLAIN[table.quant.name])
    # From bf16 to F16 and back torch is three times faster by way of float32.
    if isinstance(place, slice):
        rows[place].copy_(x.float())
    else:
        rows[place] = x.float().to(rows.dtype)


def _place(slots: Ints) -> Place:
    one_run = len(slots) > 0 and bool((np.diff(slots) == 1).all())
    return slice(int(slots[0]), int(slots[-1]) + 1) if one_run else torch.from_numpy(slots)


def _numbers(table: KvTable, rows: Tensor, plain: torch.dtype | None, scratch: AttentionScratch) -> Tensor:
    """Stored rows as float32."""
    width = table.n_heads * table.head_dim
    if plain is not None:
        stage = scratch.take("stage", len(rows), width, torch.float32)
        return stage.copy_(rows.view(plain))
    if table.quant.name == "Q8_0":  # blocks of a scale in F16 and 32 signed bytes
        blocks = rows.view(len(rows), width // 32, 34)
        stage = scratch.take("stage", len(rows), width, torch.float32)
        numbers = stage.view(len(rows), width // 32, 32)
        torch.mul(blocks[..., 2:].view(torch.int8), blocks[..., :2].view(torch.float16).float(), out=numbers)
        return stage
    return torch.from_numpy(table.quant.dequantise(rows.contiguous().numpy(), width))
