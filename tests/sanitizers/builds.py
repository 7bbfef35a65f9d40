"""The C libraries compiled with a sanitizer, each with the options that setup.py gives it."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

FOLDERS = ("backends", "models", "tui", "hetrun")  # that setup.py looks for C files in
KEPT = ROOT / "build" / "sanitizers"  # `make clean` removes it
ADDRESS, THREAD = "address,undefined", "thread"
RUNTIMES = {ADDRESS: "libasan.so", THREAD: "libtsan.so"}
# Sets of instructions, and what a CPU has to say for them; the best last. Those that a build may not use are
# denied where the compiler asks for them.
LEVELS = {"portable": (), "AVX2": ("avx2", "fma", "f16c"), "AVX-VNNI": ("avx_vnni",)} | {
    "AVX-512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "AVX-512 VNNI": ("avx512f", "avx512_vnni"),
    "AMX": ("amx_tile", "amx_int8"),
}
DENIED = {
    "portable": "-D__builtin_cpu_supports(x)=0",
    "AVX2": '-D__builtin_cpu_supports(x)=(__builtin_strncmp(x,"avx512",6)!=0&&__builtin_cpu_supports(x))',
}


@dataclass(frozen=True, slots=True)
class Build:
    """How libraries are compiled: `most` is the best set of instructions that they take, None for all."""

    sanitizer: str = ADDRESS
    optimise: str = "-O1"
    most: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """What the compiler gets beside what setup.py says."""
        found: tuple[str, ...] = (
            self.optimise,
            "-g1",
            "-fno-omit-frame-pointer",
            f"-fsanitize={self.sanitizer}",
        )
        if "undefined" in self.sanitizer:
            found += ("-fno-sanitize-recover=undefined",)
        return (*found, *([DENIED[self.most]] if self.most in DENIED else []))


def missing(sanitizer: str = ADDRESS) -> str:
    """Why nothing can be compiled with a sanitizer here; empty where it can."""
    if not sys.platform.startswith("linux"):
        return "sanitizers are tried on Linux only"
    if shutil.which("gcc") is None:
        return "there is no gcc"
    if not Path(runtime(sanitizer)).is_absolute():
        return f"gcc has no {RUNTIMES[sanitizer]} here"
    return ""


@cache
def runtime(sanitizer: str) -> str:
    """The library that a process must load first; a bare name where gcc has none."""
    command = ["gcc", f"-print-file-name={RUNTIMES[sanitizer]}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@cache
def sources() -> tuple[Path, ...]:
    """The C files that setup.py makes libraries of, in the checkout."""
    found = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.c")}
    return tuple(sorted(path for path in found if path.resolve() == path))


@cache
def own_flags() -> dict[str, list[str]]:
    """What setup.py compiles some files with, by their names."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLAGS":
            found: dict[str, list[str]] = ast.literal_eval(node.value)
            return found
    raise RuntimeError("setup.py has no FLAGS any more: tests/sanitizers/builds.py has to follow it")


def compile_library(source: Path, build: Build) -> Path:
    """The library of a C file; one that was made of the same texts and options before is used again."""
    command = ["gcc", "-shared", "-fPIC", "-w", *build.options, *own_flags().get(source.name, [])]
    return _made(command, [source], ".so")


def compile_program(source: Path, others: Sequence[Path], build: Build) -> Path:
    """A program of one C file, which loads the libraries of these other ones."""
    linked = [str(compile_library(path, build)) for path in others]
    include = [f"-I{folder}" for folder in sorted({str(path.parent) for path in others})]
    return _made(["gcc", "-Wall", "-Wextra", *build.options, *include], [source], "", linked)


def compile_all(build: Build, names: Iterable[str] = (), jobs: int = 1) -> dict[Path, Path]:
    """Libraries by their C files: all, or those whose files have these names."""
    wanted = [path for path in sources() if not names or path.name in names]
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(wanted, pool.map(lambda path: compile_library(path, build), wanted), strict=True))


def _made(command: list[str], files: Sequence[Path], suffix: str, linked: Sequence[str] = ()) -> Path:
    version = subprocess.run(["gcc", "--version"], capture_output=True, check=True).stdout
    headers = sorted(
        header
        for folder in {*(path.parent for path in files), ROOT / "hetrun" / "prefetch"}
        for header in folder.glob("*.h")
    )
    parts = [version, repr((command, linked)).encode(), *(path.read_bytes() for path in (*files, *headers))]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    out = KEPT / f"{files[0].stem}-{digest}{suffix}"
    if out.exists():
        return out
    KEPT.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f"{out.name}.{os.getpid()}")
    include = f"-I{ROOT / 'hetrun' / 'prefetch'}"
    command = [*command, include, *map(str, files), *linked, "-o", str(beside), "-lm", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{files[0].name} was not compiled: {done.stderr[-2000:]}")
    beside.replace(out)
    return out


def cpu() -> tuple[str, frozenset[str]]:
    """The CPU's name, and what it says that it can do."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = [line.partition(":") for line in lines]
    said = {name.strip(): value.strip() for name, _, value in reversed(pairs)}  # the first CPU's
    return said.get("model name", platform.machine()), frozenset(said.get("flags", "").split())


def levels() -> tuple[list[str], list[str]]:
    """The sets of instructions that this CPU has, and those that it does not have."""
    _, flags = cpu()
    here = [name for name, wanted in LEVELS.items() if flags.issuperset(wanted)]
    return here, [name for name in LEVELS if name not in here]
