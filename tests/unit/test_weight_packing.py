"""Packing of weights in C, for each set of instructions that this CPU has, against numpy's."""

from __future__ import annotations

import ctypes
import mmap
import os
from copy import copy
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetrun.backends.llamacpp.kernels import matmul as module
from hetrun.backends.llamacpp.kernels.matmul import ROWS
from hetrun.graph.quant import Bytes, by_name
from tests.unit.test_matmul_kernels import LEVELS, aligned, library

pytestmark = pytest.mark.skipif(module.library() is None, reason="hetrun was installed without a C compiler")
ROOM = 1 << 16  # for the largest weight that is tried
NOTHING = 0  # PROT_NONE: such pages cannot be read


@dataclass(frozen=True)
class Form:
    """Where a stored block has its halves and its words, and the words in the order of their lines."""

    halves: tuple[int, ...]
    words: tuple[int, ...]  # bytes where they begin
    blocks: int = 1  # of a step
    flip: int = 0  # of each byte of a word
    half_bytes: int = 2
    fifth_bits: bool = False  # in the first word
    pairs_of_bits: bool = False  # in all words


def words(first: int, count: int) -> tuple[int, ...]:
    return tuple(first + 4 * i for i in range(count))


def q6_k_words() -> tuple[int, ...]:
    """The scales, then for each half of the columns nibbles that take turns with bits, and more nibbles."""
    found = list(words(192, 4))
    for half in range(2):
        nibbles, bits = words(64 * half, 16), words(128 + 32 * half, 8)
        found += [at for both in zip(nibbles[:8], bits, strict=True) for at in both]
        found += nibbles[8:]
    return tuple(found)


FORMS = {
    "Q4_0": Form((0,), words(2, 4), blocks=2),
    "Q4_1": Form((0, 2), words(4, 4), blocks=2),
    "Q8_0": Form((0,), words(2, 8), blocks=2, flip=128),
    "Q5_0": Form((0,), words(2, 5), blocks=2, fifth_bits=True),
    "Q5_1": Form((0, 2), words(4, 5), blocks=2, fifth_bits=True),
    "IQ4_NL": Form((0,), words(2, 4), blocks=2),
    "MXFP4": Form((0,), words(1, 4), blocks=2, half_bytes=1),
    "Q2_0": Form((0,), words(2, 4), blocks=2, pairs_of_bits=True),
    **dict.fromkeys(("F16", "BF16"), Form((), words(0, 16))),
    "Q2_K": Form((80, 82), words(0, 20)),
    "Q3_K": Form((108,), words(0, 27)),
    "IQ4_XS": Form((0, 2), words(4, 33)),
    "Q4_K": Form((0, 2), words(4, 35)),
    "Q5_K": Form((0, 2), words(4, 43)),
    "Q6_K": Form((208,), q6_k_words()),
}


def block_of(name: str) -> tuple[int, int]:
    """Columns and bytes of a block; floats are taken by 32."""
    quant = by_name(name)
    return (32, quant.row_bytes(32)) if quant.block == 1 else (quant.block, quant.block_bytes)


def expected(name: str, stored: Bytes) -> Bytes:
    """Of each step the halves in whole lines, [half][block][row], then the words, [block][word][row]."""
    form, (_, size) = FORMS[name], block_of(name)
    groups = -(-len(stored) // ROWS)
    whole = np.zeros((groups * ROWS, stored.shape[1]), np.uint8)
    whole[: len(stored)] = stored
    blocks = whole.reshape(groups, ROWS, -1, form.blocks, size).transpose(0, 2, 3, 1, 4)
    steps = blocks.shape[:2]
    halves = np.zeros((*steps, len(form.halves), form.blocks, ROWS, 2), np.uint8)
    for i, at in enumerate(form.halves):
        halves[:, :, i, :, :, : form.half_bytes] = blocks[..., at : at + form.half_bytes]
    halves = halves.reshape(*steps, -1)
    head = np.zeros((*steps, -(-halves.shape[2] // 64) * 64), np.uint8)
    head[..., : halves.shape[2]] = halves
    lines = np.stack([blocks[..., at : at + 4] ^ form.flip for at in form.words], axis=3)
    if form.fifth_bits:
        lines[..., 0, :, :] = byte_by_byte(lines[..., 0, :, :])
    if form.pairs_of_bits:
        lines = turned(lines)
    return np.concatenate([head, lines.reshape(*steps, -1)], axis=2).reshape(-1)


def byte_by_byte(words: Bytes) -> Bytes:
    """Bit 4 k + i of each word becomes bit 8 i + k."""
    bits = np.unpackbits(words, axis=-1, bitorder="little").reshape(*words.shape[:-1], 8, 4)
    return np.packbits(bits.swapaxes(-1, -2), axis=-1, bitorder="little").reshape(words.shape)


def turned(words: Bytes) -> Bytes:
    """Pair k of byte i of each word becomes pair i of byte k."""
    bits = np.unpackbits(words, axis=-1, bitorder="little").reshape(*words.shape[:-1], 4, 4, 2)
    pairs = bits.swapaxes(-2, -3).reshape(*words.shape, 8)
    return np.packbits(pairs, axis=-1, bitorder="little").reshape(words.shape)


@cache
def between_walls() -> Bytes:
    """Memory before and behind which nothing can be read."""
    page = mmap.PAGESIZE
    whole = np.frombuffer(mmap.mmap(-1, ROOM + 2 * page), np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for at in (0, page + ROOM):
        assert protect(whole.ctypes.data + at, page, NOTHING) == 0
    return whole[page : page + ROOM]


@pytest.mark.skipif(os.name == "nt", reason="there is no mprotect")
@given(
    name=st.sampled_from(sorted(FORMS)),
    level=st.sampled_from(LEVELS or (0,)),
    rows=st.integers(1, 3 * ROWS + 1),
    steps=st.integers(1, 4),
    at_the_end=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_bytes_are_where_numpy_puts_them_and_no_others_are_read_or_written(
    name: str, level: int, rows: int, steps: int, at_the_end: bool, seed: int
) -> None:
    quant, form = by_name(name), FORMS[name]
    cols = block_of(name)[0] * form.blocks * steps
    room, size = between_walls(), rows * quant.row_bytes(cols)
    memory = room[ROOM - size :] if at_the_end else room[:size]
    memory[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    lib = copy(library())
    lib.level = level
    nbytes = lib.packed_bytes(quant.ggml_id, (rows, cols))
    packed = aligned(nbytes + 64)
    packed[:] = 7
    lib.pack(quant.ggml_id, (rows, cols), memory, packed[:nbytes])
    assert np.array_equal(packed[:nbytes], expected(name, memory.reshape(rows, -1)))
    assert (packed[nbytes:] == 7).all()
