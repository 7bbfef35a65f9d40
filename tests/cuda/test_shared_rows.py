"""Keys and values that layers lend each other, and rows that are both, on the emulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from hetrun.backend import Backend
from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.reference import descriptor
from hetrun.planner.plan import BUCKETS, PlanSet, make_plans
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.kernels import needs_compiler
from tests.support.rig import Placed, Rig, graph_of, placements, rig
from tests.support.tiers import first

if TYPE_CHECKING:
    from tests.models.hf import Row

pytestmark = [needs_compiler, pytest.mark.slow]
FEW = BUCKETS[:4]  # up to 16 tokens
ALL = {"": "cuda"}
# Layers 2 and 3 of Gemma have the keys and values of 0 and 1. For passes of few tokens, and for others.
PLACES: dict[str, tuple[Placed, Placed]] = {
    "all": (ALL, ALL),
    "by turns": (
        {"": "cuda", "blk.2": "reference"},
        {"": "cuda", "blk.0": "reference", "blk.1": "reference"},
    ),
    "the host's in between": ({"": "cuda", "blk.1.ffn": "reference"},) * 2,
    "theirs here": ({"": "reference", "blk.2": "cuda", "blk.3": "cuda"},) * 2,
    "ours there": ({"": "reference", "blk.0": "cuda", "blk.1": "cuda"},) * 2,
}


def row_of(name: str) -> Row:
    pytest.importorskip("torch", reason="needs torch, which writes the model")
    from tests.models import cases_hf

    return next(row for row in cases_hf.ROWS if str(row) == name)


def close(found: np.ndarray, right: np.ndarray) -> None:
    assert found.shape == right.shape
    assert np.square(found - right).sum() <= 1e-4 * np.square(right).sum()


def tokens_of(n: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 100, n)]


def both(row: Row, few: Placed, many: Placed) -> tuple[Rig, Rig]:
    backends: dict[str, Backend] = {"cuda": emulated(name="cuda"), "reference": descriptor.create()}
    by_bucket = {b: (1, placements(few if b in FEW else many)) for b in BUCKETS}
    plans = PlanSet(make_plans(graph_of(row), by_bucket, ["cuda"]), 32, "a test")
    mine = rig(row, backends, plans=plans, context=256)
    return mine, rig(row, {"reference": descriptor.create()}, ubatch=32, context=256)


CASES = [
    *(("gemma4_text-plain", placed) for placed in PLACES),
    *(("deepseek_v3-plain", placed) for placed in ("all", "by turns")),
    *((name, "all") for name in ("glm4_moe_lite-plain", "gemma4_text-others-lend", "gemma4_text-mixture")),
]


@pytest.mark.parametrize("case", first(CASES, 6), ids="-".join)
def test_a_model_is_the_same_wherever_its_layers_are(case: tuple[str, str]) -> None:
    """With forks, cuts, and texts that are longer than a pass and than a window."""
    name, placed = case
    mine, right = both(row_of(name), *PLACES[placed])
    rng = np.random.default_rng(4)
    pairs = [(mine.kv.alloc(), right.kv.alloc())]
    for i, n in enumerate([33, 1, 1, 5, 1, 40, 1, 1, 2, 1]):
        a, b = pairs[int(rng.integers(len(pairs)))]
        close(mine.logits(a, tokens_of(n, i)), right.logits(b, tokens_of(n, i)))
        if i in (2, 5):
            pairs.append((mine.kv.fork(a), right.kv.fork(b)))
        if i in (3, 7):
            length = mine.kv.length(a) - 2
            if mine.kv.keepable(a, length):
                mine.kv.truncate(a, length)
                right.kv.truncate(b, length)
    mine.close()
    right.close()


def test_a_latent_row_lies_there_once() -> None:
    mine, right = both(row_of("deepseek_v3-plain"), ALL, ALL)
    mine.logits(mine.kv.alloc(), tokens_of(5, 0))
    backend = mine.backends["cuda"]
    assert isinstance(backend, CudaBackend)
    planes = [key for slabs in backend.gpu._slabs.values() for key in slabs.planes]
    assert planes
    assert all(which == 0 for _, which in planes)
    mine.close()
    right.close()
