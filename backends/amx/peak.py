"""What products reach on this machine, for `hetrun devices --measure`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter

import torch

from hetrun.backends.amx.bf16_matmul import BF16, multiply, pack

ROWS, SIDE = 512, 2048  # of a product that is large enough for the peak and over in milliseconds
SECONDS = 0.2  # for each kind


def peaks() -> dict[str, float]:
    """Operations per second of bf16 and, where torch has them, of int8 products."""
    found = {"bf16": _rate(_bf16())}
    # An inner interface of torch's, and not every CPU has it.
    with suppress(AttributeError, RuntimeError, TypeError):
        found["int8"] = _rate(_int8())
    return found


def _rate(product: Callable[[], object]) -> float:
    """Of the fastest of as many products as there is time for."""
    product()
    best, end = float("inf"), perf_counter() + SECONDS
    while (start := perf_counter()) < end:
        product()
        best = min(best, perf_counter() - start)
    return 2 * ROWS * SIDE * SIDE / best


def _bf16() -> Callable[[], object]:
    weight, x = pack(torch.ones(SIDE, SIDE, dtype=BF16)), torch.ones(ROWS, SIDE, dtype=BF16)
    return lambda: multiply(x, weight, None)


def _int8() -> Callable[[], object]:
    weight = torch.ops.onednn.qlinear_prepack(torch.ones(SIDE, SIDE, dtype=torch.int8), [ROWS, SIDE])
    x = torch.ones(ROWS, SIDE, dtype=torch.uint8)
    scales, zeros = torch.ones(SIDE), torch.zeros(SIDE, dtype=torch.int64)
    product = torch.ops.onednn.qlinear_pointwise
    return lambda: product(x, 1.0, 128, weight, scales, zeros, None, 1.0, 0, BF16, "none", [], "")
