"""One file with what a machine with a GPU is not expected to have: there is no network and no compiler there.

    mkdir hetrun-gpu && tar xzf FILE -C hetrun-gpu && hetrun-gpu/run check

ggml's libraries are llama-cpp-python's own build for a CPU that is named, not for the one that builds. Its
variants that are chosen when they are loaded (GGML_BACKEND_DL) have other file names than the one library
that the backend opens, so one level has to do.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gguf import GGUFWriter

from hetrun.config import dirs
from tests.cuda.models import TOKENIZER as TOKENIZER_FILE
from tests.cuda.needs import BUILT_FOR, PACK
from tests.cuda.peer import FOLDER as PEER, PROJECT
from tests.support.paths import ROOT
from tests.tools.make_model import add_tokenizer

MOST = 64 << 20  # what travels
SHIPPED = ("gguf", "llguidance", "tokenizers", "diskcache", "pytest", "pytest-asyncio")
LEVELS = {
    "v3": ("AVX", "AVX2", "FMA", "F16C", "BMI2"),
    "v4": (
        *("AVX", "AVX2", "FMA", "F16C", "BMI2"),
        *("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"),
    ),
}
# Of llama.cpp: what its measuring programs are built from.
BACKENDS = "ggml-cpu", "ggml-cuda"
NEEDED = (
    *("cmake/", "common/", "ggml/", "include/", "src/", "vendor/", "licenses/"),
    *("tools/llama-bench/", "tools/batched-bench/"),
)
TOKENIZER, TOKENS = "tokenizer.gguf", 49152
RUN = """#!/bin/sh
# python3 of the machine, with what travelled before what it has.
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/tree" || exit 2
export PYTHONPATH="$here/tree:$here/site" %s="$here" %s="$here/%s"
exec "${PYTHON:-python3}" -m tests.cuda "$@"
"""
LARGE = (
    "an NVIDIA driver, numpy, highspy, pytest, hypothesis, cuda-pathfinder, CuPy, cuBLAS, NVRTC with headers"
)


class PackError(Exception):
    """It cannot be packed; the message says what to do."""


def cmake(level: str) -> str:
    """Options of ggml's build, so that it has no more than this level."""
    options = ["GGML_NATIVE=OFF", "LLAVA_BUILD=OFF", *[f"GGML_{name}=ON" for name in LEVELS[level]]]
    return " ".join(f"-D{option}" for option in options)


def build_ggml(level: str, folder: Path) -> Path:
    """llama-cpp-python's wheel for the level; it takes a quarter of an hour, once."""
    target = folder / f"ggml-{level}"
    if not (found := list(target.glob("llama_cpp_python-*.whl"))):
        print(f"building llama-cpp-python for x86-64-{level}, once: {target}", file=sys.stderr)
        options = ("--no-deps", "--no-binary", "llama-cpp-python", "-w", target, _llama_cpp_python())
        pip("wheel", *options, level=level)
        found = list(target.glob("llama_cpp_python-*.whl"))
    return found[0]


def fetch(python: str, folder: Path) -> list[Path]:
    """The other wheels, for another Python than this one."""
    target = folder / f"wheels-{python}"
    target.mkdir(parents=True, exist_ok=True)
    if not list(target.glob("*.whl")):
        platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in range(17, 37)]
        platforms += ["--platform=manylinux2014_x86_64"]
        kinds = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
        pip("download", "--no-deps", *kinds, "-d", target, "-c", ROOT / "constraints.txt", *SHIPPED)
    return sorted(target.glob("*.whl"))


def peer(folder: Path) -> Path:
    """llama-cpp-python's sources, which have those of llama.cpp."""
    target = folder / "sources"
    if not (found := list(target.glob("llama_cpp_python-*.tar.gz"))):
        pip("download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", target, _llama_cpp_python())
        found = list(target.glob("llama_cpp_python-*.tar.gz"))
    return found[0]


def peer_files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """What llama.cpp's measuring programs are built from, and the project that builds them."""
    yield f"{PEER}/CMakeLists.txt", PROJECT.encode()
    with tarfile.open(archive) as packed:
        for item in packed:
            name = item.name.partition("/vendor/llama.cpp/")[2]
            if item.isfile() and is_for_peer(name) and (file := packed.extractfile(item)):
                yield f"{PEER}/llama.cpp/{name}", file.read()


def is_for_peer(name: str) -> bool:
    """Whether a file of llama.cpp's is needed for CPU, CUDA and the two programs."""
    folder, _, rest = name.removeprefix("ggml/src/").partition("/")
    if name.startswith("ggml/src/ggml-") and rest and folder not in BACKENDS:
        return False
    return name in ("CMakeLists.txt", "LICENSE", "AUTHORS") or name.startswith(NEEDED)


def pip(*arguments: str | Path, level: str | None = None) -> None:
    """Run it; PackError with the end of what it said."""
    env = {**os.environ} | ({"CMAKE_ARGS": cmake(level)} if level else {})
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PackError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def sources(root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """The working tree as git sees it, and our own C libraries, which it does not."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PackError(f"{root} is no checkout of git: {done.stderr.strip()}")
    for name in sorted(filter(None, done.stdout.split("\0"))):
        if (root / name).is_symlink() or (root / name).is_file():
            yield f"tree/{name}", root / name
    for folder in ("hetrun", "backends"):
        for path in sorted((root / folder).rglob("*.so")):
            if "build" not in path.parts:
                yield f"tree/{path.relative_to(root)}", path


def not_built(root: Path = ROOT) -> list[str]:
    """C files whose library is not beside them."""
    files = [path for folder in ("hetrun", "backends") for path in sorted((root / folder).rglob("*.c"))]
    return [path.name for path in files if not path.with_suffix(".so").exists()]


def write(
    out: Path,
    wheels: Sequence[Path],
    level: str,
    tokenizer: bytes,
    archive: Path | None = None,
    root: Path = ROOT,
    most: int = MOST,
) -> int:
    """The file, with llama.cpp from an `archive`; PackError names what is largest where that is too much."""
    parts: dict[str, int] = {}
    with out.open("wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=9) as pack:
        for part, files in _parts(wheels, level, tokenizer, archive, root):
            before = file.tell()
            for name, what in files:
                _add(pack, name, what)
            parts[part] = file.tell() - before
    size = out.stat().st_size
    if size > most:
        largest = sorted(parts.items(), key=lambda item: -item[1])[:5]
        out.unlink()
        told = ", ".join(f"{name} {n / 2**20:.1f} MiB" for name, n in largest)
        raise PackError(f"the pack has {size / 2**20:.1f} MiB, {most / 2**20:.0f} may travel: {told}")
    return size


def _parts(
    wheels: Sequence[Path], level: str, tokenizer: bytes, archive: Path | None, root: Path
) -> Iterator[tuple[str, Iterator[tuple[str, Path | bytes]]]]:
    yield "sources", iter(sources(root))
    yield "tokenizer", iter([(TOKENIZER, tokenizer)])
    if archive:
        yield "llama.cpp", peer_files(archive)
    for wheel in wheels:
        yield wheel.name, _unzipped(wheel)
    facts = [
        ("run", (RUN % (PACK, TOKENIZER_FILE, TOKENIZER)).encode()),
        (BUILT_FOR, level.encode()),
        *_entry_points(),
    ]
    yield "facts", iter(facts)


def _add(pack: tarfile.TarFile, name: str, what: Path | bytes) -> None:
    if isinstance(what, Path):
        pack.add(what, name, recursive=False)
        return
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(what), 0o755 if name == "run" else 0o644
    pack.addfile(info, io.BytesIO(what))


def _unzipped(wheel: Path) -> Iterator[tuple[str, Path | bytes]]:
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            if not item.is_dir():
                yield f"site/{item.filename}", archive.read(item)


def _project() -> dict[str, list[str]]:
    project: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def _llama_cpp_python() -> str:
    """The release that the project needs."""
    return next(d for d in _project()["dependencies"] if d.startswith("llama-cpp-python"))


def _entry_points() -> list[tuple[str, bytes]]:
    """What makes hetrun's backends known where it is not installed."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *[f"{name} = {value}" for name, value in points.items()]]
    folder = "site/hetrun-0.dist-info"
    metadata = b"Metadata-Version: 2.1\nName: hetrun\nVersion: 0\n"
    return [(f"{folder}/METADATA", metadata), (f"{folder}/entry_points.txt", "\n".join(lines).encode())]


def tokenizer_bytes(folder: Path) -> bytes:
    """A file with nothing but a vocabulary: models that are made there need one."""
    path = folder / TOKENIZER
    writer = GGUFWriter(path, "llama")
    add_tokenizer(writer, TOKENS, None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path.read_bytes()


def pack(out: Path, level: str, python: str, folder: Path) -> int:
    """Everything; returns its size."""
    if missing := not_built():
        raise PackError(
            f"{', '.join(missing)} are not compiled, and no one may be able to there: pip install -e ."
        )
    folder.mkdir(parents=True, exist_ok=True)
    wheels = [build_ggml(level, folder), *fetch(python, folder)]
    return write(out, wheels, level, tokenizer_bytes(folder), peer(folder))


def main(out: Path | None, level: str, python: str, keep: Path | None) -> int:
    """An exit status."""
    if out is None:
        print("pack: -o FILE says where it goes", file=sys.stderr)
        return 2
    try:
        size = pack(out, level, python, keep or dirs().cache / "gpu-pack")
    except PackError as e:
        print(f"pack: {e}", file=sys.stderr)
        return 2
    print(f"{out}: {size / 2**20:.1f} MiB; needed there and not in it: {LARGE}", file=sys.stderr)
    return 0
