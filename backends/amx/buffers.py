"""What weights are held in besides products, and how a runner gets at them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_int
from typing import TypeVar

from torch import Tensor

from hetrun.backend import Buffer
from hetrun.backends.amx.bf16_matmul import Bf16Product, FusedActivation
from hetrun.errors import BackendError
from hetrun.system.native_library import MissingFunction, load_library

B = TypeVar("B")

# Options of glibc's mallopt, by their numbers in malloc.h: what is at least given back to the system at once
# (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD), and what is asked for beyond what is needed (M_TOP_PAD).
KEPT_FREE = {-3: 32 << 20, -1: 128 << 20, -2: 64 << 20}


def keep_freed_memory() -> None:
    """Have malloc keep the memory of values that were let go, for the next ones.

    glibc gives large blocks back to the system, which zeroes every page of the next: up to a tenth of a pass,
    or nothing, as the heap happens to lie.
    """
    if sys.platform != "linux":
        return
    with suppress(MissingFunction):  # only glibc has it
        libc = load_library(None, {"mallopt": (c_int, c_int, c_int)})
        for option, size in KEPT_FREE.items():
            libc.mallopt(option, size)


class AmxExpertProducts:
    """The products of a mixture's experts."""

    def __init__(self, products: Sequence[Bf16Product]) -> None:
        self.products = products

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return sum(p.nbytes for p in self.products)


class Vector:
    """A gain, a bias or a router as floats [rows, cols], or matrices of heads in bf16."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return int(self.values.nbytes)


def held_as(buffer: Buffer, kind: type[B]) -> B:
    """A buffer as what this backend made of it."""
    if not isinstance(buffer, kind):
        raise _foreign(buffer, kind.__name__)
    return buffer


def vector_of(buffer: Buffer) -> Tensor:
    """A small weight's numbers."""
    return held_as(buffer, Vector).values


def product_of(buffer: Buffer) -> Bf16Product:
    """A weight to multiply by, however it is held."""
    if not isinstance(buffer, Bf16Product):
        raise _foreign(buffer, "a product")
    return buffer


def inside_of(buffer: Buffer) -> FusedActivation:
    """A weight to multiply by, with an activation inside."""
    if not isinstance(buffer, FusedActivation):
        raise _foreign(buffer, "a product that activations run inside of")
    return buffer


def _foreign(buffer: Buffer, wanted: str) -> BackendError:
    return BackendError(
        f"a weight is a {type(buffer).__name__}, not a {wanted}: it was loaded by another backend"
    )
