"""Packages of strangers: made up in a test, or built, installed into a clean environment and used there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import cast

import pytest

from hetrun.system import entry_points
from hetrun.system.entry_points import PluginPoint

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins"


# Registers a thing in a group under a name, for one test: the fixture `register`.
Register = Callable[..., PluginPoint]

# --- made up


@dataclass(frozen=True)
class Entry:
    """An entry point whose object is here, or whose loading fails."""

    load: Callable[[], object]
    value: str = "stranger:thing"


def point(
    group: str, name: str, load: Callable[[], object], *apis: str, package: str = "stranger"
) -> PluginPoint:
    """What a package that is not there registered; without `apis` for the version that is here."""
    entry = cast(EntryPoint, Entry(load))
    return PluginPoint(group, name, package, "0.1", entry, apis or (str(entry_points.API),))


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Registers something for one test."""
    monkeypatch.setattr(entry_points, "_left_out", {})

    def register(
        group: str, name: str, thing: object = None, *apis: str, fails: BaseException | None = None
    ) -> PluginPoint:
        def load() -> object:
            if fails:
                raise fails
            return thing

        made = point(group, name, load, *apis)
        known: Mapping[tuple[str, str], PluginPoint] = {**entry_points._points(), (group, name): made}
        monkeypatch.setattr(entry_points, "_points", lambda: known)
        return made

    return register


# --- built and installed


@dataclass(frozen=True)
class Home:
    """An environment with hetrun, what the tests have, and some packages of strangers."""

    python: Path
    env: Mapping[str, str]

    def run(self, *command: str, cwd: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
        """A command in it; its exit code must be this one."""
        done = subprocess.run(
            [self.python, *command],
            env=self.env,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done

    def hetrun(
        self, *arguments: str, cwd: Path | None = None, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """The command."""
        return self.run("-m", "hetrun", *arguments, cwd=cwd, code=code)

    def with_variables(self, **variables: str) -> Home:
        """The same with these in its environment."""
        return replace(self, env={**self.env, **variables})


def wheel_of(project: Path, out: Path) -> Path:
    """Built as pip builds it, without the network."""
    (wheel,) = wheels_of([project], out)
    return wheel


def wheels_of(projects: Sequence[Path], out: Path) -> list[Path]:
    """All of them by one call. From copies: building leaves folders behind."""
    skipped = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    copies = [str(shutil.copytree(p, out / f"{p.name}-source", ignore=skipped)) for p in projects]
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    _run([*pip, "--wheel-dir", str(out), *copies])
    names = [project.name.replace("-", "_") for project in projects]
    return [wheel for name in names for wheel in out.glob(f"{name}-*.whl")]


def home_with(folder: Path, *projects: Path) -> Home:
    """A virtual environment in which these are installed, and whatever the tests' own has, without copies."""
    place = folder / "env"
    _run([sys.executable, "-m", "venv", "--without-pip", str(place)])
    here = sysconfig.get_path("purelib")
    there = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    # Not only a path: what is installed as editable has such a file of its own there.
    (there / "tests.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    _run([*pip, "--target", str(there), *map(str, wheels_of(projects, folder))])
    return home_at(folder)


def home_at(folder: Path) -> Home:
    """The environment that was made there, with an empty home."""
    home = Path(tempfile.mkdtemp(prefix="home-", dir=folder))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HETRUN_", "PYTHON", "XDG_"))}
    env |= {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return Home(folder / "env" / "bin" / "python", env)


def project_of(doc: Path, folder: Path) -> Path:
    """The package that a page of the docs writes down: blocks of code whose first line has a file's name
    behind the language, as in ```toml pyproject.toml."""
    files = blocks(doc)
    assert "pyproject.toml" in files, f"{doc.name} shows no package"
    (name,) = [
        line.split('"')[1] for line in files["pyproject.toml"].splitlines() if line.startswith("name =")
    ]
    project = folder / name
    for path, text in files.items():
        target = project / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return project


def blocks(doc: Path) -> dict[str, str]:
    """The files that a page shows, by path."""
    found: dict[str, str] = {}
    path, lines = "", list[str]()
    for line in doc.read_text().splitlines():
        if line.startswith("```"):
            if path:
                found[path] = "\n".join(lines) + "\n"
            _, _, path = line.partition(" ")
            lines = []
        elif path:
            lines.append(line)
    return found


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
