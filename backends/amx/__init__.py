"""Products in bf16 (or int8) through torch and its oneDNN, which uses AMX tiles where the CPU has them.

One backend, three ways to hold a weight: `amx` as a packed bf16 copy, `amx-lean` as it is stored and
dequantised before each product, `amx-int8` as a packed int8 copy. None wins for a few tokens; for a prompt
all do. A fourth, `amx-ipex`, has IPEX for the products of few tokens: only where it is installed, and named.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from hetrun.backend import Available, Backend, Descriptor, Probe, Unavailable
from hetrun.backends.amx.sizes import Way
from hetrun.system.cpu_flags import cpu_flags

# What products of bf16 and int8 gain from, by the kernel's names for it.
INSTRUCTIONS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")
OLDEST = (2, 6)
INSTALL = "pip install 'torch>=2.6'"
# IPEX goes with one torch only. This is its last version, and the one that is tested.
IPEX = (2, 8)
INSTALL_IPEX = "pip install 'torch<2.9' 'intel-extension-for-pytorch<2.9' in an environment of its own"


def probe() -> Probe:
    """Whether torch is installed, and what the CPU has for it; torch itself stays unloaded."""
    if importlib.util.find_spec("torch") is None:
        return Unavailable(f"torch is not installed: {INSTALL}")
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Unavailable(f"torch was found, but was not installed as a package: {INSTALL}")
    if _numbers(found) < OLDEST:
        return Unavailable(f"torch {found} is older than {'.'.join(map(str, OLDEST))}: {INSTALL}")
    return Available(f"torch {found}: {_used()}")


def _used() -> str:
    """The instructions that products gain from, and whether AMX is among them."""
    some = ", ".join(instructions()) or "no vector instructions"
    return some if "amx" in some else f"no AMX in this CPU, oneDNN runs without it ({some})"


def probe_int8() -> Probe:
    """The same for products of whole numbers, which oneDNN has fast code for only with some instructions."""
    found = probe()
    if isinstance(found, Unavailable) or {"amx_int8", "avx512f", "avx_vnni"} & cpu_flags():
        return found
    return Available(f"{found.detail}; very slow: fast int8 products need AVX-512, VNNI or AMX")


def probe_ipex() -> Probe:
    """The same for IPEX, which with another torch would end the process."""
    found = probe()
    if isinstance(found, Unavailable):
        return found
    try:
        ipex = version("intel-extension-for-pytorch")
    except PackageNotFoundError:
        return Unavailable(f"IPEX is not installed: {INSTALL_IPEX}")
    torch = version("torch")
    if not _numbers(ipex) == _numbers(torch) == IPEX:
        return Unavailable(f"IPEX 2.8 and torch 2.8 are needed, not {ipex} and {torch}: {INSTALL_IPEX}")
    if "avx2" not in instructions():
        return Unavailable("IPEX needs a CPU with AVX2")
    return Available(f"IPEX {ipex}, {found.detail}")


def _numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version: 2.13.0+cpu is (2, 13)."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in text.split(".")[:2])


def instructions() -> tuple[str, ...]:
    """Which of the instructions the kernel says this CPU has."""
    return tuple(name for name in INSTRUCTIONS if name in cpu_flags())


def _creates(name: str, way: Way) -> Callable[[], Backend]:
    def create() -> Backend:
        from hetrun.backends.amx.backend import AmxBackend

        return AmxBackend(name, way)

    return create


descriptor = Descriptor(
    "amx",
    probe,
    _creates("amx", "packed"),
    "torch with oneDNN, and AMX if the CPU has it: prompts in bf16, from a packed copy of the weights",
    preference=60,
)
lean = Descriptor(
    "amx-lean",
    probe,
    _creates("amx-lean", "lean"),
    "as amx, without a second copy: weights are dequantised before each product",
    preference=55,
    way_of="amx",
)
int8 = Descriptor(
    "amx-int8",
    probe_int8,
    _creates("amx-int8", "int8"),
    "as amx, in int8: half the memory, less exact, faster if the CPU has VNNI or AMX",
    preference=58,
    way_of="amx",
    by_name=True,  # its results are a third further from the model's than llama.cpp's are
)
ipex = Descriptor(
    "amx-ipex",
    probe_ipex,
    _creates("amx-ipex", "ipex"),
    "as amx, with IPEX for up to about 60 tokens at once: faster there, twice the memory",
    preference=59,
    way_of="amx",
    by_name=True,
)
