"""`hetrun check` as people and programs see it; what it finds wrong is in tests/hostile/test_checklist.py."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetrun import LLM, cli
from hetrun.errors import BackendUnavailable, ModelFileError
from hetrun.graph import Extent
from hetrun.loader.hub.checksums import ExpectedChecksum, expected
from hetrun.loader.open_model import open_model
from hetrun.system import subprocesses
from hetrun.tools import check_model
from tests.hostile.checklist import changed, gguf, good_gguf, write_folder
from tests.hostile.trees import Table, write_gguf
from tests.loader.test_gguf_split import split_llama
from tests.models import foreign

Check = Callable[..., tuple[int, str, str]]
UNREAD = (
    "Damage in the weights is found without --structure only: then check reads them, looks for NaN and "
    "long runs of zeros, and compares checksums.\n"
)
MODEL = "llama, 328 k parameters, F32, 21 tensors, vocabulary of 320, chat template"
FACTS = f"structure ok, weights not read: {MODEL}"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Check:
    """Exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.exit_code(["check", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def good_bytes() -> bytes:
    return write_gguf(good_gguf())


@pytest.fixture
def good(tmp_path: Path, good_bytes: bytes) -> Path:
    path = tmp_path / "good.gguf"
    path.write_bytes(good_bytes)
    return path


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary is read here: in a child it takes a second, and few tests are about that."""
    monkeypatch.setattr(
        subprocesses, "ask", lambda code, path, *given: check_model._read_vocabulary(str(path))
    )


def test_every_file_is_looked_at(run: Check, good: Path, tmp_path: Path) -> None:
    cut, empty = tmp_path / "cut.gguf", tmp_path / "empty.gguf"
    cut.write_bytes(good.read_bytes()[:-1])
    empty.touch()
    nowhere = tmp_path / "nowhere.gguf"
    code, out, err = run("--structure", cut, good, empty, good, nowhere)
    assert code == 2
    first, *others = out.splitlines(keepends=True)
    assert first.startswith(f"{cut}: not ok: the file is {cut.stat().st_size} bytes but tensor '")
    assert "".join(others) == (
        f"{good}: {FACTS}\n{empty}: not ok: is empty: download it again\n{good}: {FACTS}\n"
        f"{nowhere}: not ok: there is no such file\n{UNREAD}"
    )
    assert err == "hetrun: 3 of 5 models are not ok\n"
    assert run(empty) == (2, "", f"hetrun: {empty}: is empty: download it again\n")


@pytest.mark.usefixtures("no_child")
def test_a_tensor_that_is_no_weight_does_no_harm(run: Check, tmp_path: Path) -> None:
    path = tmp_path / "more.gguf"
    ids = Table((("dims", (32, 10)), ("type", 26), ("offset", None), ("data", bytes(1280))))
    path.write_bytes(write_gguf(changed(tensors={"ids": ids})))
    facts = FACTS.replace("21", "22").replace("328", "329")
    assert run("--structure", path) == (0, f"{path}: {facts}\n{UNREAD}", "")
    with LLM(path, threads=1) as llm:
        assert llm.info.parameters == 328_320 + 320


@pytest.mark.usefixtures("no_child")
def test_a_record_for_each_file(run: Check, good: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.gguf"
    code, out, err = run("--json", "--structure", nowhere, good)
    bad, fine = json.loads(out)
    assert code == 2
    assert err == f"hetrun: {nowhere}: there is no such file\n"
    assert bad == {"path": str(nowhere), "ok": False, "reason": f"{nowhere}: there is no such file"}
    size = good.stat().st_size
    assert fine == {
        "path": str(good),
        "ok": True,
        "reason": None,
        "architecture": "llama",
        "parameters": 328_320,
        "type": "F32",
        "tensors": 21,
        "bytes": size,
        "vocabulary": 320,
        "chat_template": True,
        "weights": False,
        "unchecked": [],
        "remarks": [],
        "files": [{"path": str(good), "bytes": size}],
    }


@pytest.mark.usefixtures("no_child")
def test_with_weights_come_digests(run: Check, tmp_path: Path) -> None:
    folder, parts = write_folder(tmp_path), split_llama(tmp_path)
    code, out, err = run("--json", folder, parts[1])
    assert (code, err) == (0, "")
    for record, paths in zip(json.loads(out), (sorted(folder.glob("*.safetensors")), parts), strict=True):
        assert record["weights"] is True
        assert record["bytes"] == sum(p.stat().st_size for p in paths)
        assert record["files"] == [
            {
                "path": str(p),
                "bytes": p.stat().st_size,
                "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
                "expected_by": None,
            }
            for p in paths
        ]


def test_what_cannot_be_judged_is_said(run: Check, tmp_path: Path) -> None:
    path = foreign.write(foreign.GPT2, tmp_path / "gpt2.gguf")
    code, out, err = run(path)
    assert (code, err) == (0, "")
    assert ": ok: gpt2, " in out
    assert "; not checked: the shapes of its tensors, which only libllama knows\n" in out


@pytest.mark.usefixtures("no_child")
def test_a_path_through_our_descriptors_is_the_same_file(run: Check, good: Path) -> None:
    with good.open("rb") as file:
        path = f"/proc/self/fd/{file.fileno()}"
        assert run("--structure", path) == (0, f"{path}: {FACTS}\n{UNREAD}", "")


@pytest.mark.usefixtures("no_child")
def test_the_file_is_named_once(run: Check, tmp_path: Path) -> None:
    path = gguf("bad", "", {"tokenizer.chat_template": "{% if"}).make(tmp_path)
    code, _, err = run(path)
    assert (code, err.count(str(path)), err.count("\n")) == (2, 1, 1)


@pytest.mark.usefixtures("no_child")
def test_a_file_without_vocabulary_and_template(run: Check, tmp_path: Path) -> None:
    keys = [key for key, _ in good_gguf().get("pairs").items if key.startswith("tokenizer.")]
    path = gguf("bare", "", dict.fromkeys(keys)).make(tmp_path)
    facts = f"{FACTS.split(', voc')[0]}, no vocabulary, no chat template"
    assert run("--structure", path) == (0, f"{path}: {facts}\n{UNREAD}", "")


def test_without_the_librarys_reader_the_vocabulary_is_not_checked(
    run: Check, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*given: Any) -> str:  # noqa: ANN401
        raise BackendUnavailable("llama-cpp-python is not installed")

    monkeypatch.setattr(subprocesses, "ask", unavailable)
    code, out, _ = run("--structure", good)
    assert code == 0
    assert out.endswith(f"; not checked: its vocabulary (llama-cpp-python is not installed)\n{UNREAD}")


# --- damage that only the weights' bytes show


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def change_a_byte(path: Path) -> None:
    """In the last tensor."""
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)


@pytest.mark.usefixtures("no_child")
def test_without_the_weights_it_says_at_once_that_they_were_not_read(run: Check, good: Path) -> None:
    data = bytearray(good.read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    good.write_bytes(data)
    code, out, _ = run("--structure", good)
    assert code == 0
    assert out.splitlines()[0].startswith(f"{good}: structure ok, weights not read: llama, ")
    assert ": ok:" not in out
    for with_weights in ((), ("--weights",)):
        code, out, err = run(*with_weights, good)
        assert (code, out) == (2, "")
        assert "NaN or infinity" in err


@pytest.mark.usefixtures("no_child")
def test_it_says_that_changed_bytes_need_a_checksum(run: Check, good: Path) -> None:
    change_a_byte(good)
    code, out, err = run(good)
    assert (code, err) == (0, "")
    first, digest, last = out.splitlines()
    assert first == f"{good}: ok: {MODEL}, all weights finite, no long runs of zeros"
    assert digest == f"  sha256 {sha256(good)}  good.gguf"
    assert "Only a checksum shows whether other bytes of the weights have changed: compare sha256" in last


def test_caches_name_files_by_their_checksum(tmp_path: Path) -> None:
    digest = "0123456789abcdef" * 4
    (tmp_path / "blobs").mkdir()
    for name, store in ((digest, "Hugging Face's cache"), (f"sha256-{digest}", "Ollama")):
        (tmp_path / name[:9]).symlink_to(tmp_path / "blobs" / name)
        assert expected(str(tmp_path / name[:9])) == ExpectedChecksum(digest, store)
    assert expected(str(tmp_path / digest)) is None  # in a folder of another name
    assert expected(str(tmp_path / "blobs" / digest[:40])) is None  # a sha1


@pytest.mark.usefixtures("no_child")
def test_a_file_of_a_cache_is_compared_with_its_checksum(run: Check, good: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    digest = sha256(good)
    blob = good.rename(tmp_path / "blobs" / digest)
    link = tmp_path / "model.gguf"
    link.symlink_to(blob)
    code, out, err = run(link)
    assert (code, err) == (0, "")
    assert f"\n  sha256 {digest}  as Hugging Face's cache downloaded it\n" in out
    assert out.endswith("the weights' files are those that were downloaded, byte by byte.\n")
    change_a_byte(blob)
    code, out, err = run(link)
    assert (code, out) == (2, "")
    assert f"its sha256 is {sha256(blob)}, but Hugging Face's cache downloaded it as {digest}: bytes" in err
    assert err.endswith("remove it and download it again\n")


@pytest.mark.usefixtures("no_child")
def test_a_hole_of_zeros_is_an_error(run: Check, good: Path, tmp_path: Path) -> None:
    weight = open_model(good).find("blk.0.ffn_down.weight")
    assert weight is not None
    (part,) = weight.parts
    assert isinstance(part, Extent)
    assert part.row_bytes * part.rows > 3 * 4096
    data = bytearray(good.read_bytes())
    begin = part.offset + part.row_bytes + 104
    data[begin : begin + 8192] = bytes(8192)
    good.write_bytes(data)
    code, out, err = run(good)
    assert (code, out) == (2, "")
    assert "the tensor 'blk.0.ffn_down.weight' has 8 KiB of zero bytes among its weights" in err
    assert f"from row 1 (byte {begin} of the file) on: an interrupted download or a failing disk" in err
    assert err.endswith("leaves such runs of zeros; download it again\n")
    (record,) = json.loads(run("--json", good)[1])
    (hole,) = record["holes"]
    assert hole.pop("bytes") == pytest.approx(8192, abs=16)  # counted in words
    assert hole == {"tensor": "blk.0.ffn_down.weight", "row": 1, "path": str(good), "offset": begin}


@pytest.mark.usefixtures("no_child")
def test_a_path_is_short_where_it_can_be(
    run: Check, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    _, out, _ = run(good, bad)
    assert out.startswith("~/good.gguf: ok: ")
    assert "\n~/bad.gguf: not ok: is empty: download it again\n" in out
    monkeypatch.chdir(tmp_path)
    assert run(bad)[2] == "hetrun: bad.gguf: is empty: download it again\n"
    (record,) = json.loads(run("--json", bad)[1])
    assert record["path"] == str(bad)  # programs have all of it


# --- children that end otherwise than they should


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "import os; os.abort()",
            "the library crashed (SIGABRT) while opening the file: it said nothing; get or",
        ),
        (
            "import sys; sys.exit('GGML_ASSERT(n > 0) failed')",
            "exited with code 1 while opening the file: GGML_ASSERT",
        ),
        ("import time; time.sleep(60)", "the library did not open it within 1 s"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "memory ran out while opening the file: free",
        ),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); bytearray(2 << 30)",
            "the library exited with code 1 while opening the file: MemoryError",
        ),
        (
            "from hetrun import errors; from hetrun.system import subprocesses\n"
            "def fail(path): raise errors.ModelFileError('x', 'is bad')\n"
            "subprocesses.answer(fail)",
            "x: is bad",
        ),
    ],
)
def test_the_end_of_a_child_is_one_sentence(code: str, says: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        subprocesses.ask(code, "model.gguf", 1.0 if "sleep" in code else 60.0, "the library")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_signals_without_a_name() -> None:
    assert subprocesses.ending(-40) == "crashed (signal 40)"


def test_a_childs_answer() -> None:
    code = "from hetrun.system import subprocesses; subprocesses.answer(lambda path: path.upper())"
    assert subprocesses.ask(code, "model", 60.0, "no one") == "MODEL"
    code = (
        "from hetrun import errors; from hetrun.system import subprocesses\n"
        "def fail(path): raise errors.BackendUnavailable('not here')\n"
        "subprocesses.answer(fail)"
    )
    with pytest.raises(BackendUnavailable, match="not here"):
        subprocesses.ask(code, "model", 60.0, "no one")


def test_a_vocabulary_that_would_end_the_process_does_not(
    run: Check, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os; from hetrun.tools import check_model; "
        "check_model.open_vocabulary = lambda _: os.abort(); check_model.main()"
    )
    real = subprocesses.ask
    monkeypatch.setattr(subprocesses, "ask", lambda _, *given: real(code, *given))
    status, out, err = run(good)
    assert (status, out) == (2, "")
    assert err.startswith(
        f"hetrun: {good}: the library that reads vocabularies crashed (SIGABRT) while opening"
    )


@pytest.mark.usefixtures("no_child")
def test_a_file_that_changes_while_it_is_hashed(good: Path) -> None:
    found = check_model.check_model(good)
    os.truncate(good, 1000)
    with pytest.raises(ModelFileError, match="it was changed while in use"):
        check_model.digests(found.files)
