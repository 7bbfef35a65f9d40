"""Holes of zeros in tensors, told apart from zeros that are meant."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hetrun.graph import Extent
from hetrun.graph.quant import by_name
from hetrun.loader.open_model import open_model
from hetrun.loader.weight_check import Hole, HoleError, look_at_weights
from hetrun.loader.zero_runs import SHORTEST, ZeroFinder, Zeros
from hetrun.tools.convert.gguf_writer import OutputTensor, write_model

F16 = by_name("F16")
ROWS, ROW = 64, 1000  # rows and bytes of one


def random(nbytes: int = ROWS * ROW) -> np.ndarray:
    return np.random.default_rng(3).integers(1, 256, nbytes, np.uint8)


def find(raw: np.ndarray, row: int = ROW, *cuts: int) -> Zeros:
    """What is found if the bytes come in pieces that end there."""
    finder = ZeroFinder(len(raw) // row, row)
    for a, b in pairwise((0, *cuts, len(raw))):
        finder.take(raw[a:b].copy())  # as a buffer has them: aligned
    return finder.found()


CUTS: tuple[tuple[int, ...], ...] = (
    (),
    (32_000,),
    (10_007, 20_001, 20_002, 31_111),
    tuple(range(8, 64_000, 504)),
)


@pytest.mark.parametrize("cuts", CUTS, ids=len)
@pytest.mark.parametrize(
    ("begin", "end", "found"),
    [
        (20_300, 20_300 + SHORTEST + 16, Zeros(False, SHORTEST + 16, 20)),
        (20_300, 20_300 + SHORTEST - 16, Zeros()),  # too short
        (0, 9_500, Zeros(False, 9_500, 0)),
        (50_504, 64_000, Zeros(False, 13_496, 50)),  # a download that ended early
        (20_000, 26_000, Zeros(False, 0, 0, 6, 20)),  # whole rows
        (19_992, 26_008, Zeros(False, 0, 0, 6, 20)),  # and some zeros in the rows beside
        (48_000, 64_000, Zeros(False, 0, 0, 16, 48)),  # rows of padding
        (0, 64_000, Zeros(is_all=True)),
    ],
)
def test_runs_are_found_however_they_are_read(
    begin: int, end: int, found: Zeros, cuts: tuple[int, ...]
) -> None:
    raw = random()
    raw[begin:end] = 0
    got = find(raw, ROW, *cuts)
    assert got.hole_bytes == pytest.approx(found.hole_bytes, abs=16)  # counted in words
    assert replace(got, hole_bytes=found.hole_bytes) == found


def test_several_are_added_up() -> None:
    raw = random()
    for begin, end in ((3_100, 8_108), (20_000, 25_000), (40_500, 46_500), (50_000, 55_000)):
        raw[begin:end] = 0
    found = find(raw)
    assert (found.rows, found.first_row, found.hole_row) == (10, 20, 3)
    assert found.hole_bytes == pytest.approx(11_000, abs=32)


def test_columns_of_zeros_are_no_hole() -> None:
    """Long ones, which end with their row."""
    raw = random(16 * 20_000).reshape(16, 20_000)
    raw[:, 12_000:] = 0
    assert find(raw.reshape(-1), 20_000) == Zeros()


def test_scattered_zeros_are_none() -> None:
    raw = random()
    raw[np.random.default_rng(1).random(len(raw)) < 0.9] = 0
    assert find(raw) == Zeros()


def test_a_long_row_may_have_a_hole() -> None:
    raw = random(4 * 400_000)
    raw[500_000:570_000] = 0
    found = find(raw, 400_000)
    assert (found.hole_row, found.rows) == (1, 0)
    assert found.hole_bytes == pytest.approx(70_000, abs=16)


def test_memory_does_not_grow() -> None:
    raw = random(1 << 20)
    finder = ZeroFinder(1 << 12, 1 << 12)
    tracemalloc.start()
    try:
        for _ in range(16):
            finder.take(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    infos = [OutputTensor(name, (rows.shape[0], rows.shape[1] // 2), F16) for name, rows in tensors.items()]
    pieces = [rows.reshape(-1) for rows in tensors.values()]
    write_model(path, {"general.architecture": "llama"}, infos, enumerate(pieces))
    return path


def rows(zero: slice | None = None) -> np.ndarray:
    """A matrix, finite in float16."""
    raw = random().reshape(ROWS, ROW)
    raw &= 0x3F
    raw |= 1
    if zero is not None:
        raw.reshape(-1)[zero] = 0
    return raw


def test_zeros_that_are_meant_are_remarks(tmp_path: Path) -> None:
    bias = np.zeros((1, 128_000), np.uint8)
    tensors = {
        "token_embd.weight": rows(slice(50_000, None)),
        "blk.0.ffn_up.bias": bias,
        "blk.0.ffn_up.weight": rows(),
        "blk.0.lora.weight": np.zeros((ROWS, ROW), np.uint8),
    }
    told: list[float] = []
    seen = look_at_weights(open_model(write(tmp_path / "m.gguf", tensors)), told.append)
    assert seen.error is None
    assert seen.remarks == (
        "all weights of 'blk.0.lora.weight' are zero",
        "14 rows of 'token_embd.weight' (64 rows) hold only zeros, from row 50 on, usually padding of the "
        "vocabulary",
    )
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_holes_in_several_tensors_are_one_error(tmp_path: Path) -> None:
    tensors = {"blk.0.a": rows(slice(54_904, None)), "blk.1.a": rows(slice(0, 29_104)), "blk.2.a": rows()}
    path = write(tmp_path / "m.gguf", tensors)
    source = open_model(path)
    error = look_at_weights(source).error
    assert isinstance(error, HoleError)
    assert error.path == str(path)
    parts = [part for name in tensors if (weight := source.find(name)) for part in weight.parts]
    first, second, _ = (part.offset for part in parts if isinstance(part, Extent))
    assert error.holes == (
        Hole("blk.1.a", 0, 29_104, str(path), second),
        Hole("blk.0.a", 54, 64_000 - 54_904, str(path), first + 54_904),
    )
    assert error.reason.startswith(
        "the tensor 'blk.1.a' has 28 KiB of zero bytes among its weights, from row 0 (byte "
        f"{second} of the file) on; with 1 other tensor it is 37 KiB in all: an interrupted download"
    )
    again = pickle.loads(pickle.dumps(error))
    assert (again.holes, str(again)) == (error.holes, str(error))
