"""From weights in files to the bytes of a GGUF file: slices of rows, several at once, in order.

The caller's thread reads and hands on; plain threads convert, for numpy and ggml both let go of the
interpreter lock. docs/adr/0011-conversion.md says why this needs no engine thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hetrun.errors import ModelFileError
from hetrun.graph import Extent, Weight, stack
from hetrun.graph.quant import Bytes, Floats, QuantType
from hetrun.loader.hf_mapping import AddOne, Change, Interleave, TileHeads
from hetrun.loader.weight_reader import FileReader

SLICE_WEIGHTS = 1 << 20  # converted in one go: tens of milliseconds, and 4 MiB as floats

Quantiser = Callable[[QuantType, Floats], Bytes]


def file_of(weight: Weight) -> str:
    """Where a weight lies, for messages."""
    return next((p.path for p in weight.parts if isinstance(p, Extent)), "the model")


def in_order(weight: Weight, change: Change | None) -> Weight:
    """The weight with its rows in the order that the new file has, where whole blocks of them move."""
    if not isinstance(change, TileHeads) or change.columns:
        return weight
    if change.skip + change.v_heads * change.size != weight.shape[0]:
        found = f"the {weight.shape[0]} rows of {weight.name} are not those of {change.v_heads} heads"
        raise ModelFileError(file_of(weight), found)
    heads = weight.rows(change.skip, weight.shape[0])
    moved = heads.blocks(change.order, change.size, "heads")
    parts = [weight.rows(0, change.skip), moved] if change.skip else [moved]
    return replace(stack(parts), name=weight.name)


@dataclass(frozen=True, slots=True)
class TensorJob:
    """One tensor of the new file: a weight, what must be done to it, and the type that it gets."""

    weight: Weight
    quant: QuantType
    change: Change | None = None

    @property
    def group(self) -> int:
        """Rows that must stay together."""
        if isinstance(self.change, Interleave) and self.weight.shape[0] > 1:
            return self.weight.shape[0] // self.change.n_heads
        return 1


def convert(
    jobs: Sequence[TensorJob],
    threads: int,
    quantise: Quantiser,
    progress: Callable[[float], None] | None = None,
) -> Generator[tuple[int, Bytes], None, None]:
    """The bytes of each job's tensor in pieces, in order, with the job's index.

    While the caller writes a piece, the next ones are converted: two for each thread are read ahead, which
    bounds the memory whatever the size of a tensor.
    """
    total, done = sum(_weights(job.weight) for job in jobs) or 1, 0
    reader = FileReader()
    pending: deque[tuple[int, int, Future[Bytes]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="convert")
    try:
        for index, part in _slices(jobs):
            raw = np.empty((part.shape[0], part.quant.row_bytes(part.shape[1])), np.uint8)
            reader.read(part, raw.reshape(-1))
            future = pool.submit(_piece, jobs[index], raw, part.shape[1], quantise)
            pending.append((index, _weights(part), future))
            while len(pending) > 2 * threads or (pending and pending[0][2].done()):
                at, n, future = pending.popleft()
                yield at, future.result()
                done += n
                if progress:
                    progress(done / total)
        for at, _, future in pending:
            yield at, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        reader.close()


def _weights(weight: Weight) -> int:
    return weight.shape[0] * weight.shape[1]


def _slices(jobs: Sequence[TensorJob]) -> Iterator[tuple[int, Weight]]:
    for index, job in enumerate(jobs):
        rows, cols = job.weight.shape
        step = max(1, SLICE_WEIGHTS // (cols * job.group)) * job.group
        for a in range(0, rows, step):
            yield index, job.weight.rows(a, min(a + step, rows))


def _piece(job: TensorJob, raw: Bytes, cols: int, quantise: Quantiser) -> Bytes:
    """What one slice is in the new file; `raw` is [rows, row_bytes]."""
    change = job.change
    if isinstance(change, Interleave):
        raw = _interleave(raw, change.n_heads, job)
    if isinstance(change, TileHeads) and change.columns:
        raw = raw.reshape(len(raw), change.v_heads, -1)[:, change.order].reshape(raw.shape)
    computes = isinstance(change, AddOne) or (isinstance(change, TileHeads) and change.negative_exp)
    if job.quant is job.weight.quant and not computes:
        return raw.reshape(-1)
    x = job.weight.quant.dequantise(raw, cols)
    if computes:
        x = x + np.float32(1) if isinstance(change, AddOne) else -np.exp(x)
    try:
        return quantise(job.quant, x).reshape(-1)
    except ValueError as e:
        raise ModelFileError(
            file_of(job.weight), f"the tensor {job.weight.name} cannot be converted: {e}"
        ) from e


def _interleave(raw: Bytes, n_heads: int, job: TensorJob) -> Bytes:
    """The two halves of each head's rows in turn; in a vector, of each head's elements."""
    if job.weight.shape[0] == 1:
        units: npt.NDArray[np.uint8] = raw.reshape(job.weight.shape[1], -1)
        per_head = len(units) // n_heads
    else:
        units, per_head = raw, job.group
    halves = units.reshape(-1, 2, per_head // 2, units.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(raw.shape)
