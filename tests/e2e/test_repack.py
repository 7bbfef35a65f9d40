"""`hetrun repack` as people type it."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetrun import cli
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.half_repacked import Names
from hetrun.tools.convert.reorder import RECORDS
from tests.convert.test_expert_records import QWEN3, merged
from tests.convert.test_reorder import foreign
from tests.loader.test_gguf_split import split_llama
from tests.models.cases import GQA
from tests.models.hf import Row, folder
from tests.support.rig import model_file


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.exit_code(["repack", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_one_line_when_it_is_done_and_when_there_is_nothing_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, str(model_file(GQA)))
    assert (code, err) == (0, "")
    how = "gqa-aligned.gguf: 21 tensors in the order of use, each at a multiple of 4096 bytes"
    assert out.startswith(f"{how}, ")
    assert out.count("\n") == 1
    code, out, err = run(capsys, "gqa-aligned.gguf")
    assert (code, err) == (0, "")
    assert out == f"{how}, already; nothing was written\n"
    assert os.listdir(tmp_path) == ["gqa-aligned.gguf"]
    code, out, err = run(capsys, "gqa-aligned.gguf", "--force", "-o", "again.gguf")
    assert (code, out.split(":")[0]) == (0, "again.gguf")


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = split_llama(tmp_path)
    target = tmp_path / "tiny-aligned.gguf"
    code, out, err = run(capsys, str(paths[0]), "-o", str(tmp_path), "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found.pop("seconds") > 0
    assert found == {
        "path": str(target),
        "written": True,
        "tensors": 21,
        "records": 0,
        "alignment": 4096,
        "bytes_before": sum(path.stat().st_size for path in paths),
        "bytes_after": target.stat().st_size,
        "notes": [],
    }
    code, out, _ = run(capsys, str(target), "--json")
    assert json.loads(out)["written"] is False
    assert json.loads(out)["path"] == str(target)


def test_an_unknown_architecture_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = foreign(tmp_path / "a.gguf", ["blk.1.a", "blk.0.a"])
    code, out, err = run(capsys, str(before), "-o", str(tmp_path / "b.gguf"))
    assert (code, out.count("\n"), err.count("\n")) == (0, 1, 1)
    assert err.startswith("hetrun: hetrun does not run the architecture 'unheard' itself: ")


def test_the_file_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, str(model_file(GQA)), "-o", str(tmp_path / "x.gguf"))[0] == 0
    tokens = []
    for path in (model_file(GQA), tmp_path / "x.gguf"):
        assert cli.exit_code(["run", "hi", "-m", str(path), "-n", "8", "--temp", "0", "--json"]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["tokens"])
    assert len(tokens[0]) == 8
    assert tokens[0] == tokens[1]


def test_experts_as_records_and_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    code, out, err = run(capsys, str(merged(QWEN3)), "-o", str(one))
    assert (code, err) == (0, f"hetrun: {RECORDS}\n")
    assert ", each at a multiple of 4096 bytes, 12 experts as records, " in out
    assert run(capsys, str(one), "--merged", "-o", str(two))[::2] == (0, "")
    assert run(capsys, str(two), "--in-place")[0] == 0
    assert two.read_bytes() == one.read_bytes()
    assert cli.exit_code(["inspect", str(one), "--tensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if ".ffn_gate." in line] == [
        "blk.0.ffn_gate.{0-5}.weight",
        "blk.1.ffn_gate.{0-5}.weight",
    ]
    assert any("6 x 64 x 128" in line for line in lines)
    assert cli.exit_code(["check", str(one)]) == 0


def test_in_place(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = Path(shutil.copy(model_file(GQA), tmp_path / "x.gguf"))
    code, out, err = run(capsys, str(path), "--in-place", "--json")
    assert (code, err, json.loads(out)["path"]) == (0, "", str(path))
    assert json.loads(out)["bytes_before"] == model_file(GQA).stat().st_size
    assert run(capsys, str(path), "--in-place")[1].endswith("already; nothing was written\n")


@pytest.mark.slow
def test_stopped_in_place_it_says_how_to_go_on(tmp_path: Path) -> None:
    path = huge(tmp_path / "huge.gguf")
    command = [sys.executable, "-m", "hetrun", "repack", str(path), "--in-place", "--force"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not Names(path).source.exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert err.decode().strip() == f"hetrun: {path} is half repacked: run the same command again to finish it"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing argument 'MODEL'"),
        (["missing.gguf"], "missing.gguf does not exist; give a .gguf file"),
        (["FOLDER"], "`hetrun convert` makes one"),
        (["MODEL", "-o", "MODEL"], "is the model itself, which must be kept"),
        (["MODEL", "-o", "MODEL", "--force"], "is the model itself, which must be kept"),
        (["MODEL", "-o", "x.gguf", "--in-place"], "leave out -o"),
        (["missing.gguf", "--in-place"], "missing.gguf does not exist; give a .gguf file"),
        (["MODEL", "-o", "/dev/null", "--force"], "/dev/null is a device or a pipe"),
        (["MODEL", "-o", "/proc/x.gguf"], "/proc/x.gguf"),
        (["MODEL", "-o", "no/such/x.gguf"], "no/such is not a folder"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    named = {"MODEL": model_file(GQA), "FOLDER": folder(Row("repack", "llama"))}
    before = model_file(GQA).read_bytes()
    code, out, err = run(capsys, *(str(named.get(a, a)) for a in arguments))
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    assert model_file(GQA).read_bytes() == before


def test_a_disk_that_fills_up_is_one_sentence(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from hetrun.cli import exit_code\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "sys.exit(exit_code(['repack', sys.argv[1], '-o', sys.argv[2]]))\n"
    )
    arguments = [str(model_file(GQA)), str(tmp_path / "x.gguf")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("bytes cannot be written there: File too large\n")
    assert not os.listdir(tmp_path)


def huge(path: Path) -> Path:
    """A file of 4 GiB, most of it a hole."""
    foreign(path, ["blk.0.a", "blk.0.b"])
    found = read_gguf(path)
    raw = bytearray(path.read_bytes())
    at = raw.index(b"blk.0.b") + 7 + 4
    raw[at : at + 8] = (1 << 30).to_bytes(8, "little")
    path.write_bytes(raw)
    os.truncate(path, found.tensors["blk.0.b"].offset + (4 << 30))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle_it_leaves_nothing(stop: signal.Signals, tmp_path: Path) -> None:
    target = tmp_path / "to"
    target.mkdir()
    command = ["repack", str(huge(tmp_path / "huge.gguf")), "-o", str(target)]
    process = subprocess.Popen(
        [sys.executable, "-m", "hetrun", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Tests that were started in the background ignore Ctrl-C, and their children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (begun := os.listdir(target)) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(stop)
    out, err = process.communicate()
    assert begun, err
    assert begun[0].endswith(".part")
    assert process.returncode == 130
    assert (out, err.strip()) == (b"", b"")
    assert not os.listdir(target)


@pytest.mark.slow
def test_a_terminal_sees_a_bar(tmp_path: Path) -> None:
    """And stdout has the result only; who writes into a file sees no bar, as above."""
    ours, theirs = pty.openpty()
    target = tmp_path / "to"
    target.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "hetrun", "repack", str(huge(tmp_path / "huge.gguf")), "-o", str(target)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    seen = b""
    while b"repacking" not in seen:
        seen += os.read(ours, 1000)
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[0] == b""
    os.close(ours)
    assert b"%" in seen
    assert not os.listdir(target)
