"""Wheels in a fresh environment without any compiler: installed, and one answer from the small model.

They are those in dist/ (`python scripts/build_wheels.py`): compiling them is not this test's part. What else
hetrun needs comes from the package index, or from what pip has kept.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import perf_counter

import pytest

from tests.support.paths import ROOT
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
    known = filter(None, map(asked, candidates(os.environ.get("PATH", ""), Path.home())))
    return {python.name: python for python in known if python.version[:2] in VERSIONS}


def without_compilers(folder: Path) -> dict[str, str]:
    """An environment in which nothing can be compiled: no program is on PATH, and CC and CXX refuse."""
    (folder / "empty").mkdir()
    kept = {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "HTTP", "SSL", "XDG"))
    }
    nothing = {"PATH": str(folder / "empty"), "CC": "/bin/false", "CXX": "/bin/false"}
    return {**kept, **nothing, "HOME": os.environ["HOME"], "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(*command: str | Path, env: dict[str, str], cwd: Path) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


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
    run(python, "-m", "pip", "install", "-q", *only, ggml, f"{hetrun}[demo]", env=env, cwd=tmp_path)
    installed = perf_counter()
    command = ("-m", "hetrun", "run", PROMPT, "-n", "24", "--temperature", "0")
    answer = run(python, *command, env=env, cwd=tmp_path)
    ended = perf_counter()
    cpu, ggml_version, others = json.loads(run(python, "-c", STATE, env=env, cwd=tmp_path))
    for name, seconds in (("install_s", installed - started), ("answer_s", ended - installed)):
        record_property(name, round(seconds, 1))
    print(
        f"Python {version}: installed in {installed - started:.1f} s, answered in {ended - installed:.1f} s"
    )
    assert "Paris" in answer
    assert Path(cpu).is_relative_to(tmp_path)
    assert ggml_version.startswith("0.")
    assert others == []
    # Its own C is there, too: nothing was compiled, so the wheel brought it.
    assert "own kernels" in run(python, "-m", "hetrun", "devices", env=env, cwd=tmp_path)
