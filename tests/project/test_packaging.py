"""Every way to install hetrun: wheel, wheel from the sdist, editable, and an archive that lost its links.

One wheel and one sdist are built in a run, for all tests and workers; what builds more is for test-all.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.once import once
from tests.support.paths import ROOT
from tests.support.tiers import exhaustive

FOLDERS = ("backends", "models", "tui")
DATA = (".tcss", ".typed", ".cu", ".cuh", ".c", ".h", ".jinja", ".toml", ".html")
SKIPPED = (
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".git",
    ".venv*",
    ".*_cache",
    ".hypothesis",
    "*.gguf",
    "*.so",
)
# What stands for files that do not exist yet: nested packages and data files, in the folders and in the core.
PLANTED = {
    "backends/planted/__init__.py": "",
    "backends/planted/deep/__init__.py": "WHERE = __name__\n",
    "backends/planted/kernels.cu": "// a kernel\n",
    "backends/planted/deep/library.c": '#include "library.h"\nint planted(void) { return PLANTED; }\n',
    "backends/planted/deep/library.h": "#define PLANTED 42\n",
    "models/planted.py": "",
    "tui/widgets_planted/__init__.py": "",
    "tui/planted.tcss": "Screen {}\n",
    "hetrun/planted/__init__.py": "",
    "hetrun/planted/more.py": "",
}


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command; pip is kept from the network."""
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def wheel_of(project: Path, out: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps")
    run(*pip, "--wheel-dir", out, project, cwd=out)
    (wheel,) = out.glob("hetrun-*.whl")
    return wheel


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def expected(project: Path) -> set[str]:
    """Every module and data file of the five folders, under the name it must have in a wheel, and the library
    that is made of each C file."""
    names = set()
    for path in sources(project):
        for made in [path, path.with_suffix(".so")] if path.suffix == ".c" else [path]:
            name = made.relative_to(project).as_posix()
            names.add(name if name.startswith("hetrun/") else f"hetrun/{name}")
    return names


def sources(project: Path) -> Iterator[Path]:
    """Modules and data files where they lie."""
    for folder in ("hetrun", *FOLDERS):
        for path in (project / folder).rglob("*"):
            if path.suffix in (".py", *DATA) or path.name == "py.typed":
                yield path


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout, links and all, with the planted files."""
    project = tmp_path_factory.mktemp("checkout") / "hetrun"
    shutil.copytree(ROOT, project, symlinks=True, ignore=shutil.ignore_patterns(*SKIPPED))
    compiled = ROOT / "build" / "libraries"  # what this checkout has compiled need not be compiled again
    if compiled.is_dir():
        shutil.copytree(compiled, project / "build" / "libraries")
    for name, text in PLANTED.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
    return project


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one of the run."""
    folder = once(tmp_path_factory, "wheel", lambda folder: print(wheel_of(checkout, folder)))
    (found,) = folder.glob("hetrun-*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one of the run."""
    build = (sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir")
    folder = once(tmp_path_factory, "sdist", lambda folder: print(run(*build, folder, cwd=checkout)))
    (found,) = folder.glob("hetrun-*.tar.gz")
    return found


@pytest.fixture
def linkless(checkout: Path, tmp_path: Path) -> Path:
    """The checkout after a zip archive: as `git archive` packs it and as most programs unpack it."""
    packed = tmp_path / "hetrun.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(p for p in checkout.rglob("*") if p.is_symlink() or p.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(checkout).as_posix())
            entry.external_attr = path.lstat().st_mode << 16
            archive.writestr(entry, os.readlink(path) if path.is_symlink() else path.read_bytes())
    project = tmp_path / "unpacked"
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(project)
    assert (project / "hetrun" / "backends").read_text() == "../backends"
    return project


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The Python of a new environment that sees the packages of this one, but not hetrun."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    (site,) = (venv / "lib").glob("python*/site-packages")
    packages = [p for p in sys.path if p.endswith("site-packages")]
    # Appended rather than put into a .pth file, so that an editable hetrun there is not set up here as well.
    (site / "sitecustomize.py").write_text(f"import sys\nsys.path += {packages!r}\n")
    return venv / "bin" / "python"


def install(python: Path, *what: str | Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-build-isolation", "--no-deps")
    run(*pip, "--ignore-installed", *what, cwd=python.parent)


def answer_of_the_planted_library(python: Path) -> str:
    code = (
        "import ctypes, pathlib, hetrun.backends.planted.deep as m;"
        "print(ctypes.CDLL(str(pathlib.Path(m.__file__).parent / 'library.so')).planted())"
    )
    return run(python, "-c", code, cwd=python.parent).strip()


def where(python: Path, module: str) -> Path:
    code = f"import {module} as m; print(m.__file__)"
    return Path(run(python, "-c", code, cwd=python.parent).strip())


def test_the_links_are_committed_as_links() -> None:
    for folder in FOLDERS:
        assert os.readlink(ROOT / "hetrun" / folder) == f"../{folder}"


@pytest.mark.slow
def test_the_wheel_of_a_checkout_holds_every_module(checkout: Path, wheel: Path) -> None:
    names = contents(wheel)
    assert names == expected(checkout)
    assert {f"hetrun/{name}".replace("hetrun/hetrun/", "hetrun/") for name in PLANTED} <= names
    assert {"hetrun/py.typed", *(f"hetrun/{folder}/__init__.py" for folder in FOLDERS)} <= names


@pytest.mark.slow
def test_without_a_compiler_everything_else_is_installed(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(checkout / "build", ignore_errors=True)  # where others compiled
    monkeypatch.setenv("CC", "false")
    names = contents(wheel_of(checkout, tmp_path))
    assert names == {name for name in expected(checkout) if not name.endswith(".so")}


@pytest.mark.slow
def test_the_sdist_holds_every_file_once(checkout: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {m.name.split("/", 1)[1]: m for m in archive.getmembers() if "/" in m.name}
        assert not [name for name, member in members.items() if member.issym() or member.islnk()]
    assert not [name for name in members if name.startswith(tuple(f"hetrun/{f}/" for f in FOLDERS))]
    made = {path.relative_to(checkout).as_posix() for path in sources(checkout)}
    assert made <= set(members)
    assert {"LICENSE", "README.md", "constraints.txt", "tests/conftest.py", "backends/__init__.py"} <= set(
        members
    )


@pytest.mark.slow
@exhaustive
def test_the_wheel_from_the_sdist_holds_every_module(checkout: Path, sdist: Path, tmp_path: Path) -> None:
    assert contents(wheel_of(sdist, tmp_path)) == expected(checkout)


@pytest.mark.slow
@exhaustive
def test_an_archive_without_links_installs(linkless: Path, python: Path, tmp_path: Path) -> None:
    assert contents(wheel_of(linkless, tmp_path)) == expected(linkless)
    install(python, linkless)
    assert where(python, "hetrun.backends.planted.deep").is_relative_to(python.parent.parent)
    assert where(python, "hetrun.tui").is_relative_to(python.parent.parent)


@pytest.mark.slow
@exhaustive
@pytest.mark.parametrize("kind", ["checkout", "linkless"])
def test_an_editable_install_imports_the_sources(
    kind: str, python: Path, request: pytest.FixtureRequest
) -> None:
    project: Path = request.getfixturevalue(kind)
    install(python, "--editable", project)
    for module in ("hetrun", "hetrun.backends.planted.deep", "hetrun.models", "hetrun.tui"):
        assert where(python, module).resolve().is_relative_to(project.resolve())
    # The folders are packages under hetrun only.
    with pytest.raises(AssertionError, match="No module named 'backends'"):
        where(python, "backends")
    assert answer_of_the_planted_library(python) == "42"
    (project / "backends" / "planted" / "deep" / "library.so").unlink()  # other tests build from here, too


@pytest.mark.slow
def test_the_installed_package_has_its_command_and_backends(
    wheel: Path, python: Path, tmp_path: Path
) -> None:
    install(python, wheel)
    assert os.stat(python.parent / "hetrun").st_mode & stat.S_IXUSR
    code = "from importlib.metadata import entry_points as e; print(*e(group='hetrun.backends').names)"
    assert {"reference", "llamacpp"} <= set(run(python, "-c", code, cwd=tmp_path).split())
    assert answer_of_the_planted_library(python) == "42"
    code = "import hetrun, importlib.metadata as m; print(hetrun.__version__, m.version('hetrun'))"
    assert len(set(run(python, "-c", code, cwd=tmp_path).split())) == 1
