"""What weights are held in besides products, and how a runner gets at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from hetrun.backend import Buffer
from hetrun.backends.amx.products import Product
from hetrun.errors import BackendError

B = TypeVar("B")


class Experts:
    """The products of a mixture's experts."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = products

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return sum(p.nbytes for p in self.products)


class Vector:
    """A gain, a bias or a router as floats [rows, cols]."""

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


def product_of(buffer: Buffer) -> Product:
    """A weight to multiply by, however it is held."""
    if not isinstance(buffer, Product):
        raise _foreign(buffer, "a product")
    return buffer


def _foreign(buffer: Buffer, wanted: str) -> BackendError:
    return BackendError(f"a weight came as {type(buffer).__name__}, not as {wanted}: another backend has it")
