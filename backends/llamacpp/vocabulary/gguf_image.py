"""A GGUF file of our own in memory: what llama.cpp reads in place of a stranger's file.

It holds the checked keys and nothing else, so no other key can be the one that ends the process, and the
stranger's file may change meanwhile.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from struct import pack

import numpy as np

from hetrun.loader.formats.gguf import StringArray, Value

_BOOL, _U32, _STRING, _ARRAY = 7, 4, 8, 9
_KINDS = {"|u1": 0, "|i1": 1, "<i4": 5, "<f4": 6}


@contextmanager
def copied(keys: Mapping[str, Value]) -> Iterator[str]:
    """The path of a GGUF file with these keys and no tensors."""
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        with tempfile.NamedTemporaryFile(prefix="hetrun-", suffix=".gguf") as file:
            file.writelines(_written(keys))
            file.flush()
            yield file.name
        return
    fd = os.memfd_create("tokenizer.gguf")
    with open(fd, "wb") as file:
        file.writelines(_written(keys))
        file.flush()
        yield f"/proc/self/fd/{fd}"


def _written(keys: Mapping[str, Value]) -> Iterator[bytes]:
    yield b"GGUF" + pack("<IQQ", 3, 0, len(keys))
    for key, value in keys.items():
        yield _string(key)
        if isinstance(value, bool):
            yield pack("<I?", _BOOL, value)
        elif isinstance(value, int):
            yield pack("<II", _U32, value)
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
