"""What a GGUF file says: its metadata behind typed getters, and where its tensors lie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from hetrun.errors import ModelFileError
from hetrun.graph.quant import OTHER_TYPES, QuantType
from hetrun.system.file_identity import Stamp

Numbers: TypeAlias = npt.NDArray[Any]


class StringArray(Sequence[str]):
    """An array of strings, kept as the file's bytes and decoded when asked for.

    Tokens may be any bytes, so what is not UTF-8 comes back as surrogate escapes; `raw` gives the bytes.
    """

    def __init__(self, blob: bytes, starts: npt.NDArray[np.int64]) -> None:
        """`starts` holds where each string's eight bytes of length lie, and the end of the last string."""
        self._blob = blob
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def blob(self) -> bytes:
        """All of it as the file has it: each string behind eight bytes of length."""
        return self._blob

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where in `blob` each string's length lies, and the end of the last string."""
        return self._starts

    def raw(self, index: int) -> bytes:
        """The bytes of one string."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        at = index % len(self)
        return self._blob[int(self._starts[at]) + 8 : int(self._starts[at + 1])]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.raw(index).decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        blob, starts = self._blob, self._starts.tolist()
        for start, end in pairwise(starts):
            yield blob[start + 8 : end].decode("utf-8", "surrogateescape")

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"


_OTHER_IDS = {name: number for number, (name, *_) in OTHER_TYPES.items()}

Value: TypeAlias = int | float | bool | str | Numbers | StringArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `shape` rows first, as numpy has it; `quant` only a name where hetrun lacks it."""

    name: str
    shape: tuple[int, ...]
    quant: QuantType | str
    offset: int  # from the start of the file
    nbytes: int
    path: str  # the file: one of several where a model is split
    stamp: Stamp

    @property
    def ggml_id(self) -> int:
        """ggml's number of its type."""
        return _OTHER_IDS[self.quant] if isinstance(self.quant, str) else self.quant.ggml_id


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """The checked header of a GGUF file; of a split model the first part's, with the tensors of all parts."""

    path: str
    version: int
    size: int  # of all parts
    alignment: int
    data_offset: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    stamps: Mapping[str, Stamp]  # of all parts, by path
    spans: Mapping[str, tuple[int, int]]  # where each key's type and value stand in the file, and their end

    @property
    def paths(self) -> tuple[str, ...]:
        """All parts, in order."""
        return tuple(self.stamps)

    def get_int(self, key: str, default: int, lo: int, hi: int) -> int:
        """A whole number within lo..hi, or the default where the key is absent."""
        return default if key not in self.metadata else self.require_int(key, lo, hi)

    def require_int(self, key: str, lo: int, hi: int) -> int:
        """A whole number within lo..hi."""
        value = self._require(key)
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong(key, "a whole number")
        if not lo <= value <= hi:
            self._wrong(key, f"between {lo} and {hi}")
        return value

    def get_float(self, key: str, default: float, lo: float = -math.inf, hi: float = math.inf) -> float:
        """A finite number within lo..hi, or the default where the key is absent."""
        if key not in self.metadata:
            return default
        value = self.metadata[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._wrong(key, "a finite number")
        if not lo <= value <= hi:
            self._wrong(key, f"between {lo} and {hi}")
        return float(value)

    def get_bool(self, key: str, default: bool) -> bool:
        """True or false, or the default where the key is absent."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            self._wrong(key, "true or false")
        return value

    def get_str(self, key: str, default: str) -> str:
        """A string, or the default where the key is absent."""
        return default if key not in self.metadata else self.require_str(key)

    def require_str(self, key: str) -> str:
        """A string."""
        value = self._require(key)
        if not isinstance(value, str):
            self._wrong(key, "a string")
        return value

    def get_array(self, key: str, length: int | None = None) -> Numbers | None:
        """An array of numbers, of this length when one is given; None where the key is absent."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray):
            self._wrong(key, "an array of numbers")
        self._check_length(key, len(value), length)
        return value

    def get_numbers(self, key: str, n: int) -> tuple[float, ...] | None:
        """n finite numbers; a single one counts for all n; None where the key is absent."""
        value = self.metadata.get(key)
        if isinstance(value, int | float):
            return (self.get_float(key, 0.0) if not isinstance(value, bool) else float(value),) * n
        found = self.get_array(key, n)
        if found is not None and not np.isfinite(found.astype(np.float64)).all():
            self._wrong(key, "finite numbers")
        return None if found is None else tuple(float(v) for v in found)

    def get_strings(self, key: str, length: int | None = None) -> StringArray | None:
        """An array of strings, of this length when one is given; None where the key is absent."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, StringArray):
            self._wrong(key, "an array of strings")
        self._check_length(key, len(value), length)
        return value

    def _require(self, key: str) -> Value:
        if key not in self.metadata:
            raise ModelFileError(self.path, f"metadata key {shown(key)} is missing: convert the model again")
        return self.metadata[key]

    def _check_length(self, key: str, found: int, length: int | None) -> None:
        if length is not None and found != length:
            self._wrong(key, f"an array of {length} elements")

    def _wrong(self, key: str, wanted: str) -> NoReturn:
        found = _describe(self.metadata[key])
        raise ModelFileError(self.path, f"metadata key {shown(key)} must be {wanted}, it is {found}")


def shown(name: str) -> str:
    """A name from the file, safe to print on a terminal and not endless."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def _describe(value: Value) -> str:
    if isinstance(value, str):
        return f"the string {shown(value)}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value}"
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype} numbers"
    return f"an array of {len(value)} strings"
