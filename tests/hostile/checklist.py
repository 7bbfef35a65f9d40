"""The checklist of bad files: what a case is, and the good models that cases begin with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.hostile.trees import ARRAY, STRING, Node, Table, parse_gguf, write_gguf
from tests.models import tiny
from tests.models.tiny import TinyLlama

MODEL = TinyLlama("tiny", kv_heads=2)
U32, I32, F32, BOOL, U64 = 4, 5, 6, 7, 10


@dataclass(frozen=True, slots=True)
class Case:
    """One bad model: how it is made in a folder, which gives the path to open, and what is said of it."""

    name: str
    make: Callable[[Path], Path]
    says: str
    weights: bool = False  # only those who read all weights can know

    def __str__(self) -> str:
        return self.name


def file_of(name: str, raw: Callable[[], bytes] | bytes, says: str, suffix: str = ".gguf") -> Case:
    """A case of one file with these bytes."""

    def make(folder: Path) -> Path:
        path = folder / f"bad{suffix}"
        path.write_bytes(raw if isinstance(raw, bytes) else raw())
        return path

    return Case(name, make, says)


# --- GGUF


@cache
def good_gguf() -> Table:
    """A llama of two layers that runs."""
    with TemporaryDirectory() as folder:
        return parse_gguf(tiny.write_gguf(MODEL, Path(folder) / "tiny.gguf").read_bytes())


def typed(value: Node, kind: int) -> Table:
    """A value and its type in GGUF; the type of the elements if it is a tuple."""
    if isinstance(value, tuple):
        return Table((("kind", ARRAY), ("items", kind), ("value", value)))
    return Table((("kind", kind), ("value", value)))


def kind_of(value: Node) -> int:
    """The type that converters give such a value."""
    if isinstance(value, tuple):
        return kind_of(value[0]) if value else STRING
    kinds = {bool: BOOL, int: U32, float: F32}
    return kinds.get(type(value), STRING)


def changed(pairs: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Table:
    """The good file with other pairs and tensors: a value, or a Table as it is, or None to leave it out.

    A tensor's Table is laid over what the tensor was.
    """
    tree = good_gguf()
    for key, value in (pairs or {}).items():
        new = value if isinstance(value, Table) else typed(value, kind_of(value))
        tree = _put(tree, "pairs", key, None if value is None else new)
    for name, entry in (tensors or {}).items():
        old = tree.get("tensors").get(name, Table(()))
        tree = _put(tree, "tensors", name, None if entry is None else _over(old, entry))
    return tree


def _put(tree: Table, part: str, key: str, value: Table | None) -> Table:
    """In the place of what has that key, or at the end."""
    items = tree.get(part).items
    if value is None:
        return _with(tree, part, tuple(i for i in items if i[0] != key))
    if any(k == key for k, _ in items):
        return _with(tree, part, tuple((k, value if k == key else v) for k, v in items))
    return _with(tree, part, (*items, (key, value)))


def _with(tree: Table, part: str, items: tuple[tuple[str, Node], ...]) -> Table:
    return replace(tree, items=tuple((k, Table(items) if k == part else v) for k, v in tree.items))


def _over(old: Table, new: Table) -> Table:
    for key, value in new.items:
        old = old.set(key, value)
    return old


def gguf(name: str, says: str, pairs: dict[str, Any] | None = None, **tensors: Any) -> Case:  # noqa: ANN401
    """A case of the good file with something changed; a tensor's name has __ for a dot."""
    by_name = {key.replace("__", "."): value for key, value in tensors.items()}
    return file_of(name, lambda: write_gguf(changed(pairs, by_name)), says)


def entry(**fields: Any) -> Table:  # noqa: ANN401
    """What of a tensor is other than it was: dims, type, offset, data."""
    return Table(tuple(fields.items()))


# --- folders

CONFIG = {
    "model_type": "llama",
    "vocab_size": tiny.VOCAB,
    "hidden_size": MODEL.embd,
    "intermediate_size": MODEL.ffn,
    "num_hidden_layers": MODEL.layers,
    "num_attention_heads": MODEL.heads,
    "num_key_value_heads": MODEL.kv_heads,
    "max_position_embeddings": MODEL.context,
    "rms_norm_eps": MODEL.eps,
    "rope_theta": MODEL.rope_base,
}


def hf_name(name: str) -> str:
    """What Hugging Face calls a tensor of GGUF."""
    blk, layer, rest = name.split(".", 2) if name.startswith("blk.") else ("", "", name)
    part, _, kind = rest.rpartition(".")
    return f"{f'model.layers.{layer}.' if blk else ''}{tiny.HF_MODULES[part]}.{kind}"


@cache
def good_tensors() -> dict[str, np.ndarray]:
    """The tensors of the same model as Hugging Face has them."""
    return {hf_name(name): values for name, values in tiny.draw(MODEL).items()}


@cache
def tokenizer_json() -> str:
    """The same vocabulary as the library `tokenizers` writes it."""
    merged = [merge.replace(" ", "") for merge in tiny.MERGES]
    words = {word: i for i, word in enumerate([*tiny.SPECIAL, *tiny.byte_tokens(), *merged])}
    pairs = [(a, b) for a, b in (merge.split(" ") for merge in tiny.MERGES)]
    tokenizer = Tokenizer(models.BPE(words, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(tiny.SPECIAL))
    text: str = tokenizer.to_str()
    return text


def write_folder(folder: Path) -> Path:
    """A good model in two shards."""
    names = list(good_tensors())
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[:10], names[10:])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        (folder / file).write_bytes(save({name: good_tensors()[name] for name in part}))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    settings = {"bos_token": tiny.SPECIAL[0], "eos_token": tiny.SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": tiny.CHAT_TEMPLATE})
    )
    return folder
