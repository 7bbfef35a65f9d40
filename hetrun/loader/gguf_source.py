"""A GGUF file as a source of weights and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetrun.errors import ModelFileError
from hetrun.graph import Extent, Weight
from hetrun.graph.pooling import Pooling
from hetrun.graph.quant import QuantType
from hetrun.loader.formats.gguf import GGUFFile, TensorInfo
from hetrun.loader.source import POOLINGS, recommended
from hetrun.system.file_identity import Stamp


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
    def vocabulary_entries(self) -> int:
        """The lengths of two lists of the file."""
        lists = (self.file.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
        return sum(len(found) for found in lists if isinstance(found, Sequence))

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


def _weight(info: TensorInfo) -> Weight:
    """A vector is one row; the matrices of a tensor with more dimensions lie on top of each other."""
    if not isinstance(info.quant, QuantType):
        raise ModelFileError(
            info.path,
            f"the tensor {info.name} holds {info.quant}, which is not a type for weights; get "
            "another file of the model",
        )
    cols = info.shape[-1]
    row_bytes = info.quant.row_bytes(cols)
    rows = info.nbytes // row_bytes
    part = Extent(info.path, info.offset, rows, row_bytes, row_bytes, info.stamp)
    return Weight(info.name, (rows, cols), info.quant, (part,))
