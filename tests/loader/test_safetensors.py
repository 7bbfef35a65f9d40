"""The safetensors reader: good files as the library writes them, and bad ones refused quickly."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hetrun.errors import ModelFileError
from hetrun.loader.formats.safetensors import read_safetensors
from hetrun.loader.weight_reader import FileReader
from tests.support.effort import effort
from tests.support.tiers import first

VALUES = np.arange(24, dtype=np.float32)


def floats(path: Path, name: str) -> np.ndarray:
    """A tensor of a file through hetrun's own weights."""
    weight, reader = read_safetensors(path).weight(name), FileReader()
    raw = np.empty(weight.nbytes, np.uint8)
    reader.read(weight, raw)
    reader.close()
    return weight.quant.dequantise(raw, weight.shape[1])


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [((4, 6), (4, 6)), ((24,), (1, 24)), ((2, 3, 4), (6, 4)), ((1, 1), (1, 1)), ((), (1, 1))],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_tensor_is_a_matrix(
    tmp_path: Path, shape: tuple[int, ...], matrix: tuple[int, int], dtype: type
) -> None:
    path = tmp_path / "m.safetensors"
    values: Any = np.asarray(VALUES[: int(np.prod(shape))].astype(dtype).reshape(shape))
    save_file({"a": np.zeros(3, np.int8), "w": values}, path, {"format": "pt"})
    found = floats(path, "w")
    assert found.shape == matrix
    assert (found.reshape(-1) == values.reshape(-1)).all()


def test_bf16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    path = tmp_path / "m.safetensors"
    values: Any = torch.from_numpy(VALUES.reshape(4, 6) * 1.001).bfloat16()
    save_torch({"w": values}, path)
    assert (floats(path, "w") == values.float().numpy()).all()


def test_what_cannot_be_computed_with_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"ids": np.arange(6), "w": VALUES, "none": np.zeros((0, 4), np.float32)}, path)
    file = read_safetensors(path)
    assert file.weight("w").shape == (1, 24)
    with pytest.raises(ModelFileError, match="the tensor 'ids' is I64; hetrun computes with F32, F16, BF16"):
        file.weight("ids")
    with pytest.raises(ModelFileError, match=r"the tensor 'none' is empty: its shape is \[0, 4\]"):
        file.weight("none")


# --- bad files


def whole(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(begin: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:  # noqa: ANN401
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


EIGHT = bytes(8)
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty: download it again"),
    "three bytes": (b"abc", "the header, at byte 0: its length needs 8 bytes, but the file ends after 3"),
    "web page": (b"<!DOCTYPE html><html>", "it looks like a web page"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\n", "run `git lfs pull`"),
    "zip": (b"PK\3\4" + bytes(40), "it is a zip or PyTorch archive"),
    "gguf": (b"GGUF" + bytes(40), "is not a safetensors file: it is a GGUF file"),
    "length 0": (whole(b"", EIGHT), "at byte 0: it is 0 bytes long, it must be 2 to 100000000"),
    "length 2^63": (whole({}, length=1 << 63), "it is 9223372036854775808 bytes long"),
    "length over the limit": (whole({}, length=100_000_001), "it is 100000001 bytes long"),
    "length over the file": (whole({}, length=1000), "its JSON needs 1000 bytes, but the file ends after 2"),
    "not JSON": (whole(b"{]"), "at byte 8: it is not a JSON object: expecting property name"),
    "not an object": (whole(b"[1]"), "at byte 8: it begins with b'[1]', not with a brace"),
    "not UTF-8": (whole(b'{"\xff": 1}'), "it is not a JSON object: byte 2 is not UTF-8"),
    "two documents": (whole(b"{}{}"), "it is not a JSON object: extra data"),
    "nested": (whole(b'{"a":' * 50_000 + b"1" + b"}" * 50_000), "it is nested too deeply"),
    "too many values": (
        whole(b'{"a":[' + b"1," * (1 << 21) + b"1]}"),
        "it has 2097152 commas, hetrun reads up to 1048576",
    ),
    "endless number": (whole(b'{"a":' + b"9" * 5000 + b"}"), "it is not a JSON object: Exceeds the limit"),
    "the same name twice": (
        whole(f'{{"w": {json.dumps(entry())}, "w": {json.dumps(entry())}}}'.encode(), EIGHT),
        "'w' appears twice",
    ),
    "the same field twice": (
        whole(b'{"w":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', EIGHT),
        "'dtype' appears twice",
    ),
    "metadata of numbers": (whole({"__metadata__": {"a": 1}}), "__metadata__ must be a table of texts"),
    "metadata as a list": (whole({"__metadata__": []}), "__metadata__ must be a table of texts"),
    "entry is no table": (whole({"w": 3}), "tensor 'w', at byte 8: it must be a table with dtype"),
    "no dtype": (whole({"w": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT), "its dtype 'None' is not one"),
    "unknown dtype": (whole({"w": entry(dtype="F128")}, EIGHT), "its dtype 'F128' is not one that hetrun"),
    "dtype is a list": (whole({"w": entry(dtype=["F32"])}, EIGHT), "is not one that hetrun knows"),
    "negative shape": (whole({"w": entry(shape=[-2])}, EIGHT), "its shape '[-2]' must be up to 16 whole"),
    "shape of floats": (whole({"w": entry(shape=[2.0])}, EIGHT), "its shape '[2.0]' must be"),
    "shape of booleans": (whole({"w": entry(0, 4, [True])}, EIGHT), "its shape '[True]' must be"),
    "shape 1e999": (whole(b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', EIGHT), "'[inf]'"),
    "many dimensions": (whole({"w": entry(shape=[1] * 17)}, EIGHT), "must be up to 16 whole numbers"),
    "shape overflows": (whole({"w": entry(shape=[1 << 62, 4])}, EIGHT), "takes 73786976294838206464 bytes"),
    "range too small": (whole({"w": entry(0, 4)}, EIGHT), "F32 of the shape '[2]' takes 8 bytes, but its"),
    "half a byte": (whole({"w": entry(0, 1, [1], "F4")}, EIGHT), "takes 1 bytes, but its data_offsets"),
    "negative offset": (whole({"w": entry(-8, 0)}, EIGHT), "its data_offsets '[-8, 0]' must be where"),
    "backward offsets": (whole({"w": entry(8, 0)}, EIGHT), "its data_offsets '[8, 0]' must be where"),
    "one offset": (whole({"w": {**entry(), "data_offsets": [0]}}, EIGHT), "its data_offsets '[0]' must be"),
    "truncated": (whole({"w": entry()}, bytes(7)), "but tensor 'w' needs bytes 69..77: it is truncated"),
    "far behind the end": (whole({"w": entry(1 << 62, (1 << 62) + 8)}, EIGHT), "it is truncated, download"),
    "overlap": (whole({"a": entry(), "b": entry(4, 12)}, bytes(12)), "tensor 'a' and tensor 'b' share bytes"),
    "hole": (whole({"a": entry(), "b": entry(12, 20)}, bytes(20)), "no tensor has the bytes"),
    "hole at the beginning": (whole({"a": entry(4, 12)}, bytes(12)), "no tensor has the bytes 70..74"),
    "trailing bytes": (whole({"a": entry()}, bytes(9)), "no tensor has the bytes 77..78"),
    "only trailing bytes": (whole({}, b"x"), "no tensor has the bytes 10..11"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_bad_file_is_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    raw, message = MALFORMED[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(ModelFileError) as caught, effort() as took:
        read_safetensors(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert peak < 4 * len(raw) + (4 << 20)
    assert took.calls < 2000


def test_what_the_library_accepts_is_accepted(tmp_path: Path) -> None:
    """Padding, any order in the header, names in any script, a length whose first byte is a '<'."""
    header = {"b": entry(8, 16), "日本": entry(0, 8), "none": entry(16, 16, [0, 3])}
    raw = json.dumps(header, ensure_ascii=False).encode()
    path = tmp_path / "good.safetensors"
    path.write_bytes(whole(raw + b" " * (0x13C - len(raw)), bytes(16)))
    with safe_open(path, "numpy") as library:
        assert set(library.keys()) == set(header) == set(read_safetensors(path).tensors)


@pytest.mark.parametrize("n", first([10_000, 100_000]))
def test_very_many_tensors(tmp_path: Path, n: int) -> None:
    path = tmp_path / "many.safetensors"
    path.write_bytes(whole({f"blk.{i}": entry(4 * i, 4 * i + 4, [1]) for i in range(n)}, bytes(4 * n)))
    with effort() as took:
        assert len(read_safetensors(path).tensors) == n
    assert took.calls < 100 * n


def test_truncated_anywhere(tmp_path: Path) -> None:
    raw, path = whole({"a": entry(), "b": entry(8, 12, [2], "F16")}, bytes(12)), tmp_path / "t.safetensors"
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        with pytest.raises(ModelFileError):
            read_safetensors(path)


def test_mutations_are_judged_as_the_library_judges(tmp_path: Path) -> None:
    """Where a changed byte leaves a file that the library opens, so do we, and the other way round."""
    rng, path = random.Random(0), tmp_path / "m.safetensors"
    good = whole({"__metadata__": {"a": "b"}, "a": entry(), "b": entry(8, 12, [2], "F16")}, bytes(12))
    accepted = 0
    for _ in range(400):
        raw = bytearray(good)
        raw[rng.randrange(len(raw) - 12)] = rng.choice(b'0123456789{}[],:" aF\xff')
        path.write_bytes(raw)
        try:
            with safe_open(path, "numpy") as library:
                names = set(library.keys())
        except SafetensorError:
            with pytest.raises(ModelFileError):
                read_safetensors(path)
            continue
        accepted += 1
        assert set(read_safetensors(path).tensors) == names
    assert accepted > 10


def test_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("pipe", "is not a regular file"),
        ("none", "there is no such file"),
        (".", "director"),
    ):
        with pytest.raises(ModelFileError, match=message):
            read_safetensors(tmp_path / name)
