"""`hetrun doctor` where all is well and where things are broken, and what shells complete."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from hetrun.backends.amx import INSTALL_IPEX
from hetrun.backends.llamacpp.ggml_api import INSTALL as LLAMA
from hetrun.cli.reports.doctor import conclusion
from hetrun.system.units import counted
from hetrun.tools import doctor as tool
from hetrun.tools.doctor import DoctorFinding, State, _mend, examine

pytestmark = pytest.mark.slow

# What a test puts before the command, in a module that Python imports by itself.
BLOCKED = """
import importlib.util, sys
look = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] in {names!r} else look(name, *more)
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")
sys.meta_path.insert(0, Blocked())
"""


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetrun", "doctor", *arguments]
    return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)


def findings(code: int = 0, **environ: str) -> dict[str, dict[str, Any]]:
    """By group and name."""
    done = doctor("--json", **environ)
    assert done.returncode == code, done.stderr + done.stdout
    told = json.loads(done.stdout)
    assert told["ok"] == (code == 0)
    return {f"{row['group']} {row['name']}": row for row in told["findings"]}


def site(tmp_path: Path, code: str) -> str:
    """A path for modules whose sitecustomize runs this in every Python process."""
    (tmp_path / "site").mkdir(exist_ok=True)
    (tmp_path / "site" / "sitecustomize.py").write_text(code)
    return os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def test_all_is_well(tmp_path: Path) -> None:
    done = doctor(COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    *above, blank, last = done.stdout.splitlines()
    assert not blank
    remarks = [line for line in above if line.startswith(("  - ", "  ! "))]
    assert not any(line.startswith(" no ") for line in above)
    said = f"All that hetrun needs works; {counted(len(remarks), 'remark')}: "
    assert last.startswith(said) if remarks else last == "All is well."
    assert all(line.split()[1] in last for line in remarks)
    assert "\x1b" not in done.stdout
    long = [line for line in above if len(line) > 80 and " /" not in line]
    assert long == []
    found = findings()
    for name in ("hetrun Python", "machine CPU", "backends reference", "models cache", "folders cache"):
        assert found[name]["state"] == "ok"
    assert found["backends cuda"]["state"] in ("note", "ok")


@pytest.mark.parametrize(
    ("states", "last"),
    [
        (("ok", "ok"), "All is well."),
        (("ok", "warning"), "All that hetrun needs works; 1 remark: machine b."),
        (("note", "warning"), "All that hetrun needs works; 2 remarks: machine a, b."),
        (("error", "ok"), "1 thing is broken: machine a."),
        (("error", "note"), "1 thing is broken: machine a; 1 remark: machine b."),
    ],
)
def test_the_last_line_agrees_with_those_above(states: tuple[State, State], last: str) -> None:
    found = [DoctorFinding("machine", name, state, "text") for name, state in zip("ab", states, strict=True)]
    assert conclusion(found) == last


def test_what_is_set_and_where_but_no_secrets(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("ctx = 77\napi_key = 'hush'\n")
    found = findings(HETRUN_CONFIG=str(tmp_path / "c.toml"), HETRUN_THREADS="2")
    assert found["settings ctx"]["text"] == f"77, from {tmp_path}/c.toml"
    assert found["settings threads"]["text"] == "2, from HETRUN_THREADS"
    assert "hush" not in json.dumps(found)


@pytest.mark.parametrize(
    ("environ", "which", "says"),
    [
        ({"HETRUN_CTXX": "5"}, "settings settings", "HETRUN_CTXX: did you mean HETRUN_CTX?"),
        ({"HETRUN_CTX": "many"}, "settings settings", "must be an integer"),
        ({"HETRUN_CONFIG": "/none"}, "settings settings", "/none, which does not exist"),
    ],
)
def test_settings_that_are_wrong(environ: dict[str, str], which: str, says: str) -> None:
    found = findings(2, **environ)
    assert found[which]["state"] == "error"
    assert says in found[which]["text"]
    assert found["folders cache"]["state"] == "ok"


def test_without_a_home_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name)
    found = findings(2, HOME="relative")
    assert "no home directory is known" in found["folders folders"]["text"]
    assert found["backends reference"]["state"] == "ok"


def test_what_is_not_installed_has_the_line_that_installs_it(tmp_path: Path) -> None:
    path = site(tmp_path, BLOCKED.format(names={"llama_cpp", "torch"}))
    found = findings(PYTHONPATH=path)
    assert found["backends llamacpp"]["state"] == "note"
    assert "pip install" in found["backends llamacpp"]["mend"]
    assert found["backends reference"]["state"] == "ok"
    assert "-> " in doctor(PYTHONPATH=path).stdout


def test_where_numpy_is_broken_it_is_said(tmp_path: Path) -> None:
    found = findings(2, PYTHONPATH=site(tmp_path, BLOCKED.format(names={"numpy"})))
    assert [row for row in found.values() if row["group"] == "backends" and row["state"] == "error"]
    assert found["folders cache"]["state"] == "ok"


# What a test does where a module is imported.
AT = """
import os, sys, time
class At:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {does}
sys.meta_path.insert(0, At())
"""


HANG = "open({hangs!r}, 'w').close(); time.sleep(99)"


@pytest.mark.parametrize(("does", "ended"), [("os.abort()", "crashed (SIGABRT)"), (HANG, "took more")])
def test_a_backend_that_ends_or_hangs_is_named_and_the_others_are_told(
    does: str, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "hangs"

    def run(command: list[str], seconds: float, *, out: int | IO[bytes], err: int) -> tuple[int, bytes]:
        """As if the time were over as soon as the child hangs, however slow the machine is."""
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err) as child:
            while child.poll() is None:
                if hangs.exists():
                    child.kill()
                    hangs.unlink()
                    raise TimeoutError
                time.sleep(0.01)
        return child.returncode, b""

    monkeypatch.setattr("hetrun.tools.doctor.run", run)
    code = AT.format(module="hetrun.backends.libllama", does=does.format(hangs=str(hangs)))
    monkeypatch.setenv("PYTHONPATH", site(tmp_path, code))
    found = {finding.name: finding for finding in examine() if finding.group == "backends"}
    assert found["libllama"].state == "error"
    assert ended in found["libllama"].text
    assert {name for name, finding in found.items() if finding.state == "error"} == {"libllama"}
    assert found["reference"].state == found["llamacpp"].state == "ok"


@pytest.mark.parametrize(
    ("busy", "said"),
    [
        (0.3, ""),
        (0.9, "other programs keep a core busy"),
        (2.2, "keep 2 cores busy"),
        (9.0, "keep all cores busy"),
    ],
)
def test_a_busy_machine_is_noted(monkeypatch: pytest.MonkeyPatch, busy: float, said: str) -> None:
    monkeypatch.setattr(tool, "others_running", lambda: busy)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    found = [finding for finding in tool._load() if finding.state == "warning"]
    assert len(found) == bool(said)
    assert all(said in finding.text for finding in found)


def test_a_password_in_an_address_is_not_shown() -> None:
    told = findings(HETRUN_URL="http://me:hush@host:1")["settings url"]["text"]
    assert "hush" not in told
    assert "@host:1" in told


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = findings(XDG_CACHE_HOME=str(tmp_path / "file"))["folders cache"]
    assert (found["state"], f"{tmp_path}/file is a file" in found["text"]) == ("warning", True)


def test_the_lines_that_mend_can_be_pasted() -> None:
    for name, line in {
        "llama": f"it is not installed: {LLAMA}",
        "ipex": f"IPEX is not installed: {INSTALL_IPEX}",
        "driver": "there is no NVIDIA driver (libcuda.so.1): if there is an NVIDIA GPU, install its driver",
        "older": "CuPy is not installed: pip install cupy-cuda12x nvidia-cublas-cu12",
        "two": "missing: pip install nvidia-cuda-runtime nvidia-cuda-crt, or pip install 'hetrun[cuda]'",
    }.items():
        expected = {
            "llama": "pip install 'llama-cpp-python>=0.3.36,<0.3.37'",
            "ipex": "",  # it would replace the torch that is there
            "driver": "if there is an NVIDIA GPU, install its driver",
            "two": "pip install nvidia-cuda-runtime nvidia-cuda-crt",
            "older": "pip install cupy-cuda12x nvidia-cublas-cu12",
        }
        assert _mend(line) == expected[name]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("hetrun p", {"plan", "ps", "pull"}),
        ("hetrun run --kv-type q", {"q8_0"}),
        ("hetrun run --backend ll", {"llamacpp"}),
        ("hetrun run --spec ", {"off", "lookup", "mtp", "auto", "draft:"}),
        ("hetrun plan --preci", {"--precision"}),
    ],
)
def test_bash_completes(line: str, some: set[str], tmp_path: Path) -> None:
    command = tmp_path / "bin" / "hetrun"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hetrun "$@"\n')
    command.chmod(0o755)
    script = subprocess.run(
        [command, "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    words = line.split(" ")
    code = f"""{script}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}
_hetrun_completion hetrun
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    environ = os.environ | {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == some
