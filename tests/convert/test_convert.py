"""Converting: what is written, that it is all or nothing, and how little memory it takes."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file

from hetrun.errors import BackendUnavailable, ModelFileError, OptionError
from hetrun.graph import Constant, Extent, Weight
from hetrun.graph.quant import Bytes, QuantType, by_name
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.hf_mapping import AddOne, Change, Interleave
from hetrun.loader.open_model import open_model
from hetrun.system import entry_points
from hetrun.tools import convert as module
from hetrun.tools.convert import ConversionOptions, convert_model, quantise
from hetrun.tools.convert.gguf_writer import MetaValue, OutputTensor, padded, write_model
from hetrun.tools.convert.quant_mixtures import by_option
from hetrun.tools.convert.stream import TensorJob, convert
from tests.models import tiny
from tests.models.hf import Row, folder

LLAMA = Row("convert", "llama", dtype=torch.bfloat16)
F32, F16, Q8_0 = by_name("F32"), by_name("F16"), by_name("Q8_0")


@pytest.fixture
def rows(tmp_path: Path) -> Weight:
    """600 x 64 floats in a file."""
    values = np.random.default_rng(1).standard_normal((600, 64), np.float32)
    (tmp_path / "weight").write_bytes(bytes(100) + values.tobytes())
    part = Extent(str(tmp_path / "weight"), 100, 600, 256, 256)
    return Weight("blk.0.attn_q.weight", (600, 64), F32, (part,))


def floats(weight: Weight) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    raw = next(part for part in weight.parts if isinstance(part, Extent))
    data = Path(raw.path).read_bytes()[raw.offset :]
    return np.frombuffer(data, np.float32).reshape(weight.shape)


def run(weight: Weight, quant: QuantType, change: Change | None = None, threads: int = 2) -> Bytes:
    return np.concatenate(
        [piece for _, piece in convert([TensorJob(weight, quant, change)], threads, quantise)]
    )


# --- the stream


@pytest.mark.parametrize("slice_weights", [64, 1000, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_slices_follow_each_other_in_order(
    rows: Weight, slice_weights: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetrun.tools.convert.stream.SLICE_WEIGHTS", slice_weights)
    assert bytes(run(rows, F32, threads=threads)) == floats(rows).tobytes()
    assert bytes(run(rows, Q8_0, threads=threads)) == Q8_0.quantise(floats(rows)).tobytes()


@pytest.mark.parametrize("slice_weights", [64, 64 * 50, 1 << 20])
def test_heads_are_interleaved_whole(
    rows: Weight, slice_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetrun.tools.convert.stream.SLICE_WEIGHTS", slice_weights)
    wanted = tiny.interleave(floats(rows), 30)
    assert bytes(run(rows, F32, Interleave(30))) == wanted.tobytes()
    assert bytes(run(rows, Q8_0, Interleave(30))) == Q8_0.quantise(wanted).tobytes()


def test_a_bias_is_interleaved_by_its_elements() -> None:
    values = np.arange(24, dtype=np.float32)
    bias = Weight("b", (1, 24), F32, (Constant(values.tobytes()),))
    assert bytes(run(bias, F32, Interleave(3))) == tiny.interleave(values, 3).tobytes()


def test_one_is_added_in_float32() -> None:
    values = np.array([[0.001, -0.25, 3]], np.float32)
    gain = Weight("n", (1, 3), F16, (Constant(F16.quantise(values).tobytes()),))
    wanted = values.astype(np.float16).astype(np.float32) + np.float32(1)
    assert bytes(run(gain, F32, AddOne())) == wanted.tobytes()
    kept = replace(gain, quant=F32, parts=(Constant(values.tobytes()),))
    assert bytes(run(kept, F32, AddOne())) == (values + 1).tobytes()


def test_weights_that_are_not_numbers_are_refused_by_name(tmp_path: Path) -> None:
    values = np.full((2, 32), np.nan, np.float32)
    (tmp_path / "w").write_bytes(values.tobytes())
    weight = Weight("blk.0.ffn_up.weight", (2, 32), F32, (Extent(str(tmp_path / "w"), 0, 2, 128, 128),))
    with pytest.raises(
        ModelFileError, match=r"w: the tensor blk\.0\.ffn_up\.weight cannot be converted: .*number"
    ):
        run(weight, by_name("Q4_0"))


def test_threads_end_with_the_conversion(rows: Weight) -> None:
    before = threading.active_count()
    pieces = convert([TensorJob(rows, F32), TensorJob(rows, F32)], 4, quantise)
    next(pieces)
    pieces.close()
    assert threading.active_count() == before


# --- the file


def test_a_file_as_others_read_it(tmp_path: Path) -> None:
    metadata: dict[str, MetaValue] = {
        "general.architecture": "llama",
        "a.whole": 7,
        "a.huge": 1 << 40,
        "a.negative": -3,
        "a.float": 0.5,
        "a.flag": True,
        "a.text": "grüße",
        "a.texts": ["x", "", "ü"],
        "a.bytes": [b"\xff\xfe"],
        "a.numbers": np.array([1, -2], "<i4"),
        "a.flags": np.array([True, False]),
    }
    tensors = [OutputTensor("m", (2, 3, 32), Q8_0), OutputTensor("v", (5,), F32)]
    blocks = Q8_0.quantise(np.random.default_rng(0).standard_normal((6, 32), np.float32))
    vector = np.arange(5, dtype=np.float32)
    pieces = [(0, blocks[:4].reshape(-1)), (0, blocks[4:].reshape(-1)), (1, vector.view(np.uint8))]
    path = tmp_path / "x.gguf"
    assert write_model(path, metadata, tensors, pieces) == path.stat().st_size
    ours = read_gguf(path)
    assert list(ours.metadata)[1:7] == list(metadata)[1:7]
    assert [ours.metadata[k] for k in list(metadata)[:7]] == list(metadata.values())[:7]
    assert list(ours.get_strings("a.texts") or ()) == ["x", "", "ü"]
    theirs = GGUFReader(path)
    assert [t.name for t in theirs.tensors] == ["m", "v"]
    assert theirs.tensors[0].shape.tolist() == [32, 3, 2]
    assert theirs.tensors[0].data.tobytes() == blocks.tobytes()
    assert theirs.tensors[1].data.tolist() == vector.tolist()
    assert theirs.fields["a.negative"].contents() == -3
    assert theirs.fields["a.numbers"].contents() == [1, -2]
    del theirs


def test_tensors_are_aligned() -> None:
    assert [padded(n) for n in (0, 1, 32, 33)] == [0, 32, 32, 64]


def convert_to(path: Path, force: bool = False, quant: str = "q8_0") -> None:
    convert_model(ConversionOptions(folder(LLAMA), by_option(quant), path, 2, force))


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("mine")
    with pytest.raises(OptionError, match="exists already; --force replaces it"):
        convert_to(path)
    assert path.read_text() == "mine"
    convert_to(path, force=True)
    assert read_gguf(path).metadata["general.architecture"] == "llama"
    assert os.listdir(tmp_path) == ["x.gguf"]


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"

    def pieces() -> Iterator[tuple[int, Bytes]]:
        path.write_text("someone else's")
        yield 0, np.zeros(8, np.uint8)

    with pytest.raises(OptionError, match="exists already"):
        write_model(path, {}, [OutputTensor("v", (2,), F32)], pieces())
    assert path.read_text() == "someone else's"
    assert os.listdir(tmp_path) == ["x.gguf"]


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    def pieces() -> Iterator[tuple[int, Bytes]]:
        yield 0, np.zeros(4, np.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_model(tmp_path / "x.gguf", {}, [OutputTensor("v", (2,), F32)], pieces())
    assert not os.listdir(tmp_path)


def test_ctrl_c_as_soon_as_the_file_is_there_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = os.open

    def interrupted(path: Path, flags: int, mode: int) -> int:
        os.close(create(path, flags, mode))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_model(tmp_path / "x.gguf", {}, [OutputTensor("v", (2,), F32)], [])
    assert not os.listdir(tmp_path)


def test_a_file_of_another_that_writes_the_same_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / f".x.gguf.{os.getpid()}.part"
    with other.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a process that writes it has it
        with pytest.raises(OptionError):
            write_model(tmp_path / "x.gguf", {}, [OutputTensor("v", (2,), F32)], [])
    assert os.listdir(tmp_path) == [other.name]


def test_a_file_of_a_process_that_was_killed_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".x.gguf.1.part").touch()
    (tmp_path / ".y.gguf.1.part").touch()
    values = np.zeros(2, np.float32)
    write_model(tmp_path / "x.gguf", {}, [OutputTensor("v", (2,), F32)], [(0, values.view(np.uint8))])
    assert sorted(os.listdir(tmp_path)) == [".y.gguf.1.part", "x.gguf"]


def test_a_disk_without_room_is_found_before_the_work(tmp_path: Path) -> None:
    huge = OutputTensor("v", (1 << 20, 1 << 30), F32)
    with pytest.raises(OptionError, match=r"x\.gguf: needs 4,503,\d+,\d+,\d+,\d+ bytes, but only"):
        write_model(tmp_path / "x.gguf", {}, [huge], [])
    assert not os.listdir(tmp_path)


def test_a_disk_that_fills_up_is_one_sentence(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from hetrun.cli import exit_code\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "sys.exit(exit_code(['convert', sys.argv[1], '-q', 'q8_0', '-o', sys.argv[2]]))\n"
    )
    target = tmp_path / "x.gguf"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder(LLAMA)), str(target)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.endswith("bytes cannot be written there: File too large\n")
    assert not os.listdir(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no is not a folder: create it, or write elsewhere with -o"):
        convert_to(tmp_path / "no" / "x.gguf")


# --- models


def test_metadata_in_llama_cpps_words(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    convert_to(path)
    found = read_gguf(path)
    assert found.metadata["general.file_type"] == 7
    assert found.metadata["general.quantization_version"] == 2
    assert found.metadata["general.name"] == str(LLAMA)
    assert found.metadata["llama.block_count"] == 2
    assert found.metadata["llama.vocab_size"] == tiny.VOCAB
    assert found.metadata["tokenizer.ggml.model"] == "gpt2"
    assert found.metadata["tokenizer.ggml.pre"] == "gpt-2"
    assert found.metadata["tokenizer.chat_template"] == tiny.CHAT_TEMPLATE
    assert found.tensors["token_embd.weight"].shape == (tiny.VOCAB, 128)
    assert found.tensors["output_norm.weight"].shape == (128,)
    assert not [key for key in found.metadata if "layout" in key]


def test_experts_have_a_dimension_of_their_own(tmp_path: Path) -> None:
    row = Row("convert", "mixtral", {"num_local_experts": 4})
    path = convert_model(ConversionOptions(folder(row), by_option("f16"), tmp_path / "x.gguf")).path
    tensors = read_gguf(path).tensors
    assert tensors["blk.0.ffn_up_exps.weight"].shape == (4, 192, 128)
    assert tensors["blk.0.ffn_gate_inp.weight"].quant is F32


def test_a_gguf_file_of_floats_is_converted_again(tmp_path: Path) -> None:
    first, again, direct = (tmp_path / f"{name}.gguf" for name in ("first", "again", "direct"))
    convert_to(first, quant="bf16")
    report = convert_model(ConversionOptions(first, by_option("q4_k_m"), again))
    convert_to(direct, quant="q4_k_m")
    a, b = read_gguf(again), read_gguf(direct)
    assert report.notes == ("from a GGUF file: its metadata is copied, its weights are converted again",)
    assert dict(a.metadata).keys() == dict(b.metadata).keys()
    assert list(a.get_strings("tokenizer.ggml.tokens") or ()) == list(
        b.get_strings("tokenizer.ggml.tokens") or ()
    )
    assert again.read_bytes()[a.data_offset :] == direct.read_bytes()[b.data_offset :]


def test_what_is_no_model_is_not_converted(tmp_path: Path) -> None:
    path = folder(Row("convert-heads", "llama", {}))
    config = json.loads((path / "config.json").read_text())
    for file in path.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 7}))
    with pytest.raises(ModelFileError, match="7 heads"):
        convert_model(ConversionOptions(tmp_path, by_option("q8_0"), tmp_path / "out.gguf"))
    assert not (tmp_path / "out.gguf").exists()


def test_what_is_quantised_already_is_refused(tmp_path: Path) -> None:
    first = tmp_path / "first.gguf"
    convert_to(first)
    with pytest.raises(OptionError, match=r"is quantised already \(.* is Q8_0\).*convert the original model"):
        convert_model(ConversionOptions(first, by_option("q4_k_m"), tmp_path / "x.gguf"))
    assert os.listdir(tmp_path) == ["first.gguf"]


def test_what_is_quantised_already_loses_nothing_as_floats_and_more_if_asked_for(tmp_path: Path) -> None:
    first, whole, less = (tmp_path / f"{name}.gguf" for name in ("first", "whole", "less"))
    convert_to(first)
    convert_model(ConversionOptions(first, by_option("f32"), whole))
    before, after = ({t.name: t for t in GGUFReader(path).tensors} for path in (first, whole))
    assert any(tensor.tensor_type.name == "Q8_0" for tensor in before.values())
    for name, tensor in before.items():
        found = dequantize(after[name].data, after[name].tensor_type)
        assert np.array_equal(found, dequantize(tensor.data, tensor.tensor_type)), name
    report = convert_model(ConversionOptions(first, by_option("q4_0"), less, requantize=True))
    assert report.types["Q4_0"] > 0
    assert less.stat().st_size < first.stat().st_size


def test_opt_has_no_place_in_gguf(tmp_path: Path) -> None:
    row = Row("convert", "opt", {"ffn_dim": 192, "word_embed_proj_dim": 128})
    with pytest.raises(ModelFileError, match="cannot be converted: GGUF has no architecture"):
        convert_model(ConversionOptions(folder(row), by_option("f16"), tmp_path / "x.gguf"))
    assert not os.listdir(tmp_path)


def test_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = open_model(folder(LLAMA))
    recipe = by_option("q4_k")
    default = f"{LLAMA}-Q4_K_M.gguf"
    assert module.target(ConversionOptions(folder(LLAMA), recipe), source) == Path(default)
    assert module.target(ConversionOptions(folder(LLAMA), recipe, tmp_path), source) == tmp_path / default
    assert module.target(ConversionOptions(folder(LLAMA), recipe, Path("a/b.gguf")), source) == Path(
        "a/b.gguf"
    )


def test_without_ggml_the_types_of_numpy_still_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise BackendUnavailable("llama-cpp-python is not installed: pip install it")

    with_it, without = tmp_path / "with.gguf", tmp_path / "without.gguf"
    convert_to(with_it)
    real = entry_points.named
    monkeypatch.setattr(entry_points, "named", lambda g, n: real(g, n) if g == "models" else missing)
    convert_to(without)
    assert with_it.read_bytes() == without.read_bytes()
    with pytest.raises(BackendUnavailable, match="llama-cpp-python is not installed"):
        convert_to(tmp_path / "x.gguf", quant="iq4_nl")


# --- memory


MEASURE = """
import sys
from pathlib import Path
from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option

def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

small, large, target = map(Path, sys.argv[1:])
convert_model(ConversionOptions(small, by_option("q4_k_m"), target, 4, True))
before = peak()
convert_model(ConversionOptions(large, by_option("q4_k_m"), target, 4, True))
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_largest_tensor(tmp_path: Path) -> None:
    """A tensor of 128 MiB as floats may cost three times that; it costs less than half of it."""
    small = folder(Row("small", "llama", {"hidden_size": 256}))
    large = tmp_path / "large"
    large.mkdir()
    n_vocab, width = 1 << 17, 256
    config = (
        (small / "config.json").read_text().replace(f'"vocab_size": {tiny.VOCAB}', f'"vocab_size": {n_vocab}')
    )
    (large / "config.json").write_text(config)
    weights = {
        name: np.ones((n_vocab, width), np.float16)
        if "embed_tokens" in name or "lm_head" in name
        else np.ones([int(n) for n in shape], np.float16)
        for name, shape in shapes(small / "model.safetensors")
    }
    save_file(weights, large / "model.safetensors")
    arguments = [str(small), str(large), str(tmp_path / "x.gguf")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 4 * n_vocab * width / 2


def shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    yield from ((name, t["shape"]) for name, t in header.items() if name != "__metadata__")
