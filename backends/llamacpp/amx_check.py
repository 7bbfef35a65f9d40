"""Whether ggml's AMX code may be used: gcc compiles it to something that crashes, and only a trial tells.

gcc's _tile_loadconfig says that it reads 8 bytes, so the stores to the other 56 of the tile configuration go
as dead ones (https://github.com/ggml-org/llama.cpp/issues/20824). What is loaded then is whatever lay on the
stack: the process ends by SIGSEGV or SIGILL, or computes nonsense. So a child computes two small products.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.amx_tiles import Tiles, tiles
from hetrun.backends.llamacpp.ggml_api import GgmlLibrary
from hetrun.config import dirs
from hetrun.errors import OptionError
from hetrun.graph.quant import by_name
from hetrun.system import subprocesses
from hetrun.system.files import replace_file
from hetrun.system.native_library import load_library

log = logging.getLogger(__name__)

# Neither this CPU and library have it, or what the child found: nothing for certain is "untried".
Verdict = Literal["absent", "works", "broken", "untried"]

NAME = "AMX"  # of ggml's buffer type
FLAGS = "-fno-tree-dse -fno-dse"
REPAIR = (
    f"CXXFLAGS='{FLAGS}' pip install --force-reinstall --no-cache-dir --no-deps "
    "'llama-cpp-python>=0.3.36,<0.3.37'"
)
WRONG = 5  # the child's exit code where the products are not right
CRASHES = {-signal.SIGSEGV, -signal.SIGILL, -signal.SIGBUS, -signal.SIGFPE}
PATIENCE_S = 60.0
THREADS = 2  # each configures tiles of its own, from a stack of its own
TOKENS = (1, 64)  # one row is multiplied without tiles, many with them
ROWS, COLS = 64, 256
# Where a row is a single block, ggml's AMX code for many tokens adds to memory that was never written.
LEAST_COLS = 64
PR_SET_DUMPABLE = 4


def usable() -> bool:
    """Whether nothing of ggml's repacking needs to be left alone here."""
    return verdict() == "absent" or keeper() is not None


def keeper() -> Tiles | None:
    """What must restore the tiles before each graph; nothing where ggml uses none."""
    return tiles(ggml_api.library()) if verdict() == "works" else None


@cache
def verdict() -> Verdict:
    """What is known of this library's AMX, from an earlier trial or from one now."""
    lib = ggml_api.library()
    if buffer_type(lib) is None:
        return "absent"
    mark = _mark(lib)
    if known := _read(mark):
        return known
    found = _judge(_ending())
    log.info("ggml's AMX code in %s was tried: %s", lib.folder, found)
    _write(mark, found)
    return found


def remark() -> str:
    """What `hetrun devices` adds to what ggml is."""
    match verdict():
        case "broken":
            return f"; its AMX code was miscompiled: reinstall with {REPAIR}"
        case "untried":
            return "; its AMX code is not used, because trying it in a process of its own gave no result"
        case _:
            return ""


def buffer_type(lib: GgmlLibrary) -> int | None:
    """ggml's AMX memory; there is none unless ggml was built with it and the kernel grants it to us."""
    found = ggml_api.extra_buffer_types(lib)
    return next((t for t in found if lib.ggml_backend_buft_name(t) == NAME.encode()), None)


def _ending() -> int | None:
    """The exit code of a child that tries it; None where there was no child, or no end of it."""
    import subprocess  # on use: mostly the answer is remembered

    try:
        command = subprocesses.python("from hetrun.backends.llamacpp.amx_check import run; run()")
        return subprocesses.run(command, PATIENCE_S, out=subprocess.DEVNULL, err=subprocess.DEVNULL)[0]
    except OSError as e:
        log.debug("ggml's AMX code could not be tried: %s", e)
        return None


def _judge(ending: int | None) -> Verdict:
    """Only what speaks of the code itself is a judgement: a child may also be killed, or lack memory."""
    if ending == 0:
        return "works"
    return "broken" if ending == WRONG or ending in CRASHES else "untried"


def _mark(lib: GgmlLibrary) -> Path | None:
    """The file that remembers what was found out about just this library."""
    path = lib.cpu_path.resolve()
    try:
        status = path.stat()
        known = repr((str(path), status.st_size, status.st_mtime_ns, lib.version))
        return dirs().cache / "amx" / hashlib.sha256(known.encode()).hexdigest()
    except (OSError, OptionError) as e:
        log.debug("the result for %s will not be remembered: %s", path, e)
        return None


def _read(mark: Path | None) -> Verdict | None:
    try:
        said = mark.read_text("ascii") if mark else ""
    except (OSError, ValueError):
        return None
    return cast(Verdict, said) if said in get_args(Verdict) else None


def _write(mark: Path | None, found: Verdict) -> None:
    if mark is None or found == "untried":
        return
    try:
        replace_file(mark, found.encode())
    except OSError as e:
        log.debug("ggml's AMX code will be tried again the next time: %s", e)


def run() -> None:
    """The child: exit code 0 if the products are right."""
    # A crash is expected here: it is not reported, and leaves no core file.
    load_library(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    lib = ggml_api.library()
    amx = buffer_type(lib)
    assert amx is not None, "the parent saw it"
    sys.exit(0 if all(is_right(lib, amx, n) for n in TOKENS) else WRONG)


def is_right(lib: GgmlLibrary, buffer_type: int, tokens: int) -> bool:
    """Whether a product of Q8_0 weights in such memory is what numpy says.

    Every number is a small integer and the largest of each block is 127, so that rounding loses nothing.
    """
    random = np.random.default_rng(tokens)
    w = random.integers(-127, 128, (ROWS, COLS)).astype(np.float32)
    x = random.integers(-127, 128, (tokens, COLS)).astype(np.float32)
    w[:, ::32] = x[:, ::32] = 127
    product, exact = _product(lib, buffer_type, w, x), x @ w.T
    return product is not None and bool(np.abs(product - exact).max() <= 1e-3 * np.abs(exact).max())


def _product(
    lib: GgmlLibrary, buffer_type: int, w: NDArray[np.float32], x: NDArray[np.float32]
) -> NDArray[np.float32] | None:
    """x times w; what is allocated goes when the child does."""
    quant = by_name("Q8_0")
    raw = quant.quantise(w)
    size = 8 * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead_custom(8, False)
    context = lib.ggml_init(ggml_api.InitParams(size, None, True))
    weight = lib.ggml_new_tensor_2d(context, quant.ggml_id, COLS, ROWS)
    given = lib.ggml_new_tensor_2d(context, ggml_api.F32, COLS, len(x))
    result = lib.ggml_mul_mat(context, weight, given)
    for tensor, memory in (
        (weight, buffer_type),
        *((t, lib.ggml_backend_cpu_buffer_type()) for t in (given, result)),
    ):
        buffer = lib.ggml_backend_buft_alloc_buffer(
            memory, lib.ggml_backend_buft_get_alloc_size(memory, tensor)
        )
        if not buffer:
            raise MemoryError
        lib.ggml_backend_tensor_alloc(buffer, tensor, lib.ggml_backend_buffer_get_base(buffer))
    lib.ggml_backend_tensor_set(weight, raw.ctypes.data, 0, raw.nbytes)
    lib.ggml_backend_tensor_set(given, x.ctypes.data, 0, x.nbytes)
    graph = lib.ggml_new_graph_custom(context, 8, False)
    lib.ggml_build_forward_expand(graph, result)
    backend = lib.ggml_backend_cpu_init()
    lib.ggml_backend_cpu_set_n_threads(backend, THREADS)
    if lib.ggml_backend_graph_compute(backend, graph) != ggml_api.SUCCESS:
        return None
    out = np.empty((len(x), ROWS), np.float32)
    ctypes.memmove(out.ctypes.data, ggml_api.tensor_at(result).data, out.nbytes)
    return out
