"""Models as Hugging Face publishes them, and how an architecture says what they are in GGUF's words.

`config.json` and tensors by their Hugging Face names go in; settings by GGUF key and weights by GGUF name
come out. The weights stay where they are and as they are: where Hugging Face lays something out differently,
the `layout` settings tell the graph, and `changes` tell `hetrun convert` what to do when it writes GGUF.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

import numpy as np

from hetrun.errors import ModelFileError
from hetrun.graph import Weight
from hetrun.loader.weight_reader import FileReader

SLICE = 1 << 20  # bytes of each of two tensors that are compared at once

Setting = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...]

SEES = "sees"  # a setting of ours: the model has a vision tower, which is left out


class Config:
    """Settings of a model by key, each one checked when it is asked for. null counts as missing."""

    def __init__(self, path: str, values: Mapping[str, object], prefix: str = "") -> None:
        self.path = path
        self._values = {k: v for k, v in values.items() if v is not None}
        self._nulls = values.keys() - self._values.keys()
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Whether the key is there, and not null."""
        return key in self._values

    def is_null(self, key: str) -> bool:
        """Whether the key is there and null: where leaving it out means another thing."""
        return key in self._nulls

    def get(self, key: str) -> object:
        """The value as it is, for what may be of several kinds; None where it is missing."""
        return self._values.get(key)

    def with_defaults(self, values: Mapping[str, object]) -> Config:
        """The same settings, and others where they are missing."""
        return Config(self.path, {**values, **self._values, **dict.fromkeys(self._nulls)}, self._prefix)

    def without(self, key: str) -> Config:
        """The same settings but one."""
        left = {k: v for k, v in self._values.items() if k != key}
        return Config(self.path, {**left, **dict.fromkeys(self._nulls)}, self._prefix)

    def section(self, key: str) -> Config:
        """The settings below a key; none where it is missing."""
        value = self._values.get(key, {})
        if not isinstance(value, Mapping):
            self._wrong(key, "a table")
        return Config(self.path, value, f"{self._prefix}{key}.")

    def require_int(self, key: str, lo: int, hi: int) -> int:
        """A whole number within lo..hi."""
        if key not in self._values:
            raise ModelFileError(self.path, f"{self._prefix}{key} is missing: the model is incomplete")
        value = self._values[key]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong(key, "a whole number")
        if not lo <= value <= hi:
            self._wrong(key, f"between {lo} and {hi}")
        return value

    def get_int(self, key: str, default: int, lo: int, hi: int) -> int:
        """A whole number within lo..hi, or the default."""
        return self.require_int(key, lo, hi) if key in self._values else default

    def get_float(self, key: str, default: float) -> float:
        """A finite number, or the default."""
        value = self._values.get(key, default)
        number = math.nan if isinstance(value, bool) else _number(value)
        if not math.isfinite(number):
            self._wrong(key, "a finite number")
        return number

    def get_str(self, key: str, default: str) -> str:
        """A string, or the default."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            self._wrong(key, "a string")
        return value

    def get_bool(self, key: str, default: bool) -> bool:
        """True or false, or the default."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            self._wrong(key, "true or false")
        return value

    def get_numbers(self, key: str, n: int) -> tuple[float, ...] | None:
        """n numbers (booleans count as 0 and 1); a single one counts for all n; None where it is missing."""
        if key not in self._values:
            return None
        value = self._values[key]
        items = list(value) if isinstance(value, list | tuple) else [value] * n
        numbers = tuple(_number(v) for v in items)
        if len(numbers) != n or not all(math.isfinite(v) for v in numbers):
            self._wrong(key, f"{n} finite numbers")
        return numbers

    def get_strings(self, key: str, n: int) -> tuple[str, ...] | None:
        """n strings; None where the key is missing."""
        if key not in self._values:
            return None
        value = self._values[key]
        items = list(value) if isinstance(value, list | tuple) else []
        if len(items) != n or not all(isinstance(v, str) for v in items):
            self._wrong(key, f"{n} strings")
        return tuple(items)

    def get_ids(self, key: str) -> tuple[int, ...]:
        """Token ids: a number or a list of numbers; none where the key is missing."""
        value = self._values.get(key, [])
        items = value if isinstance(value, list | tuple) else [value]
        if not all(type(v) is int for v in items):
            self._wrong(key, "a token id or a list of them")
        return tuple(items)

    def get_token(self, key: str) -> str | None:
        """How a special token is written: a string, or a table that holds it; None where it is missing."""
        value = self._values.get(key)
        text = value.get("content") if isinstance(value, Mapping) else value
        if text is not None and not isinstance(text, str):
            self._wrong(key, "a token")
        return text

    def refuse(self, reason: str) -> NoReturn:
        """This model cannot be run, and why."""
        raise ModelFileError(self.path, reason)

    def _wrong(self, key: str, wanted: str) -> NoReturn:
        found = repr(self._values[key])
        shown = found if len(found) <= 80 else found[:77] + "..."
        raise ModelFileError(self.path, f"{self._prefix}{key} must be {wanted}, it is {shown}")


def _number(value: object) -> float:
    """The value as a float; NaN where it is none, or has hundreds of digits."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


@dataclass(frozen=True, slots=True)
class HfModel:
    """`config.json`, and the tensors of all shards by their Hugging Face names.

    A tensor is a matrix [rows, columns]: a vector is one row, and a tensor of three dimensions
    [experts, rows, columns] is the experts' rows on top of each other.
    """

    config: Config
    tensors: Mapping[str, Weight]

    def has(self, name: str) -> bool:
        """Whether the model has that tensor."""
        return name in self.tensors

    def weight(self, name: str) -> Weight:
        """The tensor of that name."""
        if (found := self.tensors.get(name)) is None:
            raise ModelFileError(self.config.path, f"the tensor {name} is missing: the model is incomplete")
        return found


def same_bytes(a: Weight, b: Weight) -> bool:
    """Whether two tensors are one, stored twice: read slice by slice up to the first difference."""
    if (a.shape, a.quant) != (b.shape, b.quant):
        return False
    reader, row_bytes = FileReader(), a.quant.row_bytes(a.shape[1])
    n = max(1, SLICE // row_bytes)
    buffers = np.empty((2, n * row_bytes), np.uint8)
    try:
        for row in range(0, a.shape[0], n):
            end = min(row + n, a.shape[0])
            found = buffers[:, : (end - row) * row_bytes]
            for weight, out in zip((a, b), found, strict=True):
                reader.read(weight.rows(row, end), out)
            if not np.array_equal(*found):
                return False
        return True
    finally:
        reader.close()


@dataclass(frozen=True, slots=True)
class Interleave:
    """GGUF has the two halves of each head's rows, which rope turns together, one row of each in turn."""

    n_heads: int


@dataclass(frozen=True, slots=True)
class AddOne:
    """GGUF stores a norm's gain with the 1 added."""


@dataclass(frozen=True, slots=True)
class TileHeads:
    """GGUF has the heads of v of a delta net one of each head of k in turn; Hugging Face has those of one
    head of k together. They are blocks of `size` rows behind the first `skip` ones, or of columns.

    With `negative_exp` GGUF has -exp(x) in place of x.
    """

    k_heads: int
    v_heads: int
    size: int
    skip: int = 0
    columns: bool = False
    negative_exp: bool = False

    @property
    def order(self) -> list[int]:
        """The numbers of Hugging Face's heads as GGUF has them."""
        times = self.v_heads // self.k_heads
        return [k * times + i for i in range(times) for k in range(self.k_heads)]


Change = Interleave | AddOne | TileHeads


@dataclass(frozen=True, slots=True)
class Imported:
    """A model of Hugging Face in GGUF's words."""

    settings: Mapping[str, Setting]  # as GGUF has them, without the architecture's prefix
    weights: Mapping[str, Weight]  # by GGUF name
    layout: Mapping[str, Setting] = field(default_factory=dict)  # more settings: how these weights differ
    changes: Mapping[str, Change] = field(default_factory=dict)  # by GGUF name, for `convert`

    def with_settings(self, more: Mapping[str, Setting]) -> Imported:
        """The same with more settings, or others."""
        return replace(self, settings={**self.settings, **more})


class Importer(Protocol):
    """An architecture that knows what Hugging Face calls its settings and weights."""

    name: str

    def from_hf(self, hf: HfModel) -> Imported:
        """The model in GGUF's words."""
        ...
