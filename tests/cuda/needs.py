"""What a machine must have, looked for one by one: a sentence for each thing that is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hetrun.backend import Unavailable, registry
from hetrun.system.memory_info import available_memory

PACKAGES = ("numpy", "cupy", "llama_cpp", "gguf", "highspy", "pluggy", "pytest", "hypothesis")
OLDEST = (3, 11)
PACK = "TESTS_PACK"  # where a pack was unpacked that this runs from
BUILT_FOR = "site/cpu.txt"  # in it: what ggml's libraries were built for
CPU = Path("/proc/cpuinfo")
FLAGS = {
    "v3": ("avx2", "fma", "f16c", "bmi2"),
    "v4": ("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512vbmi"),
}


@dataclass(frozen=True, slots=True)
class Need:
    """Something that was looked for; `missing` says what to do, and is empty where it is there."""

    what: str
    found: str
    missing: str = ""


def needs(models: Path) -> Iterator[Need]:
    """All of them; `models` is the folder where models will be made."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Need("python", version, "" if sys.version_info >= OLDEST else "Python 3.11 or newer is needed")
    for name in PACKAGES:
        there = importlib.util.find_spec(name) is not None
        missing = "" if there else f"{name} is not installed: carry it (`pack`), or install hetrun[cuda,test]"
        yield Need(name, "there" if there else "none", missing)
    if PACK in os.environ:
        yield cpu((Path(os.environ[PACK]) / BUILT_FOR).read_text())
    for name in ("cuda", "llamacpp"):
        yield _backend(name)
    yield _tried("kernels", _compiled)
    yield _tried("cuBLAS", _cublas)
    yield Need("RAM", f"{available_memory() / 2**30:.0f} GiB are free")
    free = shutil.disk_usage(models).free
    yield Need(f"room in {models.name or models}", f"{free / 2**30:.0f} GiB are free")
    tool = shutil.which("compute-sanitizer")
    yield Need("compute-sanitizer", tool or "none: races and wild writes are not looked for")


def _backend(name: str) -> Need:
    known = registry.backends()
    if name not in known:
        return Need(name, "none", f"the backend {name} is not known: install hetrun, or carry it (`pack`)")
    found = known[name].probe()
    if isinstance(found, Unavailable):
        return Need(name, "none", found.reason)
    return Need(name, found.detail)


def cpu(level: str, info: Path = CPU) -> Need:
    """Whether it has all instructions that ggml's libraries in the pack use."""
    flags = set(info.read_text().split()) if info.exists() else set()
    lacking = ", ".join(flag for flag in FLAGS[level] if flag not in flags)
    missing = f"this CPU has no {lacking}, which the pack's ggml uses: pack again with --cpu v3"
    return Need("CPU", f"good for {level}", missing if lacking else "")


def _cublas() -> str:
    from hetrun.backends.cuda.nvrtc import installed

    found = installed("cublas", "cuBLAS is not installed: pip install nvidia-cublas")
    return Path(found._name).name


def _compiled() -> str:
    """NVRTC with its headers: of what it compiles, these two include most."""
    from hetrun.backends.cuda.nvrtc import compiler
    from hetrun.backends.cuda.programs import FOLDER, Source

    made, size = compiler(), 0
    for source in (
        Source("attention_tiles", (("KV", "F16"), ("HEAD", "128"))),
        Source("tiles", (("QUANT", "Q4_K"),)),
    ):
        options = ["--gpu-architecture=sm_90", *source.options]
        size += len(made.compile(source.name, source.path.read_text(), FOLDER, options)[0])
    return f"NVRTC {made.version[0]}.{made.version[1]}, {size:,} bytes of two programs"


def _tried(what: str, look: Callable[[], str]) -> Need:
    try:
        return Need(what, look())
    except Exception as e:  # whatever it is, it is what is missing
        return Need(what, "none", str(e) or type(e).__name__)
