"""ggml's C interface through ctypes, from the libraries that hetrun-ggml brings or llama-cpp-python compiles.

The latter is never imported: its modules take a third of a second. Functions that only build a
graph are called with the interpreter lock held (PyDLL), because giving it away costs more than they do;
what computes or copies gives it away (CDLL).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hetrun.errors import BackendUnavailable
from hetrun.system.cpu_flags import cpu_flags
from hetrun.system.native_library import (
    MissingFunction,
    Prototypes,
    address_of,
    declare,
    load_library,
    load_locked,
)

TESTED = ("0.25.",)  # versions of ggml whose structures are the ones below
INSTALL = "pip install 'llama-cpp-python>=0.3.36,<0.3.37' (it needs a C++ compiler and about three minutes)"
BASE_LIBRARY, CPU_LIBRARY = "libggml-base.so", "libggml-cpu.so"
SPINNING, SPINS = "GOMP_SPINCOUNT", "10000"  # half a millisecond or less

F32, F16, I32, I64 = 0, 1, 26, 27
TYPES = 43  # that these versions have; to be asked about another number ends the process
ROPE_INTERLEAVED, ROPE_HALVES = 0, 2
SUCCESS, ABORTED = 0, 1


class GgmlTensor(Structure):
    """struct ggml_tensor."""

    _fields_ = (
        ("type", c_int),
        ("buffer", c_void_p),
        ("ne", c_int64 * 4),
        ("nb", c_size_t * 4),
        ("op", c_int),
        ("op_params", c_int32 * 16),
        ("flags", c_int32),
        ("src", c_void_p * 10),
        ("view_src", c_void_p),
        ("view_offs", c_size_t),
        ("data", c_void_p),
        ("name", c_char * 64),
        ("extra", c_void_p),
        ("padding", c_char * 8),
    )


class InitParams(Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class Traits(Structure):
    """struct ggml_type_traits."""

    _fields_ = (
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", c_void_p),
        ("from_float_ref", c_void_p),
    )


class CpuTraits(Structure):
    """struct ggml_type_traits_cpu."""

    _fields_ = (("from_float", c_void_p), ("vec_dot", c_void_p), ("vec_dot_type", c_int), ("nrows", c_int64))


# The names of tensors that nodes of our own make, which ggml all calls CUSTOM: products, those that bring
# pages of mapped weights, and those around products of experts of which some are left out.
PRODUCT, PAGES, SORTED = OWN = "PRODUCT", "PAGES", "SORTED"
OBJECT_BYTES = 32  # struct ggml_object, in front of each tensor of a context

T = c_void_p  # a struct ggml_tensor *

_BASE = {
    "ggml_version": (c_char_p,),
    "ggml_log_set": (None, c_void_p, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_get_type_traits": (POINTER(Traits), c_int),
    "ggml_quantize_requires_imatrix": (c_bool, c_int),
    "ggml_graph_overhead_custom": (c_size_t, c_size_t, c_bool),
    "ggml_init": (T, InitParams),
    "ggml_reset": (None, T),
    "ggml_free": (None, T),
    "ggml_new_graph_custom": (T, T, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, T, T),
    "ggml_graph_n_nodes": (c_int, T),
    "ggml_graph_node": (T, T, c_int),
    "ggml_op_name": (c_char_p, c_int),
    "ggml_new_tensor_1d": (T, T, c_int, c_int64),
    "ggml_new_tensor_2d": (T, T, c_int, c_int64, c_int64),
    "ggml_new_tensor_3d": (T, T, c_int, c_int64, c_int64, c_int64),
    "ggml_view_1d": (T, T, T, c_int64, c_size_t),
    "ggml_view_2d": (T, T, T, c_int64, c_int64, c_size_t, c_size_t),
    "ggml_view_3d": (T, T, T, c_int64, c_int64, c_int64, c_size_t, c_size_t, c_size_t),
    "ggml_view_4d": (T, T, T, *[c_int64] * 4, *[c_size_t] * 4),
    "ggml_reshape_2d": (T, T, T, c_int64, c_int64),
    "ggml_reshape_3d": (T, T, T, c_int64, c_int64, c_int64),
    "ggml_reshape_4d": (T, T, T, *[c_int64] * 4),
    "ggml_permute": (T, T, T, c_int, c_int, c_int, c_int),
    "ggml_set_input": (None, T),
    "ggml_set_output": (None, T),
    "ggml_nbytes": (c_size_t, T),
    "ggml_get_rows": (T, T, T, T),
    "ggml_set_rows": (T, T, T, T, T),
    "ggml_rms_norm": (T, T, T, c_float),
    "ggml_norm": (T, T, T, c_float),
    "ggml_mul": (T, T, T, T),
    "ggml_add": (T, T, T, T),
    "ggml_concat": (T, T, T, T, c_int),
    "ggml_cpy": (T, T, T, T),
    "ggml_cont": (T, T, T),
    "ggml_pad": (T, T, T, c_int, c_int, c_int, c_int),
    "ggml_mul_mat": (T, T, T, T),
    "ggml_mul_mat_id": (T, T, T, T, T),
    "ggml_out_prod": (T, T, T, T),
    "ggml_add_id": (T, T, T, T, T),
    "ggml_argsort_top_k": (T, T, T, c_int),
    "ggml_sum_rows": (T, T, T),
    "ggml_clamp": (T, T, T, c_float, c_float),
    "ggml_fill": (T, T, T, c_float),
    "ggml_div": (T, T, T, T),
    "ggml_soft_max": (T, T, T),
    "ggml_rope_ext": (T, T, T, T, T, c_int, c_int, c_int, *[c_float] * 6),
    "ggml_swiglu": (T, T, T),
    "ggml_swiglu_split": (T, T, T, T),
    "ggml_swiglu_oai": (T, T, T, T, c_float, c_float),
    "ggml_geglu": (T, T, T),
    "ggml_geglu_split": (T, T, T, T),
    "ggml_geglu_erf": (T, T, T),
    "ggml_geglu_erf_split": (T, T, T, T),
    "ggml_gelu": (T, T, T),
    "ggml_gelu_erf": (T, T, T),
    "ggml_relu": (T, T, T),
    "ggml_sigmoid": (T, T, T),
    "ggml_tanh": (T, T, T),
    "ggml_scale": (T, T, T, c_float),
    "ggml_custom_4d": (T, T, c_int, *[c_int64] * 4, POINTER(T), c_int, T, c_int, T),
    "ggml_custom_inplace": (T, T, T, POINTER(T), c_int, T, c_int, T),
    "ggml_flash_attn_ext": (T, T, T, T, T, T, c_float, c_float, c_float),
    "ggml_flash_attn_ext_add_sinks": (None, T, T),
    "ggml_gallocr_new": (T, T),
    "ggml_gallocr_free": (None, T),
    "ggml_gallocr_alloc_graph": (c_bool, T, T),
    "ggml_gallocr_get_buffer_size": (c_size_t, T, c_int),
    "ggml_backend_buft_alloc_buffer": (T, T, c_size_t),
    "ggml_backend_buft_name": (c_char_p, T),
    "ggml_backend_buft_get_alloc_size": (c_size_t, T, T),
    "ggml_backend_cpu_buffer_type": (T,),
    "ggml_backend_cpu_buffer_from_ptr": (T, T, c_size_t),
    "ggml_backend_buffer_get_base": (T, T),
    "ggml_backend_buffer_free": (None, T),
    "ggml_backend_buffer_set_usage": (None, T, c_int),
    "ggml_backend_tensor_alloc": (c_int, T, T, T),
    "ggml_backend_dev_supports_op": (c_bool, T, T),
    "ggml_backend_reg_dev_get": (T, T, c_size_t),
    "ggml_backend_reg_get_proc_address": (T, T, c_char_p),
    "ggml_backend_free": (None, T),
}
_CPU = {
    "ggml_backend_cpu_init": (T,),
    "ggml_backend_cpu_reg": (T,),
    "ggml_get_type_traits_cpu": (POINTER(CpuTraits), c_int),
    "ggml_backend_cpu_set_n_threads": (None, T, c_int),
    "ggml_backend_cpu_set_abort_callback": (None, T, c_void_p, c_void_p),
}
_UNLOCKED = {
    "ggml_backend_graph_compute": (c_int, T, T),
    "ggml_backend_tensor_set": (None, T, T, c_size_t, c_size_t),
    "ggml_quantize_chunk": (c_size_t, c_int, T, T, c_int64, c_int64, c_int64, T),
}


class GgmlFiles(NamedTuple):
    """Where ggml's libraries lie, and which of them computes on this CPU."""

    folder: Path
    cpu: Path


class GgmlLibrary:
    """ggml's functions by name, plus a few addresses."""

    def __init__(self, files: GgmlFiles) -> None:
        path = files.folder / BASE_LIBRARY
        base, self.cpu = load_locked(path), load_locked(files.cpu)
        try:
            vars(self).update(declare(base, _BASE) | declare(self.cpu, _CPU))
            vars(self).update(declare(load_library(path), _UNLOCKED))
        except MissingFunction as e:
            raise BackendUnavailable(
                f"{e}: another version of ggml than the tested ones; {INSTALL}"
            ) from None
        self.folder, self.cpu_path = files
        self.version = self.ggml_version().decode()
        _check_layout(self)
        silence(self)
        # How many 16-bit floats ggml's loops take at once; what is left over they take one by one. A CPU with
        # AMX computes in 16 bits, and more fit into a register.
        self.f16_step = 128 if "amx_int8" in cpu_features(self) else 32

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Only reached for names that were not declared; it also tells mypy that the others exist."""
        raise AttributeError(f"{name} is not declared in {__name__}")


def load_beside(name: str, prototypes: Prototypes) -> ctypes.CDLL:
    """Another library of ggml's folder, with the functions that are called."""
    path = find_files().folder / name
    try:
        return load_library(path, prototypes)
    except OSError as e:
        raise BackendUnavailable(f"{path} does not load ({e}): reinstall with {INSTALL}") from e


def _check_layout(lib: GgmlLibrary) -> None:
    """The structures are read and patched in place, so their layout must be the one above."""
    expected = OBJECT_BYTES + ctypes.sizeof(GgmlTensor)
    found = lib.ggml_tensor_overhead()
    if not lib.version.startswith(TESTED) or found != expected:
        raise BackendUnavailable(
            f"ggml {lib.version} (a tensor of {found} bytes) is not one of the tested versions "
            f"({', '.join(v + 'x' for v in TESTED)}; {expected} bytes); {INSTALL}"
        )


def silence(lib: GgmlLibrary) -> None:
    """Keep ggml's own log off stderr, by a C function that does nothing: none enters the interpreter."""
    lib.ggml_log_set(libc_address("abs"), None)


def libc_address(name: str) -> int:
    """The address of a function of the C library."""
    return address_of(getattr(load_library(None), name))


def cpu_features(lib: GgmlLibrary) -> list[str]:
    """The instructions that ggml was built with and this CPU has."""
    names = (
        "amx_int8",
        "avx512_bf16",
        "avx512_vnni",
        "avx512",
        "avx2",
        "sve",
        "matmul_int8",
        "dotprod",
        "neon",
    )
    return [name for name in names if getattr(lib.cpu, f"ggml_cpu_has_{name}")()] or [
        "no vector instructions"
    ]


def extra_buffer_types(lib: GgmlLibrary) -> list[int]:
    """ggml's other buffer types of the CPU, best first: AMX tiles where the CPU has them, repacked rows."""
    reg = lib.ggml_backend_cpu_reg()
    address = lib.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return []
    found = ctypes.PYFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(lib.ggml_backend_reg_dev_get(reg, 0))
    types: list[int] = []
    while found and found[len(types)]:
        types.append(found[len(types)])
    return types


def find_files() -> GgmlFiles:
    """The libraries of hetrun-ggml where it is installed, otherwise those that llama-cpp-python compiled."""
    if importlib.util.find_spec("hetrun_ggml"):
        package = importlib.import_module("hetrun_ggml")
        files = GgmlFiles(package.FOLDER, package.cpu_library(cpu_flags()))
        again = "pip install --force-reinstall hetrun-ggml"
    else:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise BackendUnavailable(f"llama-cpp-python is not installed: {INSTALL}")
        folder = Path(spec.origin).parent / "lib"
        files, again = GgmlFiles(folder, folder / CPU_LIBRARY), f"reinstall with {INSTALL}"
    if not files.cpu.exists():
        raise BackendUnavailable(f"{files.folder} has no {files.cpu.name}: {again}")
    return files


@cache
def library() -> GgmlLibrary:
    """ggml, loaded once."""
    # When ggml ends the process it would first start a debugger to print stacks, for seconds.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        with _waiting_briefly():
            return GgmlLibrary(find_files())
    except OSError as e:
        raise BackendUnavailable(f"ggml's libraries do not load ({e}): reinstall with {INSTALL}") from e


@contextmanager
def _waiting_briefly() -> Iterator[None]:
    """Threads that wait for each other go to sleep soon, where GNU's OpenMP is loaded in here.

    By its default they spin for 300000 rounds, some milliseconds. Where another program has taken the core
    of one of them, the others then keep it from running on theirs, at each of hundreds of barriers. It reads
    this once; processes that we start are to have what their user gave them.
    """
    if SPINNING in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ[SPINNING] = SPINS
    try:
        yield
    finally:
        del os.environ[SPINNING]


# Where fields of struct ggml_tensor lie, in words of 8 bytes: graphs are patched through numpy.
NE = [GgmlTensor.ne.offset // 8 + i for i in range(4)]
NB = [GgmlTensor.nb.offset // 8 + i for i in range(4)]
DATA = GgmlTensor.data.offset // 8


def tensor_at(pointer: int) -> GgmlTensor:
    """The structure behind a pointer."""
    return ctypes.cast(pointer, POINTER(GgmlTensor)).contents


def op_name(lib: GgmlLibrary, node: GgmlTensor) -> str:
    """What a node does, in ggml's words or ours."""
    name: str = lib.ggml_op_name(node.op).decode()
    own: str = node.name.decode(errors="replace")
    return own if name == "CUSTOM" and own in OWN else name
