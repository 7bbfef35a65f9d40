"""Up to how many rows a product reads weights as they lie, where others unpack them for cuBLAS: both are
measured on the device the first time that it matters, and the result is kept for the next process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress

from hetrun.backend import FLOAT_BYTES
from hetrun.backends.cuda import matmul_launch
from hetrun.backends.cuda.driver import DeviceProduct, Launch
from hetrun.backends.cuda.kernel_cache import KernelLibrary, at, long, number
from hetrun.backends.cuda.matmul_launch import MatmulOutput
from hetrun.backends.cuda.memory import CudaMemory
from hetrun.backends.cuda.pass_args import FEW
from hetrun.backends.cuda.programs import source_texts
from hetrun.backends.cuda.weights import DeviceWeight
from hetrun.config import dirs
from hetrun.errors import BudgetError
from hetrun.system.files import replace_file

MOST = 128  # rows: with more, unpacking costs less, as all of them share it
TRIED = 64  # rows that are measured; our kernels take eight at a time, so what they take grows with the rows
GROUP = 8
LEAST = 1 << 22  # numbers of a matrix: smaller ones say little about the device
TIMES = 5  # of which the fastest counts
THREADS = 256
BLOCKS = 4096


class FewRowsLimits:
    """By type of weights, for one device."""

    def __init__(self, memory: CudaMemory, library: KernelLibrary) -> None:
        self._memory, self._library = memory, library
        self._path = dirs().cache / "cuda" / f"few-rows-{_digest(memory)}.json"
        self._known: dict[str, int] | None = None

    def of(self, weight: DeviceWeight, scratch: int, scratch_bytes: int) -> int:
        """The most rows for which weights of this type are read as they lie."""
        rows, cols = weight.shape
        if weight.quant.name == "BF16":  # cuBLAS reads it as it is
            return FEW
        known = self._read()
        if weight.quant.name not in known:
            rows = min(rows, scratch_bytes // (2 * cols))
            if rows * cols < LEAST:
                return FEW
            try:
                known[weight.quant.name] = self._measured(weight, rows, scratch, scratch_bytes)
            except BudgetError:
                return FEW
            with suppress(OSError):  # to measure again costs milliseconds
                replace_file(self._path, json.dumps(known).encode())
        return known[weight.quant.name]

    def _read(self) -> dict[str, int]:
        if self._known is None:
            self._known = {}
            with suppress(OSError, ValueError):
                found = json.loads(self._path.read_text())
                self._known = {str(name): min(MOST, max(FEW, int(n))) for name, n in found.items()}
        return self._known

    def _measured(self, weight: DeviceWeight, rows: int, scratch: int, scratch_bytes: int) -> int:
        memory, cols = self._memory, weight.shape[1]
        sizes = FLOAT_BYTES * TRIED * cols, 2 * TRIED * cols, FLOAT_BYTES * TRIED * rows
        taken = list[int]()
        try:
            for nbytes in sizes:
                taken.append(memory.take(nbytes, "measuring products"))
                memory.driver.fill(taken[-1], 0, nbytes, memory.computing)
            x, x_bf16, y = taken
            few = self._few(weight, rows, x, y)
            unpack, product = self._unpacked(weight, rows, x_bf16, scratch, y)

            def as_they_lie() -> None:
                memory.driver.launch(few, memory.computing)

            def unpacked() -> None:
                memory.driver.launch(unpack, memory.computing)
                memory.driver.multiply(product, memory.computing)

            one, other = (self._seconds(work, scratch, scratch_bytes) for work in (as_they_lie, unpacked))
        finally:
            for address in taken:
                memory.give(address)
        even = TRIED * other / one if one > 0 else 0.0  # rows for which both take as long
        return min(MOST, max(FEW, int(even) // GROUP * GROUP))

    def _seconds(self, work: Callable[[], None], scratch: int, scratch_bytes: int) -> float:
        """The first time is no measure: what CUDA loads when it is needed. Something else lies in the second
        cache each time, as in a pass."""
        driver, stream, found = self._memory.driver, self._memory.computing, list[float]()
        work()
        for _ in range(TIMES):
            driver.fill(scratch, 0, scratch_bytes, stream)
            found.append(driver.seconds(work, stream))
        return min(found)

    def _few(self, weight: DeviceWeight, rows: int, x: int, y: int) -> Launch:
        three = matmul_launch.three([MatmulOutput(weight.address, 0, 0, y, rows, rows)])
        cols, grid = number(weight.shape[1]), (matmul_launch.blocks(TRIED, rows),)
        name = f"few_{matmul_launch.group_of(TRIED)}"
        given = *three, at(x), cols, cols, number(TRIED)
        return self._library.launch(weight.source, name, grid, matmul_launch.THREADS, *given)

    def _unpacked(
        self, weight: DeviceWeight, rows: int, x_bf16: int, scratch: int, y: int
    ) -> tuple[Launch, DeviceProduct]:
        cols = weight.shape[1]
        pieces = rows * cols // 8
        grid, given = (min(BLOCKS, -(-pieces // THREADS)),), (at(weight.address), at(scratch), long(pieces))
        unpack = self._library.launch(weight.source, "unpack_bf16", grid, THREADS, *given)
        return unpack, DeviceProduct(x_bf16, scratch, y, TRIED, rows, cols, rows)


def _digest(memory: CudaMemory) -> str:
    """What decides about it: the device, and the kernels."""
    device = memory.driver.device
    facts = [device.name, str(device.capability), str(device.processors), *source_texts().values()]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
