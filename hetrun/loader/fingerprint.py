"""What only the same computation of the same model has: whose keys and values a file may hold.

A file's size and time say nothing of a copy, and a model's settings nothing of what it learnt since: so the
graph counts (every op with its attributes, every weight's shape and type) and some bytes of each weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from hetrun.graph import Constant, Extent, Graph, Op, Remade, Weight
from hetrun.loader.weight_reader import FileReader

SAMPLE = 512  # bytes of a part of a weight at its beginning, its middle and its end
PARTS = 16  # that are looked at, at most


def fingerprint(graph: Graph, *more: object) -> bytes:
    """32 bytes of a graph and of whatever else its rows depend on, which is taken by its words."""
    digest = hashlib.blake2b(digest_size=32)
    reader = FileReader()
    try:
        for op in graph.ops:
            digest.update(_words(op))
            for weight in op.weights:
                for sample in _samples(weight, reader):
                    digest.update(sample)
        for table in graph.tables:
            digest.update(repr((table.weight.name, table.weight.shape, table.factor)).encode())
            for sample in _samples(table.weight, reader):
                digest.update(sample)
    finally:
        reader.close()
    digest.update(repr(more).encode())
    return digest.digest()


def _words(op: Op) -> bytes:
    """An op without where its weights lie."""
    values = [(v.name, v.width, v.rows) for v in (*op.inputs, op.out)]
    weights = [(w.name, w.shape, w.quant.name) for w in op.weights]
    return repr((op.kind, op.scope, op.attrs, values, weights)).encode()


def _samples(weight: Weight, reader: FileReader) -> Iterator[bytes]:
    # Experts that lie by themselves are hundreds: as many reads, and each of them may be one of the disk.
    for part in weight.parts[:: -(-len(weight.parts) // PARTS)]:
        if isinstance(part, Constant):
            yield part.data
            continue
        for extent in part.sources if isinstance(part, Remade) else (part,):
            middle = extent.rows // 2 * extent.stride
            for skip, size in _places(extent.row_bytes, middle, extent.end - extent.offset):
                yield _read(reader, extent, skip, size, weight.name)


def _places(row: int, middle: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Where a part is looked at: rows may be parts of longer ones, so only inside a row."""
    size = min(SAMPLE, row)
    yield from ((0, size), (middle, size), (nbytes - size, size))


def _read(reader: FileReader, part: Extent, skip: int, size: int, name: str) -> bytes:
    found = np.empty(size, np.uint8)
    reader.fill(found.data, part, skip, name)
    return found.tobytes()
