"""A folder of Hugging Face as a source of models, through what its architecture says in GGUF's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from hetrun.errors import ModelFileError
from hetrun.graph import Weight
from hetrun.graph.pooling import Pooling
from hetrun.graph.quant import RAW
from hetrun.loader import architectures
from hetrun.loader.architectures import plugged
from hetrun.loader.formats.hf_folder import Folder, read_folder
from hetrun.loader.formats.safetensors import not_computed_with
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Importer
from hetrun.loader.source import recommended
from hetrun.system.file_identity import Stamp

TOKENIZER = "tokenizer_config.json"
POOLING = "1_Pooling/config.json"
POOLING_MODES: Mapping[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
}
TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
MAX_TEMPLATES = 64


@dataclass(frozen=True, slots=True)
class HfSource:
    """A model's folder in GGUF's words."""

    folder: Folder
    architecture: str
    imported: Imported
    settings: Config
    named: Mapping[str, Weight]  # the weights by GGUF name, which is also their own

    @property
    def path(self) -> str:
        """The folder."""
        return str(self.folder.path)

    @property
    def name(self) -> str:
        """The folder's name, or the model's in a cache of Hugging Face's."""
        parts = self.folder.path.absolute().parts
        if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
            return parts[-3].rpartition("--")[2]
        return self.folder.path.resolve().name

    @property
    def vocabulary(self) -> str:
        """Its tokenizer lies in files of its own."""
        return "huggingface" if has_vocabulary(self.folder) else ""

    @property
    def vocabulary_entries(self) -> int:
        """Most have about as many merges as tokens."""
        return 2 * self.get_int("vocab_size", 0, 0, 1 << 31) if self.vocabulary else 0

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Files of their own, else those among the tokenizer's settings, as transformers has it."""
        return template_files(self.folder) or templates_in(self.folder.settings(TOKENIZER))

    @property
    def chat_template_place(self) -> str:
        """The files."""
        return " and ".join(p for p in (TEMPLATE, MORE_TEMPLATES) if self.folder.has(p)) or TOKENIZER

    @property
    def temperature(self) -> float | None:
        """What the folder recommends."""
        return recommended(self.folder.settings("generation_config.json").get_float("temperature", -1.0))

    @property
    def pooling(self) -> Pooling:
        """What sentence-transformers would do."""
        said = self.folder.settings(POOLING)
        found = (kind for name, kind in POOLING_MODES.items() if said.get_bool(name, False))
        return next(found, "mean")

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return self.folder.nbytes

    @property
    def stamps(self) -> Mapping[str, Stamp]:
        """All shards."""
        return {shard.path: shard.stamp for shard in self.folder.shards}

    def find(self, name: str) -> Weight | None:
        """A weight by its GGUF name."""
        return self.named.get(name)

    def weights(self) -> Iterator[Weight]:
        """Every weight by its GGUF name."""
        return iter(self.named.values())

    def require_int(self, key: str, lo: int, hi: int) -> int:
        """A setting of the architecture."""
        if key == "vocab_size" and (table := self.find("token_embd.weight")):
            return table.shape[0]
        return self.settings.require_int(key, lo, hi)

    def get_int(self, key: str, default: int, lo: int, hi: int) -> int:
        """A setting of the architecture, or its default."""
        return self.settings.get_int(key, default, lo, hi)

    def get_float(self, key: str, default: float) -> float:
        """A setting of the architecture, or its default."""
        return self.settings.get_float(key, default)

    def get_str(self, key: str, default: str) -> str:
        """A setting of the architecture, or its default."""
        return self.settings.get_str(key, default)

    def get_bool(self, key: str, default: bool) -> bool:
        """A setting of the architecture, or its default."""
        return self.settings.get_bool(key, default)

    def get_numbers(self, key: str, n: int) -> tuple[float, ...] | None:
        """n numbers; a single one counts for all n; None where the key is missing."""
        return self.settings.get_numbers(key, n)


def open_folder(path: Path) -> HfSource:
    """Read what is known of a folder's model without its weights."""
    folder = read_folder(path)
    importer = find_importer(folder.config)
    imported = importer.from_hf(HfModel(folder.config, folder.tensors))
    settings = Config(folder.config.path, {**imported.settings, **imported.layout})
    for weight in imported.weights.values():
        if weight.quant is RAW:
            raise not_computed_with(folder.config.path, weight.name, RAW.name)
    named = {name: replace(weight, name=name) for name, weight in imported.weights.items()}
    return HfSource(folder, importer.name, imported, settings, named)


def reads_mxfp4(config: Config) -> bool:
    """Whether its weights are quantised, and in the way that its architecture reads."""
    method = config.section("quantization_config").get_str("quant_method", "")
    return (config.get_str("model_type", ""), method) == ("gpt_oss", "mxfp4")


def find_importer(config: Config) -> Importer:
    """The architecture of a model_type: a plugin registered under that name, or a file in `models/`."""
    if config.has("quantization_config") and not reads_mxfp4(config):
        method = config.section("quantization_config").get_str("quant_method", "a method of its own")
        config.refuse(
            f"its weights are quantised by {method[:40]!r}: get the original model, or a GGUF of it"
        )
    known: Mapping[str, str] = architectures.own_model().HF_TYPES
    model_type = config.get_str("model_type", "")
    found: object = plugged(model_type, "from_hf")
    if found is None and model_type in known:
        found = architectures.own_model(known[model_type])
    if not hasattr(found, "from_hf"):
        said = f"model_type is {model_type[:40]!r}" if model_type else "model_type is missing"
        config.refuse(f"{said}; folders of {', '.join(sorted(known))} run, of other models take a GGUF file")
    return cast(Importer, found)


def has_vocabulary(folder: Folder) -> bool:
    """Whether the folder has a tokenizer.json, or the two files of GPT-2's tokenizer, as OPT's have."""
    if folder.has("tokenizer.json"):
        return True
    kind = folder.settings(TOKENIZER).get("tokenizer_class")
    gpt2 = kind in ("GPT2Tokenizer", "GPT2TokenizerFast")
    return gpt2 and folder.has("vocab.json") and folder.has("merges.txt")


def template_files(folder: Folder) -> dict[str, str]:
    """The chat templates that have files of their own."""
    files = {"default": TEMPLATE}
    more = sorted((folder.path / MORE_TEMPLATES).glob("*.jinja"))[:MAX_TEMPLATES]
    files |= {path.stem: f"{MORE_TEMPLATES}/{path.name}" for path in more}
    found = {name: folder.text(file) for name, file in files.items()}
    return {name: text for name, text in found.items() if text}


def templates_in(settings: Config) -> dict[str, str]:
    """The chat templates among a tokenizer's settings: a text, or a list of named ones."""
    found = settings.get("chat_template")
    if isinstance(found, str):
        found = [{"name": "default", "template": found}]
    named = {}
    for one in found if isinstance(found, list) else [found] if found else []:
        name, text = (one.get("name"), one.get("template")) if isinstance(one, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ModelFileError(settings.path, "chat_template must be a text, or a list of named ones")
        if text:
            named[name] = text
    return named
