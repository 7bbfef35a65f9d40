"""What products reach on this machine, for `hetrun devices --measure`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter

import torch

from hetrun.backends.amx.bf16_matmul import BF16, multiply, pack

# Rows and side of products, from ones that the slowest CPU ends in milliseconds to one that reaches the peak.
SIZES = ((1, 256), (16, 256), (64, 512), (256, 1024), (512, 2048))
LONGEST_S = 0.4  # that one product may take by the speed of smaller ones: nothing interrupts it
SECONDS = 0.1  # for each size
LEAST = 3  # products of a size: the first one is slower

Make = Callable[[int, int], Callable[[], object]]


def peaks() -> dict[str, float]:
    """Operations per second of bf16 and, where torch has them, of int8 products."""
    found = {"bf16": rate_of(_bf16)}
    # An inner interface of torch's, and not every CPU has it.
    with suppress(AttributeError, RuntimeError, TypeError):
        found["int8"] = rate_of(_int8)
    return found


def rate_of(make: Make) -> float:
    """Of the fastest product, of sizes that grow as long as the CPU is fast enough for the next one: without
    instructions for a type, torch computes it a thousand times slower."""
    rate = 0.0
    for rows, side in SIZES:
        operations = 2 * rows * side * side
        if rate and operations / rate > LONGEST_S:
            break
        rate = max(rate, operations / _shortest(make(rows, side)))
    return rate


def _shortest(product: Callable[[], object]) -> float:
    """Seconds, of as many as there is time for."""
    times, end = list[float](), perf_counter() + SECONDS
    while len(times) < LEAST or perf_counter() < end:
        start = perf_counter()
        product()
        times.append(perf_counter() - start)
    return min(times)


def _bf16(rows: int, side: int) -> Callable[[], object]:
    weight, x = pack(torch.ones(side, side, dtype=BF16)), torch.ones(rows, side, dtype=BF16)
    return lambda: multiply(x, weight, None)


def _int8(rows: int, side: int) -> Callable[[], object]:
    weight = torch.ops.onednn.qlinear_prepack(torch.ones(side, side, dtype=torch.int8), [rows, side])
    x = torch.ones(rows, side, dtype=torch.uint8)
    scales, zeros = torch.ones(side), torch.zeros(side, dtype=torch.int64)
    product = torch.ops.onednn.qlinear_pointwise
    return lambda: product(x, 1.0, 128, weight, scales, zeros, None, 1.0, 0, BF16, "none", [], "")
