"""What products go through, in numpy."""

from __future__ import annotations

import math

import numpy as np

from hetrun.backend import Floats

erf = np.vectorize(math.erf, otypes=[np.float64])  # numpy has none


def silu(x: Floats) -> Floats:
    """x * sigmoid(x)."""
    # exp overflows to inf for very negative x, and x / inf is the 0 that silu has there.
    with np.errstate(over="ignore"):
        out: Floats = x / (1 + np.exp(-x))
        return out


def gelu(x: Floats, exact: bool) -> Floats:
    """x times the share of a normal distribution below it, or its tanh approximation."""
    if exact:
        twice = 1 + erf(x / math.sqrt(2)).astype(np.float32)
    else:
        twice = 1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    out: Floats = 0.5 * x * twice
    return out
