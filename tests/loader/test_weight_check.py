"""NaN and infinity among weights and scales: found in every type, and told by place."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from hetrun.errors import ModelFileError
from hetrun.graph import Extent, Weight
from hetrun.graph.quant import QUANTS, QuantType, by_name
from hetrun.loader import weight_check
from hetrun.loader.open_model import open_model
from hetrun.loader.weight_check import FLOATS, first_bad_value
from hetrun.tools.convert.gguf_writer import OutputTensor, write_model
from tests.hostile.checklist import write_folder

F32 = by_name("F32")
ROWS, COLS = 5, 512
NAN, HALF_NAN, HALF_INF = struct.pack("<f", float("nan")), b"\x01\x7e", b"\x00\xfc"

# By type: a float of a block counted from the file's first, the bytes that make it bad, and where it lies.
PLACES: dict[str, tuple[int, bytes, int]] = {
    "F32": (700, NAN, 4 * 700),
    "F16": (1030, HALF_INF, 2 * 1030),
    "BF16": (1030, b"\xc0\x7f", 2 * 1030),
    "Q4_0": (33, HALF_NAN, 18 * 33),
    "Q4_1": (33, HALF_INF, 20 * 33 + 2),
    "Q8_0": (78, HALF_NAN, 34 * 78),
    "Q2_K": (5, HALF_NAN, 84 * 5 + 82),
    "Q3_K": (5, HALF_NAN, 110 * 5 + 108),
    "Q4_K": (6, HALF_INF, 144 * 6 + 2),
    "Q6_K": (0, HALF_NAN, 208),
    "IQ1_M": (7, b"\x00\xf0\x00\xf0", 56 * 7 + 52),
    "TQ2_0": (3, HALF_INF, 66 * 3 + 64),
    "MXFP4": (40, b"\xff", 17 * 40),
    "NVFP4": (11, b"\x7f", 36 * 11 + 3),
}


def write(path: Path, quant: QuantType, raw: bytes) -> Path:
    """A file with a tensor of these bytes between two good ones."""
    tensors = [
        OutputTensor("a", (8,), F32),
        OutputTensor("w", (ROWS, COLS), quant),
        OutputTensor("z", (8,), F32),
    ]
    pieces = [
        np.ones(8, "<f4").view(np.uint8),
        np.frombuffer(raw, np.uint8),
        np.ones(8, "<f4").view(np.uint8),
    ]
    write_model(path, {"general.architecture": "llama"}, tensors, enumerate(pieces))
    return path


@pytest.mark.parametrize("slice_bytes", [1 << 20, 300])
@pytest.mark.parametrize("name", PLACES)
def test_the_first_one_is_told_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, slice_bytes: int
) -> None:
    monkeypatch.setattr(weight_check, "SLICE", slice_bytes)
    quant = by_name(name)
    raw = bytearray(ROWS * quant.row_bytes(COLS))
    good = open_model(write(tmp_path / "good.gguf", quant, bytes(raw)))
    assert first_bad_value(good) is None

    block, bad, at = PLACES[name]
    raw[at : at + len(bad)] = bad
    last = (
        at + (ROWS * COLS // quant.block - 1 - block) * quant.block_bytes
    )  # the same float of the last block
    raw[last : last + len(bad)] = bad
    path = write(tmp_path / "bad.gguf", quant, bytes(raw))
    error = first_bad_value(open_model(path))
    assert isinstance(error, ModelFileError)
    begin = open_model(path).stamps[str(path)].size - 32 - -(-len(raw) // 32) * 32  # of the tensor
    row = block * quant.block // COLS
    what = "weights" if quant.block == 1 else "scales"
    count = ROWS * COLS // quant.block * FLOATS[name].count
    assert error.path == str(path)
    assert error.reason.startswith(f"the tensor 'w' has NaN or infinity among its {name} {what}: ")
    assert f": 2 of {count}, the first at byte {begin + at}, in row {row};" in error.reason
    assert path.read_bytes()[begin + at :].startswith(bad)


@pytest.mark.parametrize("quant", QUANTS.values(), ids=lambda q: q.name)
def test_floats_tell_what_weights_would(quant: QuantType) -> None:
    """Random bits: a block has a weight that is not finite where one of its floats is not."""
    blocks = np.random.default_rng(1).integers(0, 256, (20_000, quant.block_bytes), np.uint8)
    ours = FLOATS[quant.name].wrong(blocks).any(1)
    if quant.name == "NVFP4":  # ggml takes its NaN for 0
        assert (ours == ((blocks[:, :4] & 0x7F) == 0x7F).any(1)).all()
        return
    theirs = ~np.isfinite(quant.dequantise(blocks, quant.block)).all(1)
    if quant.name == "MXFP4":  # whether weights of the largest scales overflow depends on the weights
        assert (ours == (blocks[:, 0] >= 0xFC)).all()
        theirs |= blocks[:, 0] >= 0xFC
    assert theirs.any()
    assert (ours == theirs).all()


def test_every_type_has_its_floats() -> None:
    assert FLOATS.keys() == QUANTS.keys()


def test_shards_are_told_apart(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    assert first_bad_value(open_model(folder)) is None
    shard = folder / "model-00002-of-00002.safetensors"
    tensors = load(shard.read_bytes())
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 7] = np.inf
    shard.write_bytes(save(tensors))
    error = first_bad_value(open_model(folder))
    assert error is not None
    assert error.path == str(shard)
    assert (
        "the tensor 'blk.1.ffn_down.weight' has NaN or infinity among its F32 weights: 1 of" in error.reason
    )
    assert "in row 3;" in error.reason


def test_some_columns_of_a_matrix(tmp_path: Path) -> None:
    """Rows that do not follow each other in the file; what lies between them is not looked at."""
    values = np.ones((4, 8), "<f4")
    values[1, 1] = values[3, 6] = np.nan
    path = tmp_path / "w"
    values.tofile(path)
    whole = Weight("w", (4, 8), F32, (Extent(str(path), 0, 4, 32, 32),))

    def look(*weights: Weight) -> ModelFileError | None:
        source: Any = SimpleNamespace(weights=lambda: iter(weights))
        return first_bad_value(source)

    assert look(whole.cols(2, 6)) is None
    error = look(whole.cols(2, 6), whole.cols(4, 8))
    assert error is not None
    assert f"1 of 16, the first at byte {4 * (3 * 8 + 6)}, in row 3;" in error.reason


def test_progress_and_memory(tmp_path: Path) -> None:
    """A large tensor takes no more memory than a small one, also one of a single row."""
    part = Extent(str(tmp_path / "w"), 0, 1, 1 << 26, 1 << 26)
    (tmp_path / "w").touch()
    os.truncate(tmp_path / "w", 1 << 26)
    source: Any = SimpleNamespace(weights=lambda: iter([Weight("w", (1, 1 << 24), F32, (part,))]))
    told: list[float] = []
    tracemalloc.start()
    try:
        assert first_bad_value(source, told.append) is None
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert told == [1.0]


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    source = open_model(write(tmp_path / "w.gguf", F32, bytes(ROWS * COLS * 4)))
    os.truncate(source.path, 1000)
    with pytest.raises(ModelFileError, match="it was changed while in use; open it again"):
        first_bad_value(source)
