"""`hetrun convert` as people type it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetrun import LLM, UserError, cli
from hetrun.loader.formats.gguf import read_gguf
from tests.models import tiny
from tests.models.hf import Row, folder

LLAMA = Row("command", "llama")
LARGE = Row("large", "llama", {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6})


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.exit_code(["convert", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_one_line_when_it_is_done(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "x.gguf"
    code, out, err = run(capsys, str(folder(LLAMA)), "-q", "q4_k_m", "-o", str(target))
    assert (code, err) == (0, "")
    assert out.startswith(f"{target}: 1.3 MiB -> ")
    assert " bits per weight, " in out
    assert out.count("\n") == 1
    assert read_gguf(target).metadata["general.file_type"] == 15


def test_the_file_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = str(tmp_path / "x.gguf")
    assert run(capsys, str(folder(LLAMA)), "-q", "q8_0", "-o", target)[0] == 0
    assert cli.exit_code(["run", "hi", "-m", target, "-n", "4", "--temp", "0", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 4


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "x.gguf"
    code, out, _ = run(capsys, str(folder(LLAMA)), "-q", "F16", "-o", str(target), "--json", "--threads", "1")
    found = json.loads(out)
    assert code == 0
    assert found["path"] == str(target)
    assert found["recipe"] == "F16"
    assert found["bytes_after"] == target.stat().st_size
    assert found["types"] == {"F16": 16, "F32": 5}
    assert 16 < found["bits_per_weight"] < 16.1
    assert found["notes"] == []


def test_a_folder_without_tokenizer_is_converted_and_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(folder(LLAMA) / name)
    code, _, err = run(capsys, str(bare), "-q", "q8_0", "-o", str(tmp_path))
    assert code == 0
    assert err == (
        "hetrun: the folder has no tokenizer.json: the file will have no vocabulary, "
        "and takes token ids only\n"
    )
    made = tmp_path / "bare-Q8_0.gguf"
    assert read_gguf(made).metadata["tokenizer.ggml.model"] == "no_vocab"
    with LLM(made) as llm:
        assert llm.logits([1, 2]).shape == (2, tiny.VOCAB)
        with pytest.raises(UserError, match="only token ids"):
            llm.generate(["a text"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["MODEL"], "name a type, as -q q4_k_m; there are f32"),
        (["MODEL", "-q", "q9"], "-q: there is no type 'q9'; there are f32, f16, bf16, q8_0"),
        (["missing", "-q", "q8_0"], "missing"),
        (["MODEL", "-q", "q8_0", "-o", "/proc/x.gguf"], "/proc/x.gguf"),
        (["MODEL", "-q", "q8_0", "-o", "no/such/x.gguf"], "no/such is not a folder"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, out, err = run(capsys, *(str(folder(LLAMA)) if a == "MODEL" else a for a in arguments))
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle_it_leaves_nothing(stop: signal.Signals, tmp_path: Path) -> None:
    command = ["convert", str(folder(LARGE)), "-q", "q2_k", "-o", str(tmp_path), "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hetrun", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Tests that were started in the background ignore Ctrl-C, and their children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (begun := os.listdir(tmp_path)) and process.poll() is None:
        time.sleep(0.005)
    assert begun, "it was done before it could be stopped"
    assert begun[0].endswith(".part")
    process.send_signal(stop)
    out, err = process.communicate()
    assert process.returncode == 130
    assert (out, err.strip()) == (b"", b"")
    assert not os.listdir(tmp_path)


def test_the_vocabulary_is_the_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "x.gguf"
    run(capsys, str(folder(LLAMA)), "-q", "q8_0", "-o", str(target))
    tokens = read_gguf(target).get_strings("tokenizer.ggml.tokens")
    assert tokens is not None
    assert list(tokens)[:2] == list(tiny.SPECIAL)
    assert len(tokens) == tiny.VOCAB
