"""scripts/install.py: what it shows while pip works, and the sentence it ends with when pip fails."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from hetrun.tools import missing_packages
from tests.support.paths import ROOT

BUILD = """\
Collecting llama-cpp-python<0.3.37,>=0.3.36 (from hetrun==0.1.0)
  Downloading llama_cpp_python-0.3.36.tar.gz (70.3 MB)
  Installing build dependencies: started
  Running command pip subprocess to install build dependencies
    Downloading scikit_build_core-1.1.2-py3-none-any.whl (295 kB)
  Successfully installed packaging-26.3 scikit-build-core-1.1.2
Building wheels for collected packages: llama_cpp_python
  Building wheel for llama_cpp_python (pyproject.toml): started
  Running command Building wheel for llama_cpp_python (pyproject.toml)
  [1/344] /usr/bin/c++ -DGGML_BUILD -o ggml.cpp.o
  [172/344] /usr/bin/c++ -DGGML_BUILD -o ggml-cpu.cpp.o
  Building wheel for llama_cpp_python (pyproject.toml): finished with status 'done'
Successfully built llama_cpp_python
Installing collected packages: numpy, llama-cpp-python
  [3/4] not a step of any build
Successfully installed llama-cpp-python-0.3.36 numpy-2.4.6
"""
NO_COMPILER = "  CMake Error: CMAKE_CXX_COMPILER not set, after EnableLanguage\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_script", ROOT / "scripts" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def show(script: ModuleType, text: str, terminal: bool) -> None:
    reader = script.PipOutput(script.Screen(terminal))
    for line in text.splitlines(keepends=True):
        reader.line(line)


def test_a_terminal_sees_the_compilers_count_in_place(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    show(script, BUILD, terminal=True)
    shown = capsys.readouterr().out
    assert "\r\033[K  building llama-cpp-python: 50 %, 0 s" in shown
    assert "75 %" not in shown
    assert "Compiling ggml for this machine: about three minutes on two cores, once.\n" in shown
    assert shown.endswith("\r\033[K  unpacking 2 packages, 0 s")


def test_a_log_gets_a_progress_line_now_and_then(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 4))
    monkeypatch.setattr(script.time, "monotonic", lambda: float(next(clock)))
    show(script, BUILD, terminal=False)
    shown = capsys.readouterr().out
    assert "\r" not in shown
    progress = [line for line in shown.splitlines() if line.startswith("  ")]
    assert 2 <= len(progress) <= 6
    assert any("building llama-cpp-python: " in line for line in progress)


def test_the_count_of_make_is_understood_too(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    show(script, BUILD.replace("[172/344]", "[ 61%]"), terminal=True)
    assert "building llama-cpp-python: 61 %, 0 s" in capsys.readouterr().out


def test_what_pip_has_cached_is_not_announced_as_a_build(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = "Collecting llama-cpp-python\n  Using cached llama_cpp_python-0.3.36-py3-none-linux_x86_64.whl\n"
    show(script, cached, terminal=True)
    shown = capsys.readouterr().out
    assert "Using cached llama_cpp_python-0.3.36" in shown
    assert "Compiling" not in shown


def test_known_failures_get_one_sentence(script: ModuleType) -> None:
    said = script.explain(NO_COMPILER)
    assert said.startswith("Building ggml needs a C and a C++ compiler: ")
    assert said.endswith(", then run the same command again.")
    assert "network" in script.explain("pip._vendor.urllib3.exceptions.NewConnectionError: ...")
    assert "disk is full" in script.explain("OSError: [Errno 28] No space left on device")
    assert script.explain("something else") is None


def test_the_command_is_followed_and_logged(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"import sys; sys.stdout.write({BUILD!r}); sys.stderr.write('ERROR: it broke\\n'); sys.exit(3)"
    log = tmp_path / "install.log"
    reader = script.PipOutput(script.Screen(False))
    assert script.follow([sys.executable, "-c", code], log, reader) == 3
    assert log.read_text().splitlines() == [*BUILD.splitlines(), "ERROR: it broke"]
    # What it means is known at the end only.
    assert reader.errors == ["ERROR: it broke"]
    assert "it broke" not in capsys.readouterr().out
    assert "ERROR: it broke\npip failed; its last" in str(script.PipFailed(log, reader.errors))


def test_an_environment_that_broke_is_named(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    script = ROOT / "scripts" / "install.py"
    command: list[str | Path] = [sys.executable, script, "--venv", tmp_path / "venv", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"{tmp_path / 'venv'} does not work any more: remove it (rm -r {tmp_path / 'venv'}) "
        "and run the same command again.\n"
    )


CPUINFO = "processor\t: 0\nmodel name\t: amx_tile the great\nflags\t\t: fpu sse2{more}\nbugs\t\t: amx_tile\n"


@pytest.mark.parametrize(
    ("machine", "more", "amx"),
    [
        ("x86_64", " avx2 amx_tile amx_int8", True),
        ("x86_64", " avx2", False),
        ("aarch64", " amx_tile", False),
    ],
)
def test_a_cpu_with_tiles_is_recognised(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, machine: str, more: str, amx: bool
) -> None:
    monkeypatch.setattr(script.platform, "machine", lambda: machine)
    monkeypatch.setattr(script.Path, "read_text", lambda path, **_: CPUINFO.format(more=more))
    assert script.has_amx() == amx


def test_without_proc_there_are_no_tiles(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, **_: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(script.Path, "read_text", fail)
    assert not script.has_amx()


def compiler(folder: Path, code: int) -> dict[str, str]:
    """An environment whose compiler writes down what it is given and ends with this code."""
    program = folder / "some compiler"
    program.write_text(f"#!/bin/sh\necho \"$@\" > '{folder}/given'\nexit {code}\n")
    program.chmod(0o755)
    return {"CXX": f"'{program}' -pipe", "PATH": os.environ["PATH"]}


def test_amx_is_compiled_without_the_removal_that_breaks_it(script: ModuleType, tmp_path: Path) -> None:
    environ = compiler(tmp_path, 0)
    assert script.building(environ, amx=True)["CXXFLAGS"] == "-fno-tree-dse -fno-dse"
    assert (tmp_path / "given").read_text() == "-pipe -fno-tree-dse -fno-dse -E -x c++ /dev/null\n"
    own = script.building({**environ, "CXXFLAGS": "-O2 -g", "CMAKE_BUILD_PARALLEL_LEVEL": "7"}, amx=True)
    assert own["CXXFLAGS"] == "-fno-tree-dse -fno-dse -O2 -g"
    assert own["CMAKE_BUILD_PARALLEL_LEVEL"] == "7"


def test_who_needs_no_such_flags_gets_none(script: ModuleType, tmp_path: Path) -> None:
    assert script.building({"CXXFLAGS": "-O2"}, amx=False)["CXXFLAGS"] == "-O2"
    assert "CXXFLAGS" not in script.building({}, amx=False)
    assert "CXXFLAGS" not in script.building(compiler(tmp_path, 1), amx=True)
    assert "CXXFLAGS" not in script.building({"CXX": str(tmp_path / "nowhere")}, amx=True)


@pytest.mark.parametrize(
    ("amx", "broken", "steps"),
    [
        (False, [], ["install"]),  # the trial costs nothing where there is nothing to try
        (True, [False], ["install", "trial"]),
        (True, [True, False], ["install", "trial", "rebuild", "trial"]),
        (True, [True, True], ["install", "trial", "rebuild", "trial"]),
    ],
)
def test_ggml_is_built_again_once_where_pip_had_a_broken_one(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    amx: bool,
    broken: list[bool],
    steps: list[str],
) -> None:
    done: list[str] = []
    answers = iter(broken)

    def trial(python: Path) -> bool:
        done.append("trial")
        return next(answers)

    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "has_amx", lambda: amx)
    monkeypatch.setattr(script, "make_venv", lambda venv, screen: Path(sys.executable))
    monkeypatch.setattr(script, "amx_is_broken", trial)
    monkeypatch.setattr(script, "install", lambda *arguments: done.append("install"))
    monkeypatch.setattr(script.Pip, "rebuild", lambda pip: done.append("rebuild"))
    monkeypatch.setattr(sys, "argv", ["install.py", "--venv", str(tmp_path)])
    script.main()
    assert done == steps
    assert ("still does not work" in capsys.readouterr().out) == (broken == [True, True])


def test_one_package_may_have_another_version_than_the_others_are_tested_with(
    script: ModuleType, tmp_path: Path
) -> None:
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = Path(script.constraints(tmp_path, "torch")).read_text(encoding="utf-8").splitlines()
    assert [line for line in pinned if line not in kept] == [p for p in pinned if p.startswith("torch==")]
    assert [line for line in pinned if line in kept] == kept


def test_what_pip_has_cached_is_not_taken_again(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python, seen = tmp_path / "python", tmp_path / "seen"
    python.write_text(f"#!/bin/sh\necho \"$CXXFLAGS $@\" >> '{seen}'\n")
    python.chmod(0o755)
    script.Pip(python, tmp_path, script.Screen(False), {**os.environ, "CXXFLAGS": "-g"}).rebuild()
    removed, installed = seen.read_text().splitlines()
    # By the name in the wheel's file: pip finds nothing in its cache under the other.
    assert removed.endswith(" -m pip --disable-pip-version-check cache remove llama_cpp_python")
    assert installed.startswith("-g -m pip --disable-pip-version-check install --verbose -c constraints.txt ")
    assert installed.endswith("--no-cache-dir --no-binary llama-cpp-python llama-cpp-python")
    assert (tmp_path / "rebuild.log").exists()


PROJECT = """\
[project]
dependencies = ["llama-cpp-python>=1", "numpy>=1"]
[project.optional-dependencies]
demo = ["model>=1"]
test = ["numba>=0.61", "ray>=2", "checker; python_version < '3.9'"]
"""
CHECKER = "checker; python_version < '3.9'"


def test_of_llama_cpp_only_what_is_used_is_compiled(script: ModuleType) -> None:
    (option,) = shlex.split(script.building({}, amx=False)["CMAKE_ARGS"])
    name, _, path = option.partition("=")
    assert name == "-DCMAKE_PROJECT_llama.cpp_INCLUDE"
    assert "LLAMA_BUILD_COMMON OFF" in Path(path).read_text()
    own = script.building({"CMAKE_ARGS": "-DGGML_LTO=ON"}, amx=False)["CMAKE_ARGS"]
    assert shlex.split(own) == [option, "-DGGML_LTO=ON"]


def test_wheels_are_taken_unless_the_sources_are_newer(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(script, "SOURCES", ("hetrun", "setup.py"))
    monkeypatch.setattr(script.platform, "machine", lambda: "x86_64")
    folder, module = tmp_path / "dist", tmp_path / "checkout" / "hetrun" / "one.py"
    folder.mkdir()
    module.parent.mkdir(parents=True)
    (tmp_path / "checkout" / "setup.py").touch()
    module.touch()
    ggml, hetrun = (folder / f"{name}-1-py3-none-any.whl" for name in ("hetrun_ggml", "hetrun"))
    hetrun.touch()
    assert script.find_wheels(folder) == []  # the other is missing
    ggml.touch()
    os.utime(hetrun, (2e9, 2e9))
    assert script.find_wheels(folder) == [str(ggml), str(hetrun)]
    for name, stale in (("one.pyc", False), ("one.so", False), ("two.toml", True)):
        (module.parent / name).touch()
        os.utime(module.parent / name, (3e9, 3e9))
        assert bool(script.find_wheels(folder)) is not stale
    assert script.find_wheels(tmp_path / "nowhere") == []


def test_wheels_are_installed_by_their_paths(script: ModuleType, shop: Callable[..., Shop]) -> None:
    """Whatever an index has under their names."""
    pip = shop(set())
    pip.asked.append("nothing before")
    script.install(pip, ["demo"], editable=False, wheels=["/dist/hetrun_ggml-1.whl", "/dist/hetrun-1.whl"])
    model = "install --no-deps model>=1"  # what its package asks for must be compiled
    assert pip.asked[1:] == [model, "install /dist/hetrun_ggml-1.whl /dist/hetrun-1.whl"]
    script.install(pip, ["test"], editable=False, wheels=["/dist/hetrun_ggml-1.whl", "/dist/hetrun-1.whl"])
    assert pip.asked[3:] == ["install /dist/hetrun_ggml-1.whl /dist/hetrun-1.whl[test]"]


class Shop:
    """A pip that has some packages, and writes down what it is asked for."""

    def __init__(self, folder: Path, script: ModuleType, gone: set[str], broken: str = "") -> None:
        self.folder, self.script, self.gone, self.broken = folder, script, gone, broken
        self.screen = script.Screen(False)
        self.asked: list[str] = []
        # What is asked of a real one.
        self.without_wheels = partial(script.Pip.without_wheels, self)

    def python(self) -> tuple[int, int]:
        return (3, 15)

    def has_wheels(self, requirements: list[str]) -> bool:
        self.asked.append(f"wheels {' '.join(requirements)}")
        return not self.gone & set(map(self.script.name_of, requirements))

    def install(self, *what: str) -> None:
        self.asked.append(f"install {' '.join(what)}")
        if self.broken or len(self.asked) == 1:
            log = self.folder / "install.log"
            log.write_text(self.broken or "ResolutionImpossible\n")
            raise self.script.PipFailed(log, [])


@pytest.fixture
def shop(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Shop]:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    return partial(Shop, tmp_path, script)


def test_what_this_python_cannot_have_is_left_out_and_the_rest_installed(
    script: ModuleType, shop: Callable[..., Shop], capsys: pytest.CaptureFixture[str]
) -> None:
    pip = shop({"numba", "ray"})
    script.install(pip, ["demo", "test"], editable=True)
    assert pip.asked[0] == "install -e .[demo,test]"
    # All at once at first: most failures have another cause.
    assert pip.asked[1:3] == ["wheels numpy>=1", f"wheels model>=1 numba>=0.61 ray>=2 {CHECKER}"]
    assert pip.asked[-1] == f"install -e . model>=1 {CHECKER}"
    assert capsys.readouterr().out == "Left out, as there is no wheel for Python 3.15: numba, ray.\n"
    noted = json.loads((pip.folder / missing_packages.NOTES).read_text())
    assert noted == {"python": [3, 15], "without": ["numba", "ray"]}
    assert script.NOTES == missing_packages.NOTES


def test_without_what_hetrun_needs_there_is_one_sentence(
    script: ModuleType, shop: Callable[..., Shop]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script.install(shop({"numpy", "numba"}), ["test"], editable=False)
    assert str(ended.value) == (
        "hetrun needs numpy>=1, and there is no wheel for Python 3.15: "
        "name an older Python, as in PYTHON=python3.13."
    )


@pytest.mark.parametrize(
    ("broken", "asked"),
    [
        # Every wheel is there: it was something else.
        ("", ["install .[test]", "wheels numpy>=1", f"wheels numba>=0.61 ray>=2 {CHECKER}"]),
        # It is known what.
        (NO_COMPILER, ["install .[test]"]),
    ],
)
def test_other_failures_stay_what_they_are(
    script: ModuleType, shop: Callable[..., Shop], broken: str, asked: list[str]
) -> None:
    pip = shop(set(), broken)
    with pytest.raises(script.PipFailed, match="C and a C" if broken else "Impossible"):
        script.install(pip, ["test"], editable=False)
    assert pip.asked == asked
    assert not (pip.folder / missing_packages.NOTES).exists()


def test_an_installation_that_lacks_nothing_corrects_the_note(
    script: ModuleType, shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = shop({"numba"})
    monkeypatch.setattr(pip, "install", lambda *what: pip.asked.append(" ".join(what)))
    (pip.folder / missing_packages.NOTES).write_text('{"python": [3, 15], "without": ["numba"]}')
    script.install(pip, [], editable=False)
    assert pip.asked == ["."]
    assert json.loads((pip.folder / missing_packages.NOTES).read_text())["without"] == []


SMALLEST = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "hetrun"
dynamic = ["version"]
dependencies = []
[project.optional-dependencies]
test = ["numba>=0.61", "model"]
"""
NEEDS = (
    "Provides-Extra: test",
    'Requires-Dist: numba>=0.61; extra == "test"',
    "Requires-Dist: model; extra == 'test'",
)
# Builds a wheel with nothing that is not in Python itself.
BACKEND = """\
import shutil
def build_wheel(folder, settings=None, metadata=None):
    return shutil.copy("shelf/hetrun-1-py3-none-any.whl", folder).rpartition("/")[2]
"""


def wheel(folder: Path, name: str, *metadata: str, tag: str = "py3-none-any") -> None:
    """A package with nothing in it."""
    with zipfile.ZipFile(folder / f"{name}-1-{tag}.whl", "w") as out:
        for file, lines in (
            ("WHEEL", ("Wheel-Version: 1.0", f"Tag: {tag}")),
            ("METADATA", ("Metadata-Version: 2.1", f"Name: {name}", "Version: 1", *metadata)),
            ("RECORD", ()),
        ):
            out.writestr(f"{name}-1.dist-info/{file}", "".join(f"{line}\n" for line in lines))


@pytest.mark.slow
def test_pip_itself(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a package that is pinned as in constraints.txt, and whose wheels are for an old Python."""
    shelf, site = tmp_path / "shelf", tmp_path / "site"
    shelf.mkdir()
    wheel(shelf, "numba", tag="cp36-cp36m-linux_x86_64")
    wheel(shelf, "model")
    wheel(shelf, "hetrun", *NEEDS)
    (tmp_path / "pyproject.toml").write_text(SMALLEST)
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "constraints.txt").write_text("numba==1\n")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_TARGET": str(site)}
    environ["PIP_FIND_LINKS"] = str(shelf)
    pip = script.Pip(Path(sys.executable), tmp_path, script.Screen(False), environ)
    script.install(pip, ["test"], editable=False)
    assert {path.name for path in site.glob("*.dist-info")} == {"hetrun-1.dist-info", "model-1.dist-info"}
    assert json.loads((tmp_path / missing_packages.NOTES).read_text())["without"] == ["numba"]
