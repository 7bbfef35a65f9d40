"""How a weight lies in its file, for who would use it as it lies there."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.backend import WeightUse
from hetrun.graph import Extent
from hetrun.system.file_identity import Stamp

# What an address must be a multiple of: ggml's kernels load vectors from anywhere, and numbers where C wants
# them. Numbers of 32 bits are in no blocks.
NATURAL = {"F32": 4}
IN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class MatrixRun:
    """The matrices of a weight: `matrices` of them, each `distance` bytes behind the one before."""

    path: str
    stamp: Stamp | None
    offset: int
    matrices: int
    rows: int  # of each
    matrix_bytes: int
    distance: int

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return self.matrices * self.matrix_bytes

    @property
    def span(self) -> int:
        """From the first byte to the last, with what lies in between."""
        return (self.matrices - 1) * self.distance + self.matrix_bytes


def find_run(use: WeightUse) -> MatrixRun | str:
    """How a weight lies, or why it cannot be used as it lies."""
    if use.use not in ("product", "experts"):
        return "only what is multiplied by is read as a whole"
    matrices = use.matrices if use.use == "experts" else 1
    weight = use.weight
    rows = weight.shape[0] // matrices
    size = rows * weight.quant.row_bytes(weight.shape[1])
    starts: list[tuple[str, int]] = []  # of each matrix
    done = 0  # bytes of the weight that were seen
    end: tuple[str, int] | None = None  # behind what was seen
    for part in weight.parts:
        if not isinstance(part, Extent):
            return "not all of it lies in a file"
        if part.rows > 1 and part.stride != part.row_bytes:
            return "its rows do not follow each other"
        here = (part.path, part.offset)
        if done % size and here != end:
            return "a matrix lies in several places"
        nbytes = part.rows * part.row_bytes
        first = -(-done // size)  # the first matrix that begins in this part
        starts += [
            (part.path, part.offset + m * size - done) for m in range(first, -(-(done + nbytes) // size))
        ]
        done += nbytes
        end = (part.path, part.offset + nbytes)
    return _regular(use, starts, rows, size)


def _regular(use: WeightUse, starts: list[tuple[str, int]], rows: int, size: int) -> MatrixRun | str:
    """One distance from each matrix to the next, forwards in one file."""
    first = use.weight.parts[0]
    assert isinstance(first, Extent)
    (path, offset), distance = starts[0], size
    if len({p for p, _ in starts}) > 1:
        return "its matrices lie in several files"
    if len(starts) > 1:
        distance = starts[1][1] - offset
        if distance < size or any(at != offset + i * distance for i, (_, at) in enumerate(starts)):
            return "its matrices do not lie at equal distances"
    name = use.weight.quant.name
    step = NATURAL.get(name, IN_BLOCKS)
    if offset % step or distance % step:
        return f"it begins at byte {offset}, and {name} needs a multiple of {step}"
    return MatrixRun(path, first.stamp, offset, len(starts), rows, size, distance)
