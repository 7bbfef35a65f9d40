"""The reference's attention against the formula, token by token."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from hetrun.backend import Pass, SequencePart
from hetrun.backends.reference.attention import attention
from hetrun.graph import KvShape, Op, Rows, Value
from hetrun.graph.ops import Attention
from hetrun.graph.quant import by_name
from hetrun.memory.kv.cache import KvCache

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 8, 150
RNG = np.random.default_rng(1)
Q, K, V = (RNG.standard_normal((TOKENS, n, DIM), dtype=np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))


@cache
def dense(a: Attention) -> np.ndarray:
    """What each token of a text gets from those that it sees."""
    out = np.zeros((TOKENS, HEADS, DIM))
    for t in range(TOKENS):
        seen = [s for s in range(t + 1) if not a.window or t - s < a.window]
        for h in range(HEADS):
            kv = h // (HEADS // KV_HEADS)
            scores = [a.scale * float(Q[t, h].astype(np.float64) @ K[s, kv]) for s in seen]
            if a.softcap:
                scores = [a.softcap * math.tanh(x / a.softcap) for x in scores]
            weights = [math.exp(x) for x in scores]
            for s, w in zip(seen, weights, strict=True):
                out[t, h] += w / sum(weights) * V[s, kv]
    return out.reshape(TOKENS, HEADS * DIM)


@pytest.mark.parametrize("rows", ["tokens", "wanted"])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("window", [0, 1, 11, 1000])
def test_in_pieces_as_by_the_formula(window: int, softcap: float, rows: Rows) -> None:
    a = Attention(0, HEADS, KV_HEADS, DIM, 0.9, window, softcap)
    kv = KvCache({0: KvShape(KV_HEADS, DIM, window)}, by_name("F32"), 256, 1, 40)
    q, k, v = (Value(name, 1, "tokens") for name in "qkv")
    op = Op("attention", (Value("q", 1, rows), k, v), q, (), a, "test")
    seq, at, found = kv.alloc(), 0, []
    for n in (1, 1, 30, 5, 40, 40, 1, 1, 31):
        wanted = np.arange(n) if rows == "tokens" else np.arange(n)[:: -(n // 2 or 1)][::-1].copy()
        slots = kv.extend(seq, n)
        part = SequencePart(0, n, 0, len(wanted), kv.views(seq, at, at + n))
        work = Pass(np.zeros(n, np.int64), np.arange(at, at + n), slots, wanted, (part,))
        flat = [x[at : at + n].reshape(n, -1) for x in (Q, K, V)]
        result = attention(op, [flat[0][wanted], flat[1], flat[2]], [], work, kv)
        found.append((at + wanted, result))
        at += n
    assert at == TOKENS
    expected = dense(a)
    for positions, result in found:
        np.testing.assert_allclose(result, expected[positions], rtol=1e-4, atol=1e-5)
