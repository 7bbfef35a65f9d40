"""Where a model comes from: a GGUF file or a Hugging Face folder, both in GGUF's words; and its graph."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from hetrun import points, registry
from hetrun.errors import HetrunError, ModelFileError, PluginError
from hetrun.formats.gguf import GGUFFile, TensorInfo, read_gguf
from hetrun.graph import Architecture, Extent, Graph, GraphBuilder, ModelMeta, Weight, WeightSource
from hetrun.pooling import Pooling
from hetrun.quant import QuantType
from hetrun.stamp import Stamp
from hetrun.tokenizer import Vocabulary

# llama.cpp's numbers; 0 says nothing, and 4 is a model that ranks texts, which we have no other use for.
POOLINGS: Mapping[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
LEAST_TEMPERATURE = 1e-6  # of those above 0, as for requests


class ModelSource(ModelMeta, WeightSource, Protocol):
    """All that is known of a model before it runs: settings and weights in GGUF's words, and its texts."""

    @property
    def architecture(self) -> str:
        """As GGUF names it."""
        ...

    @property
    def name(self) -> str:
        """What people call the model."""
        ...

    @property
    def vocabulary(self) -> str:
        """Which reader of vocabularies understands its tokenizer, by registered name; "" if it has none."""
        ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The templates that it was trained with, by name; most models have one, named default."""
        ...

    @property
    def chat_template_place(self) -> str:
        """Where they lie, for people."""
        ...

    @property
    def temperature(self) -> float | None:
        """The temperature that its makers recommend."""
        ...

    @property
    def pooling(self) -> Pooling:
        """What its embeddings are made of; the mean where nothing is said."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        ...

    @property
    def stamps(self) -> Mapping[str, Stamp]:
        """The files with its weights by path, as they were when their headers were read."""
        ...

    def weights(self) -> Iterator[Weight]:
        """Every tensor as a matrix, in the order of the files."""
        ...


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """A GGUF file as a source of weights and settings."""

    file: GGUFFile
    architecture: str

    @property
    def path(self) -> str:
        """The file."""
        return self.file.path

    @property
    def name(self) -> str:
        """As the file has it, else the file's own name."""
        return self.file.get_str("general.name", "") or Path(self.path).stem

    @property
    def vocabulary(self) -> str:
        """Its tokenizer lies in the file, if it has one."""
        return "" if self.file.get_str("tokenizer.ggml.model", "none") in ("none", "no_vocab") else "gguf"

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The default one, and others with their names behind its key."""
        place = self.chat_template_place
        keys = {"default": place} | {
            k[len(place) + 1 :]: k for k in self.file.metadata if k.startswith(f"{place}.")
        }
        found = {name: self.file.get_str(key, "") for name, key in keys.items()}
        return {name: text for name, text in found.items() if text}

    @property
    def chat_template_place(self) -> str:
        """A key."""
        return "tokenizer.chat_template"

    @property
    def temperature(self) -> float | None:
        """What the file recommends."""
        return recommended(self.file.get_float("general.sampling.temp", -1.0))

    @property
    def pooling(self) -> Pooling:
        """What the file says."""
        return POOLINGS.get(self.get_int("pooling_type", 0, 0, 1 << 31), "mean")

    @property
    def nbytes(self) -> int:
        """The file's size, or that of all parts."""
        return self.file.size

    @property
    def stamps(self) -> Mapping[str, Stamp]:
        """The file, or all parts."""
        return self.file.stamps

    def find(self, name: str) -> Weight | None:
        """A tensor as a matrix."""
        info = self.file.tensors.get(name)
        return None if info is None else _weight(info)

    def weights(self) -> Iterator[Weight]:
        """Every tensor as a matrix."""
        for info in self.file.tensors.values():
            yield _weight(info)

    def require_int(self, key: str, lo: int, hi: int) -> int:
        """A setting of the architecture."""
        if key == "vocab_size" and (table := self.find("token_embd.weight")):
            return table.shape[0]
        return self.file.require_int(self._key(key), lo, hi)

    def get_int(self, key: str, default: int, lo: int, hi: int) -> int:
        """A setting of the architecture, or its default."""
        return self.file.get_int(self._key(key), default, lo, hi)

    def get_float(self, key: str, default: float) -> float:
        """A setting of the architecture, or its default."""
        return self.file.get_float(self._key(key), default)

    def get_str(self, key: str, default: str) -> str:
        """A setting of the architecture, or its default."""
        return self.file.get_str(self._key(key), default)

    def get_bool(self, key: str, default: bool) -> bool:
        """A setting of the architecture, or its default."""
        return self.file.get_bool(self._key(key), default)

    def get_numbers(self, key: str, n: int) -> tuple[float, ...] | None:
        """n numbers; a single one counts for all n; None where the key is missing."""
        return self.file.get_numbers(self._key(key), n)

    def _key(self, key: str) -> str:
        return f"{self.architecture}.{key}"


def recommended(temperature: float) -> float | None:
    """A recommended temperature that can be followed: below 0 it is none, and next to 0 it is 0."""
    if temperature < 0:
        return None
    return temperature if temperature >= LEAST_TEMPERATURE else 0.0


def _weight(info: TensorInfo) -> Weight:
    """A vector is one row; the matrices of a tensor with more dimensions lie on top of each other."""
    if not isinstance(info.quant, QuantType):
        raise ModelFileError(
            info.path,
            f"the tensor {info.name} holds {info.quant}, which no weights are; get another file of the model",
        )
    cols = info.shape[-1]
    row_bytes = info.quant.row_bytes(cols)
    rows = info.nbytes // row_bytes
    part = Extent(info.path, info.offset, rows, row_bytes, row_bytes, info.stamp)
    return Weight(info.name, (rows, cols), info.quant, (part,))


def is_folder(path: Path) -> bool:
    """Whether a path means a model's folder; it may be named by a file in it."""
    return os.path.isdir(path) or path.suffix in (".safetensors", ".json")


def open_model(path: Path) -> ModelSource:
    """Read what is known of a model without its weights."""
    if is_folder(path):
        from hetrun.hf_source import open_folder  # on use: most models are GGUF files

        return open_folder(path)
    if point := points.find("sources", path.suffix.removeprefix(".")):
        return _read_by(point, path)
    file = read_gguf(path)
    return GGUFModel(file, file.require_str("general.architecture"))


def _read_by(point: points.Point, path: Path) -> ModelSource:
    """What a plugin's reader makes of a file."""
    read = cast("Callable[[Path], ModelSource]", points.load(point))
    whose = f"the reader {point.name} of {point.whose}"
    with points.blamed(lambda e: ModelFileError(str(path), f"{whose} fails: {points.in_words(e)}")):
        return read(path)


def open_vocabulary(source: ModelSource) -> Vocabulary | None:
    """The model's vocabulary; None where it has none, or where nothing is installed that could read it."""
    opener = registry.named("vocabularies", source.vocabulary)
    return cast("Callable[[ModelSource], Vocabulary]", opener)(source) if opener else None


def build_graph(source: ModelSource, context: int | None = None) -> Graph:
    """The forward step of a model for sequences up to `context` tokens."""
    point = points.find("models", source.architecture)
    try:
        return architecture_of(source).build(GraphBuilder(source, context), source)
    except HetrunError:
        raise
    except points.FAILURES as e:
        if point is None or point in points.left_out():
            raise
        raise points.leave_out(point, f"it cannot build {source.name[:80]!r}: {points.in_words(e)}", e) from e


def is_known(architecture: str) -> bool:
    """Whether hetrun has an architecture of that name, from a plugin or of its own."""
    return plugged(architecture) is not None or _is_ours(architecture)


def _is_ours(architecture: str) -> bool:
    # The name comes from a file: it must not become a path.
    if not re.fullmatch(r"[a-z][a-z0-9]*", architecture):
        return False
    shared: Container[str] = registry.own_model().SHARED
    return architecture not in shared and find_spec(f"{registry.MODELS}.{architecture}") is not None


def plugged(architecture: str, has: str = "build") -> Architecture | None:
    """A plugin's architecture that has a function; None where there is none, or where it was left out."""
    point = points.find("models", architecture)
    try:
        found = points.load(point) if point else None
    except PluginError:
        return None
    if point is None or callable(getattr(found, has, None)):
        return cast("Architecture | None", found)
    points.leave_out(point, f"{point.entry.value} has no function {has}")
    return None


def builds(source: ModelSource) -> bool:
    """Whether there is an architecture for the model; a plugin's is tried, so that what fails is left out
    before anything stands on it."""
    if plugged(source.architecture) is not None:
        with suppress(PluginError):
            build_graph(source)
    return is_known(source.architecture)


def architecture_of(source: ModelSource) -> Architecture:
    """A plugin's architecture, or the file of that name in `models/`."""
    if found := plugged(source.architecture):
        return found
    if not _is_ours(source.architecture):
        raise ModelFileError(
            source.path, f"its architecture {source.architecture[:40]!r} is not one that hetrun runs yet"
        )
    return cast(Architecture, registry.own_model(source.architecture))
