"""Kernels by name: their programs are compiled and loaded when the first of them is wanted."""

from __future__ import annotations

from ctypes import c_float, c_int, c_longlong, c_void_p
from typing import Protocol

from hetrun.backends.cuda.driver import Address, Argument, Driver, Kernel, Launch
from hetrun.backends.cuda.programs import Source

Number = Argument | int | float


class HasPrograms(Protocol):
    """Who compiles."""

    def program(self, source: Source) -> bytes:
        """What the driver can load."""
        ...


class KernelLibrary:
    """The kernels of one device."""

    def __init__(self, driver: Driver, programs: HasPrograms) -> None:
        self._driver, self._programs = driver, programs
        self._loaded: dict[Source, int] = {}
        self._kernels: dict[tuple[Source, str], tuple[Kernel, int]] = {}

    def launch(
        self,
        source: Source,
        name: str,
        grid: tuple[int, ...],
        threads: int,
        *arguments: Argument,
        shared: int = 0,
    ) -> Launch:
        """A kernel of a source, ready to be run."""
        x, y, z = (*grid, 1, 1)[:3]
        return Launch(self._kernel(source, name, shared), (x, y, z), threads, shared, arguments)

    def _kernel(self, source: Source, name: str, shared: int) -> Kernel:
        found, most = self._kernels.get((source, name), (0, -1))
        if shared > most:
            if source not in self._loaded:
                self._loaded[source] = self._driver.load(self._programs.program(source))
            found = self._driver.kernel(self._loaded[source], name, shared)
            self._kernels[source, name] = found, shared
        return found


def at(address: Address) -> c_void_p:
    """An address as an argument; 0 is null."""
    return c_void_p(address)


def number(value: int) -> c_int:
    """An int as an argument."""
    return c_int(value)


def long(value: int) -> c_longlong:
    """A long long as an argument."""
    return c_longlong(value)


def real(value: float) -> c_float:
    """A float as an argument."""
    return c_float(value)
