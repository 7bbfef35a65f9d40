"""hetrun on every Python from 3.11 to 3.14 that is here: installed, one real answer, and the tests.

python -m tests.tools.pythons [--only 3.12]

Looks on PATH, in ~/.pyenv/versions and in /usr/bin. Each Python gets an environment (.venv-3.12), which stays
and makes the next time quicker; the first time ggml is compiled for each, and torch may bring gigabytes. The
Python that runs this has an environment already and is left out. Exit status 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hetrun.tools.missing_packages import NOTES
from tests.run import ROOT, counted

VERSIONS = tuple((3, minor) for minor in range(11, 15))
# Debian has venv and ensurepip in packages of their own. An environment is made by what it was made from.
ASK = """
import ensurepip, json, sys, venv
print(json.dumps([*sys.version_info[:3], getattr(sys, "_base_executable", "")]))
"""

Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Python:
    """One that starts and can make environments."""

    version: Version
    path: str

    @property
    def name(self) -> str:
        return "{}.{}".format(*self.version)


@dataclass(frozen=True, slots=True)
class Step:
    """What one command came to."""

    name: str
    ok: bool
    seconds: float
    tests: Mapping[str, int] = field(default_factory=dict)

    def to_text(self) -> str:
        counts = ", ".join(f"{n} {what}" for what, n in self.tests.items())
        return f"{'ok' if self.ok else 'FAILED'} in {self.seconds:.0f} s{': ' if counts else ''}{counts}"


@dataclass(frozen=True, slots=True)
class Result:
    """What one Python came to."""

    python: Python
    steps: tuple[Step, ...]
    without: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(step.ok for step in self.steps)


def candidates(path: str, home: Path) -> list[Path]:
    """Files that may be such a Python: on PATH, of pyenv, of the system; the first of a version is taken."""
    names = [f"python{major}.{minor}" for major, minor in VERSIONS] + ["python3"]
    folders = [Path(folder) for folder in path.split(os.pathsep) if folder]
    pyenv = sorted(home.glob(".pyenv/versions/*/bin"), key=_numbers, reverse=True)
    return [folder / name for folder in (*folders, *pyenv, Path("/usr/bin")) for name in names]


def _numbers(folder: Path) -> list[int]:
    """A version as pyenv writes it in the name of its folder."""
    return [int(number) for number in re.findall(r"\d+", folder.parent.name)]


def asked(path: Path) -> Python | None:
    """What this file says of itself; nothing, if it is no Python or cannot make environments."""
    if not path.is_file() or not os.access(path, os.X_OK):
        return None
    try:
        done = subprocess.run(
            [path, "-I", "-c", ASK], capture_output=True, text=True, timeout=60, check=False
        )
        *version, executable = json.loads(done.stdout)
        major, minor, patch = map(int, version)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return Python((major, minor, patch), str(executable or path))


def chosen(found: Iterable[Python | None], here: tuple[int, int], only: str | None) -> list[Python]:
    """One of each version that is wanted, the first that was found; but not the one that runs this."""
    by_version: dict[tuple[int, int], Python] = {}
    for python in found:
        if python is not None and python.version[:2] in VERSIONS:
            by_version.setdefault(python.version[:2], python)
    if only is None:
        by_version.pop(here, None)
    return [by_version[version] for version in sorted(by_version) if only in (None, "{}.{}".format(*version))]


def commands(python: Python, environment: Path) -> dict[str, list[str]]:
    """What is run, one after the other; the first that fails is the last."""
    make = ["make", f"PYTHON={python.path}", f"VENV={environment}"]
    stamp = f"{environment}/test.stamp"
    return {
        "answer": [*make, "run"],
        "install": [*make, stamp],
        "tests": [str(environment / "bin" / "python"), "-m", "tests.run"],
    }


def environ() -> dict[str, str]:
    """That of a shell of its own: not that of the `make` that may have started this."""
    left_out = (
        "MAKEFLAGS",
        "MFLAGS",
        "MAKELEVEL",
        "MAKEOVERRIDES",
        "VIRTUAL_ENV",
        "PYTHONPATH",
        "PYTHONHOME",
    )
    return {name: value for name, value in os.environ.items() if name not in left_out}


def tried(python: Python) -> Result:
    """Everything with one Python."""
    environment = Path(f".venv-{python.name}")
    steps: list[Step] = []
    for name, command in commands(python, environment).items():
        print(f"\nPython {python.name}, {name}: {' '.join(command)}", flush=True)
        steps.append(step(name, command))
        if not steps[-1].ok:
            break
    return Result(python, tuple(steps), without(ROOT / environment))


def step(name: str, command: list[str]) -> Step:
    """Run one command; what it says is shown as it comes, and its last count of tests kept."""
    began, tests = time.monotonic(), dict[str, int]()
    with subprocess.Popen(
        command, cwd=ROOT, env=environ(), stdout=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            tests = total(line) or tests
    return Step(name, process.returncode == 0, time.monotonic() - began, tests)


def total(line: str) -> dict[str, int]:
    """The counts in the closing line of tests.run."""
    return dict(counted(f"{line.strip()} in all")) if line.startswith("tests: ") else {}


def without(environment: Path) -> tuple[str, ...]:
    """The packages that the installation left out."""
    try:
        return tuple(json.loads((environment / NOTES).read_text(encoding="utf-8"))["without"])
    except (OSError, ValueError, KeyError):
        return ()


def table(results: Iterable[Result]) -> str:
    """What came of it, a line each and one for each step."""
    lines = []
    for result in results:
        version = ".".join(map(str, result.python.version))
        lines.append(f"Python {version} ({result.python.path}): {'ok' if result.ok else 'FAILED'}")
        lines += [f"  {step.name:8} {step.to_text()}" for step in result.steps]
        if result.without:
            lines.append(f"  left out {', '.join(result.without)}: no wheel for this Python")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.pythons", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", metavar="VERSION", help="as in 3.12; also the version that runs this")
    only = parser.parse_args(argv).only
    here = sys.version_info[:2]
    found = [asked(path) for path in candidates(os.environ.get("PATH", ""), Path.home())]
    pythons = chosen(found, here, only)
    absent = [v for v in VERSIONS if v != here and v not in {p.version[:2] for p in found if p is not None}]
    if absent:
        print(f"not on this machine: Python {', '.join('{}.{}'.format(*version) for version in absent)}")
    if not pythons:
        print("there is no other Python here" if only is None else f"there is no Python {only} here")
        return 0 if only is None else 1
    results = [tried(python) for python in pythons]
    print(f"\n{table(results)}")
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
