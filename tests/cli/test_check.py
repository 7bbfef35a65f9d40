"""`hetrun check` as people and programs see it; what it finds wrong is in tests/hostile/test_checklist.py."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetrun import LLM, cli
from hetrun.errors import BackendUnavailable, ModelFileError
from hetrun.system import subprocesses
from hetrun.tools import check_model
from tests.hostile.checklist import changed, gguf, good_gguf, write_folder
from tests.hostile.trees import Table, write_gguf
from tests.loader.test_gguf_split import split_llama
from tests.models import foreign

Check = Callable[..., tuple[int, str, str]]
FACTS = "ok: llama, 328 k parameters, F32, 21 tensors, vocabulary of 320, chat template"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Check:
    """Exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.exit_code(["check", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.gguf"
    path.write_bytes(write_gguf(good_gguf()))
    return path


def test_every_file_is_looked_at(run: Check, good: Path, tmp_path: Path) -> None:
    cut, empty = tmp_path / "cut.gguf", tmp_path / "empty.gguf"
    cut.write_bytes(good.read_bytes()[:-1])
    empty.touch()
    code, out, err = run(cut, good, empty, good)
    assert code == 2
    assert out == f"{good}: {FACTS}\n" * 2
    first, second = err.splitlines()
    assert first.startswith(f"hetrun: {cut}: the file is {cut.stat().st_size} bytes but tensor '")
    assert second == f"hetrun: {empty}: is empty: download it again"


def test_a_tensor_that_is_no_weight_is_in_nobodys_way(run: Check, tmp_path: Path) -> None:
    path = tmp_path / "more.gguf"
    ids = Table((("dims", (32, 10)), ("type", 26), ("offset", None), ("data", bytes(1280))))
    path.write_bytes(write_gguf(changed(tensors={"ids": ids})))
    assert run(path) == (0, f"{path}: {FACTS.replace('21', '22').replace('328', '329')}\n", "")
    with LLM(path, threads=1) as llm:
        assert llm.info.parameters == 328_320 + 320


def test_a_record_for_each_file(run: Check, good: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.gguf"
    code, out, err = run("--json", nowhere, good)
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
        "files": [{"path": str(good), "bytes": size}],
    }


def test_with_weights_come_digests(run: Check, tmp_path: Path) -> None:
    folder, parts = write_folder(tmp_path), split_llama(tmp_path)
    code, out, err = run("--json", "--weights", folder, parts[1])
    assert (code, err) == (0, "")
    for record, paths in zip(json.loads(out), (sorted(folder.glob("*.safetensors")), parts), strict=True):
        assert record["weights"] is True
        assert record["bytes"] == sum(p.stat().st_size for p in paths)
        assert record["files"] == [
            {
                "path": str(p),
                "bytes": p.stat().st_size,
                "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
            }
            for p in paths
        ]


def test_what_cannot_be_judged_is_said(run: Check, tmp_path: Path) -> None:
    path = foreign.write(foreign.GPT2, tmp_path / "gpt2.gguf")
    code, out, err = run(path)
    assert (code, err) == (0, "")
    assert ": ok: gpt2, " in out
    assert "; not checked: the shapes of its tensors, which only libllama knows\n" in out


def test_a_path_through_our_descriptors_is_the_same_file(run: Check, good: Path) -> None:
    with good.open("rb") as file:
        path = f"/proc/self/fd/{file.fileno()}"
        assert run(path) == (0, f"{path}: {FACTS}\n", "")


def test_the_file_is_named_once(run: Check, tmp_path: Path) -> None:
    path = gguf("bad", "", {"tokenizer.chat_template": "{% if"}).make(tmp_path)
    code, _, err = run(path)
    assert (code, err.count(str(path)), err.count("\n")) == (2, 1, 1)


def test_a_file_without_vocabulary_and_template(run: Check, tmp_path: Path) -> None:
    keys = [key for key, _ in good_gguf().get("pairs").items if key.startswith("tokenizer.")]
    path = gguf("bare", "", dict.fromkeys(keys)).make(tmp_path)
    assert run(path) == (0, f"{path}: {FACTS.split(', voc')[0]}, no vocabulary, no chat template\n", "")


def test_without_the_librarys_reader_the_vocabulary_is_not_checked(
    run: Check, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*given: Any) -> str:  # noqa: ANN401
        raise BackendUnavailable("llama-cpp-python is not installed")

    monkeypatch.setattr(subprocesses, "ask", unavailable)
    code, out, _ = run(good)
    assert code == 0
    assert out.endswith("; not checked: its vocabulary (llama-cpp-python is not installed)\n")


# --- children that end otherwise than they should


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os; os.abort()", "the library crashed (SIGABRT) when it opened it: it said nothing; get or"),
        (
            "import sys; sys.exit('GGML_ASSERT(n > 0) failed')",
            "ended by itself with exit code 1 when it opened it: GGML_ASSERT",
        ),
        ("import time; time.sleep(60)", "the library did not open it within 1 s"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "want of memory, when it opened it: free",
        ),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); bytearray(2 << 30)",
            "the library ended by itself with exit code 1 when it opened it: MemoryError",
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
    assert subprocesses.ask(code, "model", 60.0, "nobody") == "MODEL"
    code = (
        "from hetrun import errors; from hetrun.system import subprocesses\n"
        "def fail(path): raise errors.BackendUnavailable('not here')\n"
        "subprocesses.answer(fail)"
    )
    with pytest.raises(BackendUnavailable, match="not here"):
        subprocesses.ask(code, "model", 60.0, "nobody")


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
        f"hetrun: {good}: the library that reads vocabularies crashed (SIGABRT) when it opened"
    )


def test_a_file_that_changes_while_it_is_hashed(good: Path) -> None:
    found = check_model.check_model(good)
    os.truncate(good, 1000)
    with pytest.raises(ModelFileError, match="it was changed while in use"):
        check_model.digests(found.files)
