"""The gated delta rule for many tokens at once: chunks of them, as products of matrices.

With q, k and v the rows of a chunk, S what is known before it, G the sums of the decays' logarithms up to
each row, and D[i, j] = exp(G[i] - G[j]) where j is not after i, what each row adds to the state is a vector
u[i], which hangs on those before it:

    u[i] = beta[i] * (v[i] - exp(G[i]) * S @ k[i] - sum over j < i of D[i, j] * (k[i] . k[j]) * u[j])

These are the rows of (I + L) U = beta * (V - exp(G) * K S'), where below the diagonal L[i, j] is
beta[i] * D[i, j] * (k[i] . k[j]). I + L is inverted in float32, the type of the state and of the decays; the
other products are of bf16, summed in float32:

    results = exp(G) * Q S' + (D * Q K') U
    S       = exp(G[last]) * S + U' (exp(G[last] - G) * K)

Mamba 2's rule takes nothing off v: there u[i] is beta[i] * v[i].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hetrun.backends.amx.bf16_matmul import BF16
from hetrun.backends.amx.triangular import BLOCK, unit_inverse
from hetrun.graph.ops import DeltaNet

ROWS = 64  # of a chunk: fewer rows take the state more often, more rows take larger triangles


def passing_bytes(a: DeltaNet, tokens: int) -> int:
    """Memory that the op takes and gives back, besides its result: the keys and queries as they are
    multiplied, and of a chunk its triangles, its rows in both types, and twice the state."""
    triangles, rows = 20 * ROWS, 14 * a.k_dim + 12 * a.v_dim
    return 8 * tokens * a.k_width + a.v_heads * (ROWS * (triangles + rows) + 12 * a.v_dim * a.row)


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """What the rule has of some rows of a pass, in float32."""

    qk: Tensor  # [n, 2, heads of k, columns], as they are multiplied
    v: Tensor  # [n, heads, columns]
    decay: Tensor  # [n, heads]: logarithms
    rate: Tensor  # [n, heads]

    def __len__(self) -> int:
        return len(self.v)

    def cut(self, a: int, b: int) -> DeltaRows:
        """Rows a to b."""
        return DeltaRows(self.qk[a:b], self.v[a:b], self.decay[a:b], self.rate[a:b])

    def filled(self, n: int) -> DeltaRows:
        """With rows after them that change nothing, n in all."""
        more = n - len(self)
        if not more:
            return self
        return DeltaRows(
            functional.pad(self.qk, (0, 0, 0, 0, 0, 0, 0, more)),
            functional.pad(self.v, (0, 0, 0, 0, 0, more)),
            functional.pad(self.decay, (0, 0, 0, more)),
            functional.pad(self.rate, (0, 0, 0, more)),
        )


def chunk(a: DeltaNet, rows: DeltaRows, state: Tensor, out: Tensor) -> None:
    """One chunk of ROWS rows at most: the state [heads, v_dim, row] as it is after them, and their results
    [n, heads, v_dim]."""
    n, size = len(rows), BLOCK
    while size < n:
        size *= 2
    rows = rows.filled(size)
    total = rows.decay.cumsum(0).t().contiguous()  # [heads, rows]
    known = state[..., : a.k_dim]
    qk = _rounded(rows.qk.permute(2, 1, 0, 3))
    mixing, solving = _triangles(a, qk, total, rows.rate)
    q, k, last = _scaled(a, qk, total)
    before = known.to(BF16).transpose(1, 2)
    if solving is None:
        new = _rounded((rows.v * rows.rate[:, :, None]).transpose(0, 1))
    else:
        new = torch.bmm(solving, torch.baddbmm(_rounded(rows.v.transpose(0, 1)), k, before))
    found = torch.baddbmm(torch.bmm(q, before), mixing, new)
    out.copy_(found.transpose(0, 1)[:n])
    added = torch.bmm(new.transpose(1, 2), last)
    torch.addcmul(added, known, total[:, -1].exp()[:, None, None], out=known)


def _rounded(x: Tensor) -> Tensor:
    return x.to(BF16, memory_format=torch.contiguous_format)


def _triangles(a: DeltaNet, qk: Tensor, total: Tensor, rate: Tensor) -> tuple[Tensor, Tensor | None]:
    """Of each head what mixes U into the results, and the inverse of I + L, times beta; for Mamba none."""
    n = qk.shape[2]
    products = torch.bmm(qk.view(-1, 2 * n, a.k_dim), qk[:, 1].transpose(1, 2)).view(-1, 2, n, n)
    # Where a row is after the other, exp may be infinite: it is overwritten, not multiplied.
    seen = (total[:, :, None] - total[:, None]).exp_().tril_()
    grouped, beta = by_k_heads(a, seen), rate.t().contiguous()
    mixing = (grouped * of_k_heads(a, products[:, 0])).view(seen.shape).to(BF16)
    if a.mamba:
        return mixing, None
    grouped.mul_(of_k_heads(a, products[:, 1]))
    inverse = unit_inverse(seen.mul_(beta[:, :, None]))
    return mixing, inverse.mul_(beta[:, None]).to(BF16)


def _scaled(a: DeltaNet, qk: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each head q and -k as what is known before the chunk is multiplied by, and k as it is added."""
    n = qk.shape[2]
    far = total.exp()
    factors = torch.stack((far, -far, (total[:, -1:] - total).exp_()), 1)
    scaled = torch.empty((a.v_heads, 3, n, a.k_dim), dtype=BF16)
    into, by = by_k_heads(a, scaled), by_k_heads(a, factors[..., None])
    both = of_k_heads(a, qk)
    into[:, :, :2] = both * by[:, :, :2]
    into[:, :, 2] = both[:, :, 1] * by[:, :, 2]
    q, k, last = scaled.unbind(1)
    return q, k, last


# --- a head of k has several of v


def by_k_heads(a: DeltaNet, x: Tensor) -> Tensor:
    """A tensor with a row for each head of v, by the heads of k that they go with: `of_k_heads` fits it."""
    times = a.v_heads // a.k_heads
    first = (times, a.k_heads) if a.tiled else (a.k_heads, times)
    return x.view(*first, *x.shape[1:])


def of_k_heads(a: DeltaNet, x: Tensor) -> Tensor:
    """A tensor with a row for each head of k, so that those of v that it has are multiplied by it."""
    return x[None] if a.tiled else x[:, None]
