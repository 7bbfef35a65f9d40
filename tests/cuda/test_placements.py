"""Random placements on a real GPU. The same runs on the emulator, in tests/cuda/test_stages.py."""

from __future__ import annotations

import pytest

from hetrun.backend import Available, registry
from tests.cuda.placements import one

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        not isinstance(registry.backends()["cuda"].probe(), Available), reason="there is no GPU here"
    ),
]


@pytest.mark.parametrize("seed", range(24))
def test_random_placements_on_cuda_say_what_the_reference_says(seed: int) -> None:
    one(seed)
