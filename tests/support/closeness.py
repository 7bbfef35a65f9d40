"""How far two ways to compute the same model may lie apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.support.rig import Case

CLOSE = 0.4  # how near the reference's two best logits must be where the best token may differ
# Tiny random models have logits of some units, whatever comes in: rounding shows more than in trained ones.
KL = {"bf16": 5e-3, "int8": 5e-2}
# Of three experts chosen by sigmoids the last one has nearly as much as the first: where rounding chooses
# another one the logits are others. The operations of these models are held one by one.
HASTY = {
    *("afmoe-plain", "deepseek_v3-plain", "dots1-plain", "glm4_moe-plain", "glm4_moe_lite-plain"),
    "minimax_m2-plain",
}


def mean_kl(expected: np.ndarray, found: np.ndarray) -> float:
    return float(kl_of_each(expected, found).mean())


def kl_of_each(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    p, q = (x.astype(np.float64) - x.max(-1, keepdims=True) for x in (expected, found))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    each: np.ndarray = (np.exp(p) * (p - q)).sum(-1)
    return each


def assert_close(expected: np.ndarray, found: np.ndarray, kl: float) -> None:
    best, chosen = expected.argmax(-1), found.argmax(-1)
    two = np.sort(expected, axis=-1)[:, -2:]
    differs = best != chosen
    assert (two[differs, 1] - two[differs, 0] <= CLOSE).all()
    assert mean_kl(expected, found) <= kl


def limit(case: Case) -> float:
    """How far logits may lie apart. ggml looks GELU up in a table of half floats: once in each of two layers,
    or up to three times in each of four."""
    return {"gemma3": 2e-3, "gemma4": 1e-2}.get(str(case)[:6], 1e-3)
