"""Repacking: where tensors stand, that nothing else changes, and that it is all or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from hetrun import LLM, SamplingParams
from hetrun.backends.llamacpp import fusion
from hetrun.errors import ModelFileError, OptionError
from hetrun.graph import Extent
from hetrun.loader.architectures import build_graph
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.formats.gguf_file import TensorInfo
from hetrun.loader.open_model import open_model
from hetrun.loader.weight_reader import FileReader
from hetrun.tools.convert import ConversionOptions as Convert, convert_model, reorder as module
from hetrun.tools.convert.gguf_writer import GgufOutput
from hetrun.tools.convert.quant_mixtures import by_option
from hetrun.tools.convert.reorder import RepackOptions, RepackReport, repack_model
from tests.loader.test_gguf import write_model as of_every_type
from tests.loader.test_gguf_split import split_llama, write_split
from tests.models import tiny
from tests.models.cases import GQA, WIDE
from tests.models.hf import Row, folder
from tests.models.test_converted import llama_cpp_logits
from tests.support.rig import model_file

F32 = np.float32


def repack(source: Path, target: Path, force: bool = False) -> RepackReport:
    return repack_model(RepackOptions(source, target, force))


def converted(row: Row, path: Path, recipe: str) -> Path:
    return convert_model(Convert(folder(row), by_option(recipe), path)).path


def foreign(path: Path, names: Sequence[str], architecture: str = "unheard", **keys: int) -> Path:
    """A file with a small vector for each name."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        writer.add_uint32(key, value)
    for i, name in enumerate(names):
        writer.add_tensor(name, np.full(3, i, F32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stands(path: Path) -> list[str]:
    """The tensors' names as their bytes follow each other."""
    return [t.name for t in sorted(read_gguf(path).tensors.values(), key=lambda t: t.offset)]


def content(tensor: TensorInfo) -> bytes:
    with open(tensor.path, "rb") as file:
        return os.pread(file.fileno(), tensor.nbytes, tensor.offset)


def assert_same_but_for_places(before: Path, after: Path) -> None:
    """By our own reader, and by the gguf package."""
    old, new = read_gguf(before), read_gguf(after)
    assert {t.offset % 4096 for t in new.tensors.values()} <= {0}
    assert new.alignment == new.metadata["general.alignment"] == 4096
    assert old.tensors.keys() == new.tensors.keys()
    for name, t in new.tensors.items():
        was = old.tensors[name]
        assert (t.shape, t.quant, t.nbytes) == (was.shape, was.quant, was.nbytes)
        assert content(t) == content(was)
    mine, theirs = gguf.GGUFReader(old.path), gguf.GGUFReader(after)
    layout = ("GGUF.", "split.", "general.alignment")
    keys = [key for key in mine.fields if not key.startswith(layout)]
    assert keys == [key for key in theirs.fields if not key.startswith(layout)]
    for key in keys:
        a, b = mine.fields[key], theirs.fields[key]
        assert a.types == b.types, key
        assert [p.tobytes() for p in a.parts] == [p.tobytes() for p in b.parts], key
    assert [t.name for t in theirs.tensors] == stands(after)


# --- what changes, and what does not


@pytest.mark.parametrize("alignment", [None, 8, 4096, 65536])
def test_every_value_and_tensor_is_copied_as_it_is(tmp_path: Path, alignment: int | None) -> None:
    before = of_every_type(tmp_path / "before.gguf", alignment)
    before.write_bytes(before.read_bytes().replace(b"llama", b"other", 1))  # a llama has other tensors
    report = repack(before, tmp_path / "after.gguf", force=True)
    assert_same_but_for_places(before, report.path)
    assert (report.bytes_before, report.bytes_after) == (before.stat().st_size, report.path.stat().st_size)


def test_tensors_that_hold_no_weights_are_copied_too(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "before.gguf", "unheard")
    for kind in (np.int8, np.int16, np.int32, np.int64, np.float64):
        writer.add_tensor(kind.__name__, np.arange(5, dtype=kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    repack(tmp_path / "before.gguf", tmp_path / "after.gguf")
    assert_same_but_for_places(tmp_path / "before.gguf", tmp_path / "after.gguf")


def test_texts_that_are_not_utf_8_stay_as_they_are(tmp_path: Path) -> None:
    raw = foreign(tmp_path / "x.gguf", ["w"], architecture="unheard").read_bytes()
    (tmp_path / "before.gguf").write_bytes(raw.replace(b"unheard", b"unh\xffard"))
    repack(tmp_path / "before.gguf", tmp_path / "after.gguf")
    assert b"unh\xffard" in (tmp_path / "after.gguf").read_bytes()[:200]


def test_version_2_becomes_version_3(tmp_path: Path) -> None:
    raw = bytearray(model_file(GQA).read_bytes())
    raw[4] = 2
    (tmp_path / "old.gguf").write_bytes(raw)
    repack(tmp_path / "old.gguf", tmp_path / "new.gguf")
    assert read_gguf(tmp_path / "new.gguf").version == 3
    repack(model_file(GQA), tmp_path / "same.gguf")
    assert (tmp_path / "same.gguf").read_bytes() == (tmp_path / "new.gguf").read_bytes()


@pytest.mark.parametrize("part", [0, 1, 2])
def test_the_parts_of_a_model_become_one_file(tmp_path: Path, part: int) -> None:
    paths = split_llama(tmp_path)
    report = repack(paths[part], tmp_path / "one.gguf")
    assert_same_but_for_places(paths[0], report.path)
    assert not [key for key in read_gguf(report.path).metadata if key.startswith("split.")]
    assert report.bytes_before == sum(path.stat().st_size for path in paths)


TEXT = "The thing is"


def test_same_answers_here_and_in_llama_cpp(tmp_path: Path) -> None:
    before, after = model_file(replace(WIDE, name="repacked", quant="Q4_K")), tmp_path / "after.gguf"
    repack(before, after)
    assert_same_but_for_places(before, after)
    tokens = tiny.random_tokens(24)
    theirs = [llama_cpp_logits(path, tokens, 256) for path in (before, after)]
    assert (theirs[0] == theirs[1]).all()
    found = []
    for path in (before, after):
        with LLM(path, backends=["llamacpp"]) as llm:
            answer = llm.generate(TEXT, SamplingParams(max_tokens=12, temperature=0))[0]
            found.append((llm.logits(tokens).tobytes(), answer.tokens, answer.text))
    assert found[0] == found[1]


# --- the order


def test_a_llama_stands_in_the_order_in_which_a_pass_reads_it(tmp_path: Path) -> None:
    layer = (
        *("attn_norm", "attn_k", "attn_v", "attn_q", "attn_output"),
        *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
    )
    repack(model_file(GQA), tmp_path / "x.gguf")
    names = ["token_embd", *(f"blk.{i}.{part}" for i in (0, 1) for part in layer), "output_norm", "output"]
    assert stands(tmp_path / "x.gguf") == [f"{name}.weight" for name in names]


@pytest.mark.parametrize("recipe", ["q4_0", "q4_k_m"])
def test_products_that_run_as_one_stand_together(tmp_path: Path, recipe: str) -> None:
    """The llamacpp backend stacks weights of one input and type: its products, read one behind the other."""
    row, path = Row("repack-wide", "llama", {"hidden_size": 256}), tmp_path / "x.gguf"
    repack(converted(row, tmp_path / "before.gguf", recipe), path)
    graph = build_graph(open_model(path))
    layers = [item for item in fusion.fuse(graph.ops) if isinstance(item, fusion.StackedProduct)][:-1]
    parts = [part for item in layers for part in item.weight.parts]
    offsets = [part.offset for part in parts if isinstance(part, Extent)]
    assert len(offsets) == len(parts) == 14
    assert offsets == sorted(offsets)


def test_tensors_that_several_weights_lie_in_stand_once(tmp_path: Path) -> None:
    """Phi 3 has one matrix for q, k and v, and one for gate and up."""
    before = converted(Row("repack", "phi3"), tmp_path / "a.gguf", "f16")
    repack(before, tmp_path / "b.gguf")
    assert_same_but_for_places(before, tmp_path / "b.gguf")
    names = [name for name in stands(tmp_path / "b.gguf") if name.startswith("blk.1.")]
    assert [name.split(".")[2] for name in names] == [
        *("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
    ]


def test_what_no_pass_reads_comes_last(tmp_path: Path) -> None:
    before = tmp_path / "before.gguf"
    reader, writer = gguf.GGUFReader(model_file(GQA)), gguf.GGUFWriter(before, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, *sub = field.types
            writer.add_key_value(field.name, field.contents(), kind, *sub[-1:])
    writer.add_tensor("blk.0.extra", np.ones(3, F32))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    repack(before, tmp_path / "x.gguf")
    assert stands(tmp_path / "x.gguf")[-1] == "blk.0.extra"


def test_an_unknown_architecture_is_ordered_by_its_layers(tmp_path: Path) -> None:
    names = ["output.weight", "blk.10.a", "blk.2.b", "token_embd.weight", "blk.2.a", "output_norm.weight"]
    report = repack(foreign(tmp_path / "before.gguf", names), tmp_path / "x.gguf")
    assert stands(report.path) == [
        *("token_embd.weight", "blk.2.b", "blk.2.a", "blk.10.a", "output.weight", "output_norm.weight")
    ]
    assert_same_but_for_places(tmp_path / "before.gguf", report.path)
    assert report.notes == (
        "hetrun does not run the architecture 'unheard' itself: its tensors stand in the order of layers, "
        "and within a layer as before",
    )


# The names are unique, and no more than 64 bytes.
NAMES = st.lists(
    st.builds(
        "{}{}".format,
        st.sampled_from(["", "token_embd", "output", "blk.0.", "blk.1.", "blk.12.", "enc.blk.3.", "blk."]),
        st.text("ab.01", min_size=1, max_size=6),
    ),
    unique=True,
    max_size=12,
)


@given(names=NAMES, alignment=st.sampled_from([None, 8, 32, 4096, 8192]))
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
def test_any_tensors_survive_and_stay_where_they_are_put(
    tmp_path: Path, names: list[str], alignment: int | None
) -> None:
    before, once, again = (tmp_path / f"{name}.gguf" for name in ("before", "once", "again"))
    writer = gguf.GGUFWriter(before, "unheard")
    if alignment:
        writer.add_custom_alignment(alignment)
    for i, name in enumerate(names):
        writer.add_tensor(name, np.full(1 + 700 * i, i, F32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    repack(before, once, force=True)
    assert_same_but_for_places(before, once)
    assert not repack(once, again).written
    repack(once, again, force=True)
    assert again.read_bytes() == once.read_bytes()
    again.unlink()


# --- what is not written


def test_a_repacked_model_is_left_alone_unless_forced(tmp_path: Path) -> None:
    once = tmp_path / "once.gguf"
    repack(model_file(GQA), once)
    report = repack(once, tmp_path / "again.gguf")
    assert (report.written, report.path, report.bytes_after) == (False, once, once.stat().st_size)
    assert os.listdir(tmp_path) == ["once.gguf"]
    assert repack(once, tmp_path / "again.gguf", force=True).written
    assert (tmp_path / "again.gguf").read_bytes() == once.read_bytes()


def test_aligned_in_another_order_is_not_repacked(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "before.gguf", "unheard")
    writer.add_custom_alignment(4096)
    for name in ("blk.1.a", "blk.0.a"):
        writer.add_tensor(name, np.ones(3, F32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert repack(tmp_path / "before.gguf", tmp_path / "after.gguf").written


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("link", [None, os.symlink, os.link], ids=["itself", "symlink", "hard link"])
def test_the_model_itself_is_never_replaced(tmp_path: Path, link: object, force: bool) -> None:
    model = Path(shutil.copy(model_file(GQA), tmp_path / "model.gguf"))
    before, target = model.read_bytes(), model
    if callable(link):
        target = tmp_path / "other.gguf"
        link(model, target)
    with pytest.raises(
        OptionError, match=r"\.gguf is the model itself, which must be kept; name another file"
    ):
        repack(model, target, force)
    assert model.read_bytes() == before


def test_no_part_of_the_model_is_replaced(tmp_path: Path) -> None:
    paths = split_llama(tmp_path)
    before = [path.read_bytes() for path in paths]
    with pytest.raises(OptionError, match="is the model itself"):
        repack(paths[0], paths[2], force=True)
    assert [path.read_bytes() for path in paths] == before


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("mine")
    with pytest.raises(OptionError, match="exists already; --force replaces it"):
        repack(model_file(GQA), path)
    assert path.read_text() == "mine"
    repack(model_file(GQA), path, force=True)
    assert_same_but_for_places(model_file(GQA), path)
    assert os.listdir(tmp_path) == ["x.gguf"]


@pytest.mark.parametrize("name", ["", "config.json", "model.safetensors"])
def test_a_folder_is_for_convert(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="is not a GGUF file; `hetrun convert` makes one"):
        repack(folder(Row("repack", "llama")) / name, tmp_path / "x.gguf")
    assert not os.listdir(tmp_path)


def test_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = read_gguf(model_file(GQA))
    assert module.target(RepackOptions(Path("a")), file) == Path("gqa-aligned.gguf")
    assert module.target(RepackOptions(Path("a"), tmp_path), file) == tmp_path / "gqa-aligned.gguf"
    assert module.target(RepackOptions(Path("a"), Path("b/c.gguf")), file) == Path("b/c.gguf")
    (tmp_path / "split").mkdir()
    parts = read_gguf(write_split(tmp_path / "split")[1])
    assert module.target(RepackOptions(Path("a")), parts) == Path("m-aligned.gguf")


# --- what goes wrong


def test_what_the_reader_refuses_is_refused(tmp_path: Path) -> None:
    """Cut anywhere, it is one sentence, and nothing is left."""
    raw = model_file(GQA).read_bytes()
    start = read_gguf(model_file(GQA)).data_offset
    bad = tmp_path / "bad.gguf"
    for size in [*range(0, start, 97), start, len(raw) - 1]:
        bad.write_bytes(raw[:size])
        with pytest.raises(ModelFileError, match=r"bad\.gguf: "):
            repack(bad, tmp_path / "x.gguf")
    assert os.listdir(tmp_path) == ["bad.gguf"]


@given(at=st.integers(0, 3000), byte=st.integers(0, 255))
@settings(max_examples=80, suppress_health_check=list(HealthCheck))
def test_a_damaged_header_is_refused_or_copied(tmp_path: Path, at: int, byte: int) -> None:
    raw = bytearray(model_file(GQA).read_bytes())
    raw[at] = byte
    bad, target = tmp_path / "bad.gguf", tmp_path / "x.gguf"
    bad.write_bytes(raw)
    try:
        repack(bad, target)
    except ModelFileError:
        assert not target.exists()
    else:
        again = read_gguf(target)
        assert again.tensors.keys() == read_gguf(bad).tensors.keys()
        target.unlink()


def test_a_model_that_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="block_count"):
        repack(foreign(tmp_path / "a.gguf", ["token_embd.weight"], "llama"), tmp_path / "x.gguf")
    assert os.listdir(tmp_path) == ["a.gguf"]


@pytest.mark.parametrize("fatal", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("nth", [1, 2, 30])
def test_a_failure_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: BaseException, nth: int
) -> None:
    written, write = 0, GgufOutput.write

    def failing(self: GgufOutput, data: bytes) -> None:
        nonlocal written
        written += 1
        if written == nth:
            raise fatal
        write(self, data)

    monkeypatch.setattr(GgufOutput, "write", failing)
    before = open_files()
    with pytest.raises((KeyboardInterrupt, OptionError)) as raised:
        repack(model_file(GQA), tmp_path / "x.gguf")
    if isinstance(fatal, OSError):
        assert str(raised.value).endswith(" bytes cannot be written there: No space left on device")
    assert not os.listdir(tmp_path)
    assert open_files() == before


def test_a_disk_that_cannot_be_read_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, reads = os.preadv, 0

    def failing(file: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal reads
        reads += 1
        if reads == 40:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    before = open_files()
    with pytest.raises(ModelFileError, match=r"reading blk\.\d\..* at byte \d+ failed: Input/output error"):
        repack(model_file(GQA), tmp_path / "x.gguf")
    assert not os.listdir(tmp_path)
    assert open_files() == before


@pytest.mark.parametrize("how", ["written to", "another file", "bytes long"])
def test_a_model_that_changes_meanwhile_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    model = Path(shutil.copy(model_file(GQA), tmp_path / "model.gguf"))
    fill, changed = FileReader.fill, False

    def changing(self: FileReader, target: memoryview, part: Extent, skip: int, name: str) -> None:
        nonlocal changed
        if name == "blk.1.ffn_up.weight":
            changed = True
            if how == "written to":
                os.utime(model, ns=(1, 1))
            elif how == "another file":
                shutil.copy(model, tmp_path / "new")
                os.replace(tmp_path / "new", model)
            else:
                os.truncate(model, part.offset + 1)
        fill(self, target, part, skip, name)

    monkeypatch.setattr(FileReader, "fill", changing)
    if how == "another file":  # whose bytes were read to their end from the one that was opened
        assert repack(model, tmp_path / "x.gguf").written
    else:
        with pytest.raises(ModelFileError, match=f"{how}|was truncated while in use"):
            repack(model, tmp_path / "x.gguf")
        assert os.listdir(tmp_path) == ["model.gguf"]
    assert changed


def test_a_disk_without_room_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = model_file(GQA).stat().st_size
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("hetrun.tools.convert.gguf_writer.disk_usage", lambda path: usage._replace(free=size))
    with pytest.raises(OptionError, match=r"x\.gguf: needs [\d,]+ bytes, but only [\d,]+ are free there"):
        repack(model_file(GQA), tmp_path / "x.gguf")
    assert not os.listdir(tmp_path)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- memory


MEASURE = """
import sys
from dataclasses import replace
from pathlib import Path
from hetrun.tools.convert.reorder import RepackOptions, repack_model

def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

small, large, target = map(Path, sys.argv[1:])
repack_model(RepackOptions(small, target, True))
before = peak()
repack_model(RepackOptions(large, target, True))
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A tensor of 128 MiB, most of it a hole in the file, for less than 16 MiB."""
    small = foreign(tmp_path / "small.gguf", ["blk.0.w"])
    large = tmp_path / "large.gguf"
    text = struct.pack("<Q", len("general.architecture")) + b"general.architecture"
    value = struct.pack("<IQ", 8, 7) + b"unheard"
    tensor = struct.pack("<Q1sIQIQ", 1, b"w", 1, 32 << 20, 0, 0)
    large.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text + value + tensor)
    os.truncate(large, (large.stat().st_size + 31) // 32 * 32 + (128 << 20))
    arguments = [str(small), str(large), str(tmp_path / "x.gguf")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "x.gguf").stat().st_size > 128 << 20
    assert int(done.stdout) < 16 << 20
