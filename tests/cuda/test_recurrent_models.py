"""Qwen 3.5 on the emulator, beside the reference: layers with states, wherever they are."""

from __future__ import annotations

import numpy as np
import pytest

from hetrun.backend import Backend
from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.reference import descriptor
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.kernels import needs_compiler
from tests.support.rig import Rig, rig

pytestmark = [needs_compiler, pytest.mark.slow]
PLACES = {
    "all": {"": "cuda"},
    "beside others": {"": "cuda", "blk.1": "reference", "blk.2.attn.score": "reference"},
    "a layer": {"": "reference", "blk.1.attn": "cuda"},
}


def close(found: np.ndarray, right: np.ndarray) -> None:
    assert found.shape == right.shape
    assert np.square(found - right).sum() <= 1e-4 * np.square(right).sum()


def tokens_of(n: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 100, n)]


def both(placed: dict[str, str]) -> tuple[Rig, Rig]:
    """A model with layers on the GPU, and the same on the reference."""
    pytest.importorskip("torch", reason="needs torch, which writes the model")
    from tests.models import cases_hf

    row = next(row for row in cases_hf.QWEN35 if row.name == "plain")
    backends: dict[str, Backend] = {"cuda": emulated(name="cuda"), "reference": descriptor.create()}
    mine = rig(row, backends, placed, ubatch=32, context=256)
    return mine, rig(row, {"reference": descriptor.create()}, ubatch=32, context=256)


@pytest.mark.parametrize("placed", PLACES)
def test_a_model_is_the_same_wherever_its_layers_are(placed: str) -> None:
    """With forks, cuts, and texts that are longer than a pass."""
    mine, right = both(PLACES[placed])
    rng = np.random.default_rng(3)
    pairs = [(mine.kv.alloc(), right.kv.alloc())]
    for i in range(14):
        a, b = pairs[int(rng.integers(len(pairs)))]
        length = mine.kv.length(a)
        match int(rng.integers(5)):
            case 0 if length and len(pairs) < 4:
                pairs.append((mine.kv.fork(a), right.kv.fork(b)))
            case 1 if length:
                n = max(n for n in range(length) if mine.kv.keepable(a, n))
                mine.kv.truncate(a, n)
                right.kv.truncate(b, n)
            case 2 if len(pairs) > 2:
                pairs.remove((a, b))
                mine.kv.free(a)
                right.kv.free(b)
            case _:
                n = int(rng.choice([1, 1, 1, 5, 36]))
                some = pairs if i % 2 else [(a, b)]
                if all(mine.kv.length(seq) + n <= 250 for seq, _ in some):
                    text = tokens_of(n, i)
                    found = mine.step(*[(seq, text, range(n)) for seq, _ in some])
                    close(found, right.step(*[(seq, text, range(n)) for _, seq in some]))
    mine.close()
    right.close()


def test_a_state_is_brought_once() -> None:
    """Token by token the device goes on with what it wrote itself."""
    mine, right = both(PLACES["all"])
    a, b = mine.kv.alloc(), right.kv.alloc()
    close(mine.logits(a, tokens_of(9, 0)), right.logits(b, tokens_of(9, 0)))
    backend = mine.backends["cuda"]
    assert isinstance(backend, CudaBackend)
    (mirror,) = backend.gpu._states.values()
    assert mirror.brought == 0
    for i in range(4):
        close(mine.logits(a, tokens_of(1, i)), right.logits(b, tokens_of(1, i)))
    assert mirror.brought == 0
    while mirror.drop_oldest():
        pass
    mirror._in_use = frozenset()
    assert mirror.drop_oldest()
    while mirror.drop_oldest():
        pass
    close(mine.logits(a, tokens_of(1, 9)), right.logits(b, tokens_of(1, 9)))
    assert mirror.brought == 1
    mine.close()
    right.close()
