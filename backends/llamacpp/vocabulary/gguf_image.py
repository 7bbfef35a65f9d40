"""A GGUF file of our own in memory: what llama.cpp reads in place of a stranger's file.

It holds the checked keys and nothing else, so no other key can be the one that ends the process, and the
stranger's file may change meanwhile. Tensors are zeros, and a hole in the file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from struct import pack
from typing import IO

import numpy as np

from hetrun.loader.formats.gguf import StringArray, Value

_BOOL, _U32, _F32, _STRING, _ARRAY = 7, 4, 6, 8, 9
_KINDS = {"|u1": 0, "|i1": 1, "<i4": 5, "<f4": 6}


_ALIGNMENT = 32  # of a tensor's place in the file

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, as numpy has them


@contextmanager
def copied(keys: Mapping[str, Value], tensors: Shapes | None = None) -> Iterator[str]:
    """The path of a GGUF file with these keys, and with tensors of float32 zeros of these shapes."""
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        with tempfile.NamedTemporaryFile(prefix="hetrun-", suffix=".gguf") as file:
            _write(file.file, keys, tensors or {})
            yield file.name
        return
    fd = os.memfd_create("tokenizer.gguf")
    with open(fd, "wb") as file:
        _write(file, keys, tensors or {})
        yield f"/proc/self/fd/{fd}"


def _write(file: IO[bytes], keys: Mapping[str, Value], tensors: Shapes) -> None:
    file.writelines(_written(keys, len(tensors)))
    offset = 0
    for name, shape in tensors.items():
        dims = tuple(reversed(shape))
        file.write(_string(name) + pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, offset))
        offset = _aligned(offset + 4 * prod(shape))
    file.flush()
    if tensors:
        os.ftruncate(file.fileno(), _aligned(file.tell()) + offset)


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _written(keys: Mapping[str, Value], n_tensors: int) -> Iterator[bytes]:
    yield b"GGUF" + pack("<IQQ", 3, n_tensors, len(keys))
    for key, value in keys.items():
        yield _string(key)
        if isinstance(value, bool):
            yield pack("<I?", _BOOL, value)
        elif isinstance(value, int):
            yield pack("<II", _U32, value)
        elif isinstance(value, float):
            yield pack("<If", _F32, value)
        elif isinstance(value, str):
            yield pack("<I", _STRING) + _string(value)
        elif isinstance(value, StringArray):
            yield pack("<IIQ", _ARRAY, _STRING, len(value))
            yield value.blob
        elif isinstance(value, np.ndarray):
            yield pack("<IIQ", _ARRAY, _KINDS[value.dtype.str], len(value))
            yield value.tobytes()
        else:
            raise TypeError(f"no tokenizer has numbers like {key}")


def _string(text: str) -> bytes:
    raw = text.encode()
    return pack("<Q", len(raw)) + raw
