"""ggml, libllama and libmtmd as shared libraries, ready to be loaded: what hetrun computes with on CPUs.

ggml's code for the CPU is here once for each level of instructions; `cpu_library` names the one for a CPU.
"""

from collections.abc import Collection
from pathlib import Path

__version__ = "0.3.36"  # of llama-cpp-python, whose sources these are

FOLDER = Path(__file__).parent / "lib"

# The flags that each level needs, as Linux writes them: those in force, not all that the CPU was made with.
_AVX2 = frozenset(("sse4_2", "avx", "f16c", "fma", "avx2", "bmi2"))
_AVX512 = _AVX2 | {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"}
_ZEN4 = _AVX512 | {"avx512vbmi", "avx512_vnni", "avx512_bf16"}

# The best first.
LEVELS = {
    "sapphirerapids": _ZEN4 | {"amx_tile", "amx_int8"},
    "zen4": _ZEN4,
    "icelake": _AVX512 | {"avx512vbmi", "avx512_vnni"},
    "cascadelake": _AVX512 | {"avx512_vnni"},
    "skylakex": _AVX512,
    "alderlake": _AVX2 | {"avx_vnni"},
    "haswell": _AVX2,
    "sandybridge": frozenset(("sse4_2", "avx")),
    "sse42": frozenset(("sse4_2",)),
    "x64": frozenset[str](),
}


def levels(flags: Collection[str]) -> list[str]:
    """The levels that a CPU with these flags runs, the best first."""
    here = (name for name, needed in LEVELS.items() if needed.issubset(flags))
    return [name for name in here if _path(name).exists()]


def cpu_library(flags: Collection[str]) -> Path:
    """ggml's library for a CPU with these flags, as /proc/cpuinfo names them."""
    return _path(next(iter(levels(flags)), "x64"))


def _path(level: str) -> Path:
    return FOLDER / f"libggml-cpu-{level}.so"
