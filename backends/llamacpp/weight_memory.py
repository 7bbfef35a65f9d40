"""Weights in ggml's memory: packed for our own products, repacked where only ggml has a faster layout for the
type, else plain."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from ctypes import c_int, c_size_t, c_void_p
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import FLOAT_BYTES, ReadInto, WeightUse
from hetrun.backends.llamacpp import amx_check, ggml_api
from hetrun.backends.llamacpp.ggml_api import GgmlLibrary
from hetrun.backends.llamacpp.kernels.matmul import ROWS, MatmulLibrary
from hetrun.backends.llamacpp.mixture.cached_experts import CACHED, CachedExperts
from hetrun.backends.llamacpp.streamed_weights import PartialWeights
from hetrun.backends.llamacpp.tensor_contexts import TensorContexts
from hetrun.errors import BackendError
from hetrun.graph import Weight
from hetrun.system.native_library import load_library
from hetrun.system.units import format_bytes

CHUNK = 256 << 20  # address space taken at once; pages that are never written cost nothing
SCRATCH = 16 << 20  # stored bytes in flight while a weight is repacked
HUGE_PAGE = 2 << 20
ALIGNMENT = 64
REPACK_ROWS = (
    32  # every repacked layout interleaves 4, 8 or 16 rows; slices keep to a multiple of all of them
)
WEIGHTS_USAGE = 1
PACKED = "packed"  # the layout of our own products
MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)


@dataclass(frozen=True, slots=True)
class GgmlBuffer:
    """A weight as a ggml tensor."""

    tensor: int
    nbytes: int
    layout: str


def view_bytes(address: int, n: int) -> NDArray[np.uint8]:
    """The bytes at an address, without a copy."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(address))


class BufferArena:
    """Memory of one ggml buffer type, taken in large pieces on 2 MiB pages and given back all at once."""

    def __init__(self, lib: GgmlLibrary, buffer_type: int) -> None:
        self._lib = lib
        self.buffer_type = buffer_type
        self._buffers: list[int] = []
        self._next = self._end = 0

    def take(self, nbytes: int) -> tuple[int, int]:
        """The ggml buffer and the address of `nbytes` bytes."""
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._next + nbytes > self._end:
            self._grow(max(CHUNK, nbytes))
        address, self._next = self._next, self._next + nbytes
        return self._buffers[-1], address

    def _grow(self, size: int) -> None:
        buffer = self._lib.ggml_backend_buft_alloc_buffer(self.buffer_type, size)
        if not buffer:
            raise BackendError(
                f"ggml could not allocate {format_bytes(size)} for weights; "
                "free memory or use a smaller model"
            )
        self._lib.ggml_backend_buffer_set_usage(buffer, WEIGHTS_USAGE)
        self._buffers.append(buffer)
        self._next = self._lib.ggml_backend_buffer_get_base(buffer)
        self._end = self._next + size
        _use_huge_pages(self._next, self._end)

    def free(self) -> None:
        """Give everything back."""
        for buffer in self._buffers:
            self._lib.ggml_backend_buffer_free(buffer)
        self._buffers.clear()
        self._next = self._end = 0


def _use_huge_pages(start: int, end: int) -> None:
    """Ask for 2 MiB pages before the first write; a system that refuses only costs speed."""
    first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
    if first < last:
        libc = load_library(None, {"madvise": (c_int, c_void_p, c_size_t, c_int)})
        libc.madvise(first, last - first, MADV_HUGEPAGE)


class WeightMemory:
    """Brings weights in, each in the layout its product wants."""

    def __init__(
        self,
        lib: GgmlLibrary,
        products: MatmulLibrary | None,
        leaves: Callable[[Weight], bool],
        as_floats: Callable[[WeightUse], bool],
    ) -> None:
        """`leaves`: whether a weight is left to ggml, although our own products could multiply by it;
        `as_floats`: whether one is made floats."""
        self._lib = lib
        self._leaves, self._as_floats = leaves, as_floats
        self._products = products
        self._plain = BufferArena(lib, lib.ggml_backend_cpu_buffer_type())
        self._device = lib.ggml_backend_reg_dev_get(lib.ggml_backend_cpu_reg(), 0)
        self._repacking = [BufferArena(lib, t) for t in _repacking_types(lib)]
        self._probes = {
            a.buffer_type: lib.ggml_backend_buft_alloc_buffer(a.buffer_type, 0) for a in self._repacking
        }
        self._contexts = TensorContexts(lib)
        self.tiled = False  # whether there are weights that are multiplied by with AMX tiles
        self._held: dict[Weight, GgmlBuffer] = {}  # plain and packed ones, which serve every use
        self.partial = PartialWeights(products, self.packed_by) if products else None
        self.experts = CachedExperts(products, self.packed_by) if products else None
        self._reserved = 0  # the ggml buffer over the addresses of partial weights

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        """What `upload` will take: a plain or packed weight is kept once, whatever it is used for."""
        total, plain, packed = 0, set[Weight](), set[Weight]()
        for use in wanted:
            weight = use.weight
            if self._as_floats(use):
                total += FLOAT_BYTES * weight.shape[0] * weight.shape[1]
            elif self.packed_by(use):
                packed.add(weight)
            elif arena := self._repacked_in(use):
                total += self._packed_bytes(arena, use)
            else:
                plain.add(weight)
        total += sum(weight.nbytes for weight in plain)
        if self._products:
            total += sum(self._products.packed_bytes(w.quant.ggml_id, w.shape) for w in packed)
        return total

    def upload(self, wanted: WeightUse, read: ReadInto) -> GgmlBuffer:
        """Read a weight once, straight into the layout that will be used."""
        if self._as_floats(wanted):
            return self._upload_vector(wanted, read)
        if self.partial and self.partial.has(wanted):
            return self._upload_partial(self.partial, wanted)
        if self.experts and self.experts.has(wanted):
            return GgmlBuffer(0, 0, CACHED)
        products = self.packed_by(wanted)
        if products is None and (arena := self._repacked_in(wanted)):
            return self._upload_repacked(arena, wanted, read)
        weight = wanted.weight
        if held := self._held.get(weight):  # an embedding that is the head as well
            return GgmlBuffer(held.tensor, 0, held.layout)
        upload = partial(self._upload_packed, products) if products else self._upload_plain
        self._held[weight] = upload(wanted, read)
        return self._held[weight]

    def close(self) -> None:
        """Give everything back."""
        self._contexts.close()
        for probe in self._probes.values():
            self._lib.ggml_backend_buffer_free(probe)
        for arena in (self._plain, *self._repacking):
            arena.free()
        if self.partial:
            self.partial.close()
        if self._reserved:
            self._lib.ggml_backend_buffer_free(self._reserved)
        self._probes, self._repacking, self._reserved = {}, [], 0

    def _tensor(self, use: WeightUse) -> int:
        """A tensor that stays, still without memory."""
        return self._form(self._contexts.lasting(), use)

    def _form(self, context: int, use: WeightUse) -> int:
        """A tensor with the type and shape of a weight."""
        rows, cols = use.weight.shape
        tensor: int
        if self._as_floats(use):  # stacked ones are a column
            tensor = self._lib.ggml_new_tensor_2d(
                context, ggml_api.F32, *((cols, rows) if cols > 1 else (rows, 1))
            )
            return tensor
        shape = (cols, rows // use.matrices, *([use.matrices] if use.use == "experts" else []))
        new = self._lib.ggml_new_tensor_3d if use.use == "experts" else self._lib.ggml_new_tensor_2d
        tensor = new(context, use.weight.quant.ggml_id, *shape)
        return tensor

    def _place(self, tensor: int, buffer: int, address: int) -> None:
        if self._lib.ggml_backend_tensor_alloc(buffer, tensor, address) != ggml_api.SUCCESS:
            raise BackendError("ggml refused a place for a weight that it had accepted before")

    def _upload_vector(self, use: WeightUse, read: ReadInto) -> GgmlBuffer:
        """Gains and biases are float32 for every ggml op that takes them."""
        weight = use.weight
        raw = np.empty(weight.nbytes, np.uint8)
        read(weight, raw)
        values = weight.quant.dequantise(raw, weight.shape[1])
        values += np.float32(use.offset)
        tensor = self._tensor(use)
        buffer, address = self._plain.take(values.nbytes)
        self._place(tensor, buffer, address)
        view_bytes(address, values.nbytes)[:] = values.reshape(-1).view(np.uint8)
        return GgmlBuffer(tensor, values.nbytes, "plain")

    def packed_by(self, use: WeightUse) -> MatmulLibrary | None:
        """Our own products, if they multiply by this weight, or look its rows up."""
        if use.use not in ("product", "lookup", "experts") or self._products is None:
            return None
        weight = use.weight
        if self._leaves(weight):
            return None
        if use.use == "experts" and weight.shape[0] // use.matrices % ROWS:
            return None  # a group of rows would be of two experts
        return self._products if self._products.takes(weight.quant.ggml_id, weight.shape) else None

    def _upload_plain(self, use: WeightUse, read: ReadInto) -> GgmlBuffer:
        tensor = self._tensor(use)
        buffer, address = self._plain.take(use.weight.nbytes)
        self._place(tensor, buffer, address)
        read(use.weight, view_bytes(address, use.weight.nbytes))
        return GgmlBuffer(tensor, use.weight.nbytes, "plain")

    def _upload_packed(self, products: MatmulLibrary, use: WeightUse, read: ReadInto) -> GgmlBuffer:
        """Slice by slice, as with ggml's repacking."""
        weight, kind = use.weight, use.weight.quant.ggml_id
        rows, cols = weight.shape
        size = products.packed_bytes(kind, weight.shape)
        tensor = self._tensor(use)
        buffer, address = self._plain.take(size)
        self._place(tensor, buffer, address)
        row_bytes = weight.quant.row_bytes(cols)
        step = min(rows, max(1, SCRATCH // row_bytes // ROWS) * ROWS)
        scratch = np.empty(step * row_bytes, np.uint8)
        for a in range(0, rows, step):
            part = weight if step >= rows else weight.rows(a, min(a + step, rows))
            raw = scratch[: part.nbytes]
            read(part, raw)
            n = products.packed_bytes(kind, part.shape)
            products.pack(kind, part.shape, raw, view_bytes(address, n))
            address += n
        return GgmlBuffer(tensor, size, PACKED)

    def _upload_partial(self, partial: PartialWeights, use: WeightUse) -> GgmlBuffer:
        """Its pieces come by themselves; a table that only rows are read of has no memory."""
        if partial.memory is None or not (address := partial.address(use.weight)):
            return GgmlBuffer(0, 0, PACKED)
        if not self._reserved:
            memory = partial.memory
            self._reserved = self._lib.ggml_backend_cpu_buffer_from_ptr(memory.address, memory.nbytes)
        tensor = self._tensor(use)
        self._place(tensor, self._reserved, address)
        return GgmlBuffer(tensor, 0, PACKED)

    def _repacked_in(self, use: WeightUse) -> BufferArena | None:
        """The first of ggml's repacking buffers that has a layout for this weight."""
        if use.use not in ("product", "experts"):
            return None
        return next((a for a in self._repacking if self._supports(use, a.buffer_type)), None)

    def _supports(self, use: WeightUse, memory: int) -> bool:
        """Ask before allocating: set_tensor on a weight that a buffer type cannot hold ends the process."""
        lib = self._lib
        if memory == amx_check.buffer_type(lib) and use.weight.shape[1] < amx_check.LEAST_COLS:
            return False
        with self._contexts.scratch() as context:
            w = self._form(context, use)
            ggml_api.tensor_at(w).buffer = self._probes[memory]
            if use.use == "experts":
                x = lib.ggml_new_tensor_3d(context, ggml_api.F32, use.weight.shape[1], 1, 512)
                chosen = lib.ggml_new_tensor_2d(context, ggml_api.I32, 1, 512)
                product = lib.ggml_mul_mat_id(context, w, x, chosen)
            else:
                x = lib.ggml_new_tensor_2d(context, ggml_api.F32, use.weight.shape[1], 512)
                product = lib.ggml_mul_mat(context, w, x)
            return bool(lib.ggml_backend_dev_supports_op(self._device, product))

    def _packed_bytes(self, arena: BufferArena, use: WeightUse) -> int:
        with self._contexts.scratch() as context:
            form = self._form(context, use)
            size: int = self._lib.ggml_backend_buft_get_alloc_size(arena.buffer_type, form)
        return size

    def _upload_repacked(self, arena: BufferArena, use: WeightUse, read: ReadInto) -> GgmlBuffer:
        """Slice by slice: the stored bytes never lie in memory as a whole beside the repacked ones."""
        weight, size = use.weight, self._packed_bytes(arena, use)
        self.tiled |= arena.buffer_type == amx_check.buffer_type(self._lib)
        tensor = self._tensor(use)
        buffer, address = arena.take(size)
        self._place(tensor, buffer, address)
        rows, row_bytes = weight.shape[0], weight.quant.row_bytes(weight.shape[1])
        # ggml chooses the layout by the rows of a matrix, so experts are never cut.
        unit = REPACK_ROWS if use.use == "product" else rows // use.matrices
        step = max(1, SCRATCH // row_bytes // unit) * unit
        scratch = np.empty(min(step, rows) * row_bytes, np.uint8)
        for a in range(0, rows, step):
            part = weight if step >= rows else weight.rows(a, min(a + step, rows))
            raw = scratch[: part.nbytes]
            read(part, raw)
            matrices = part.shape[0] // unit if use.use == "experts" else 1
            piece = replace(use, weight=part, matrices=matrices)
            self._set_slice(piece, buffer, address + a * (size // rows), raw)
        layout = self._lib.ggml_backend_buft_name(arena.buffer_type).decode().removeprefix("CPU_").lower()
        return GgmlBuffer(tensor, size, layout)

    def _set_slice(self, piece: WeightUse, buffer: int, address: int, raw: NDArray[np.uint8]) -> None:
        with self._contexts.scratch() as context:
            tensor = self._form(context, piece)
            self._place(tensor, buffer, address)
            self._lib.ggml_backend_tensor_set(tensor, raw.ctypes.data, 0, raw.nbytes)


def _repacking_types(lib: GgmlLibrary) -> list[int]:
    """The buffer types that weights are repacked for, without AMX where it would end the process."""
    found = ggml_api.extra_buffer_types(lib)
    return found if amx_check.usable() else [t for t in found if t != amx_check.buffer_type(lib)]
