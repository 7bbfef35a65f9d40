"""The checklist's folders of safetensors."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from tests.hostile.checklist import CONFIG, Case, write_folder
from tests.loader import test_hf_folder, test_safetensors
from tests.loader.test_safetensors import EIGHT, entry, whole

INDEX, CONFIG_FILE, TOKENIZER = "model.safetensors.index.json", "config.json", "tokenizer.json"
SETTINGS = "tokenizer_config.json"
ONE, TWO = test_hf_folder.ONE, test_hf_folder.TWO
RAN = "it-ran"  # a file that exists once something of a model was run


def folder(name: str, says: str, harm: Callable[[Path], object], opened: str = ".") -> Case:
    """A case of the good folder with something done to it."""

    def make(path: Path) -> Path:
        harm(write_folder(path))
        return path / opened

    return Case(name, make, says)


def headers() -> Iterator[Case]:
    """Shards that are wrong before anybody knows what they mean: the reader's own table, and large ones."""

    def shard(raw: bytes, path: Path) -> None:
        (path / TWO).write_bytes(raw)

    for name, (raw, says) in test_safetensors.MALFORMED.items():
        yield folder(f"shard: {name}", says, partial(shard, raw))
    many = {f"t{i}": entry(4 * i, 4 * i + 4, [1]) for i in range(100_000)}
    raw = whole(many, bytes(400_000))
    yield folder(
        "shard: 100,000 tensors of others", "is not in it, but model.safetensors.index", partial(shard, raw)
    )
    raw = whole(many, bytes(399_999))
    yield folder("shard: 100,000 tensors, one cut", "tensor 't99999' needs bytes", partial(shard, raw))
    raw = whole({"w": {**entry(), "dtype": "Q4_0"}}, EIGHT)
    yield folder("shard: GGUF's type", "its dtype 'Q4_0' is not one that hetrun knows", partial(shard, raw))
    says = f"{TWO}: the header, at byte 8: its JSON needs 100000000 bytes, but the file ends after 2"
    yield folder("shard: header of 100 MB", says, partial(shard, whole({}, length=100_000_000)))
    says = "begins with b'\\x00\\x00\\x00\\x00', not with a brace"
    yield folder("shard: header of 100 MB of nothing", says, zeros)
    for at in (4, 8, 200, -1):
        yield folder(f"shard: cut at {at}", TWO, partial(cut, at))


def zeros(path: Path) -> None:
    """A header as large as may be, which takes no room."""
    (path / TWO).write_bytes(struct.pack("<Q", 100_000_000))
    os.truncate(path / TWO, 200_000_000)


def cut(at: int, path: Path) -> None:
    (path / TWO).write_bytes((path / TWO).read_bytes()[:at])


# --- the index


def indexes() -> Iterator[Case]:
    rows: tuple[tuple[str, object, str], ...] = (
        ("leads out of the folder", "../../x.safetensors", "which is not the name of a .safetensors file in"),
        ("leads to the root", "/etc/x.safetensors", "which is not the name of a .safetensors file in this"),
        ("leads to a folder in it", "sub/x.safetensors", "which is not the name of a .safetensors file in"),
        ("has a NUL", "x\0.safetensors", "which is not the name of a .safetensors file in this folder"),
        ("names another kind", "config.json", "which is not the name of a .safetensors file in this folder"),
        ("names a number", 3, "which is not the name of a .safetensors file in this folder"),
        ("names a missing shard", "x.safetensors", "'x.safetensors' is missing: download the rest"),
        ("names the wrong shard", TWO, f"{TWO}: the tensor 'model.embed_tokens.weight' is not in it, but"),
    )
    for name, value, says in rows:
        yield folder(f"index {name}", says, partial(index, value))
    yield folder("index of nothing", "weight_map must be a table", partial(put, INDEX, {"weight_map": {}}))
    yield folder("index without a map", "weight_map must be", partial(put, INDEX, {"weight_map": None}))
    yield folder("index has a tensor twice", "'a' appears twice", twice)
    yield folder("index is nested", "is nested too deeply", partial(write, INDEX, b'{"a":' * 100_000))
    yield folder("index is a pipe", f"{INDEX}: is not a regular file", partial(pipe, INDEX))
    says = f"'{TWO}' is missing: download the rest"
    yield folder("shard is missing", says, lambda path: (path / TWO).unlink())
    yield folder("shard is a loop of links", says, lambda path: link(path / TWO, TWO))
    yield folder("shard is /dev/zero", "is not a regular file", lambda path: link(path / TWO, "/dev/zero"))
    says = "the tensor model.norm.weight is missing"
    yield folder("a tensor in no shard", says, lambda path: without(path, "model.norm.weight"))
    says = "the tensor token_embd.weight is 320 x 64, but the settings say 320 x 128"
    yield folder("a tensor of another shape", says, lambda path: reshaped(path, "model.embed_tokens.weight"))


def index(value: object, path: Path) -> None:
    found = json.loads((path / INDEX).read_text())
    found["weight_map"]["model.embed_tokens.weight"] = value
    (path / INDEX).write_text(json.dumps(found))


def twice(path: Path) -> None:
    (path / INDEX).write_text(f'{{"weight_map": {{"a": "{ONE}", "a": "{TWO}"}}}}')


def without(path: Path, name: str) -> None:
    found = json.loads((path / INDEX).read_text())
    del found["weight_map"][name]
    (path / INDEX).write_text(json.dumps(found))


def reshaped(path: Path, name: str) -> None:
    for shard in (ONE, TWO):
        tensors = load((path / shard).read_bytes())
        if name in tensors:
            tensors[name] = np.ascontiguousarray(tensors[name][:, :64])
            (path / shard).write_bytes(save(tensors))


# --- the settings


def configs() -> Iterator[Case]:
    rows: tuple[tuple[str, str, object, str], ...] = (
        ("no model", "model_type", None, "config.json: model_type is missing; folders of"),
        ("unknown model", "model_type", "nothing", "config.json: model_type is 'nothing'; folders of"),
        ("path as model", "model_type", "../../etc/passwd", "model_type is '../../etc/passwd'; folders of"),
        ("model as list", "model_type", ["llama"], "config.json: model_type must be a string"),
        ("no layers", "num_hidden_layers", 0, "num_hidden_layers must be between 1 and 4096, it is 0"),
        ("many layers", "num_hidden_layers", 500, "layers.2"),
        ("layers as text", "num_hidden_layers", "2", "num_hidden_layers must be a whole number, it is '2'"),
        ("layers as true", "num_hidden_layers", True, "num_hidden_layers must be a whole number, it is True"),
        ("no heads", "num_attention_heads", 0, "num_attention_heads must be between 1 and 16384, it is 0"),
        ("7 heads", "num_attention_heads", 7, "heads"),
        ("no KV heads", "num_key_value_heads", 0, "num_key_value_heads must be between 1 and 4, it is 0"),
        ("8 KV heads", "num_key_value_heads", 8, "num_key_value_heads must be between 1 and 4, it is 8"),
        ("no width", "hidden_size", 0, "hidden_size must be between 1 and 1048576, it is 0"),
        ("no context", "max_position_embeddings", 0, "max_position_embeddings must be between 1 and"),
        ("context of 2^63", "max_position_embeddings", 1 << 63, "max_position_embeddings must be between 1"),
        ("epsilon -1", "rms_norm_eps", -1.0, "epsilon is -1.0"),
        ("base 0", "rope_theta", 0, "config.json: a rope of base 0.0 over 32 columns"),
        ("quantised", "quantization_config", {"quant_method": "gptq"}, "weights are quantised by 'gptq'"),
        ("quantised by a list", "quantization_config", [], "quantization_config must be a table"),
        ("scaling as text", "rope_scaling", "linear", "rope_scaling must be a table"),
    )  # fmt: skip
    for name, key, value, says in rows:
        yield folder(f"config: {name}", says, partial(put, CONFIG_FILE, {key: value}))
    for name, text in (("NaN", b"NaN"), ("1e999", b"1e999"), ("-Infinity", b"-Infinity")):
        raw = json.dumps(CONFIG | {"rms_norm_eps": 0.5}).encode().replace(b"0.5", text)
        says = "config.json: rms_norm_eps must be a finite number, it is"
        yield folder(f"config: {name}", says, partial(write, CONFIG_FILE, raw))
    says = "config.json: hidden_size must be a whole number, it is inf"
    raw = json.dumps(CONFIG | {"hidden_size": 0.5}).encode().replace(b"0.5", b"1e999")
    yield folder("config: width 1e999", says, partial(write, CONFIG_FILE, raw))
    raw = json.dumps(CONFIG | {"hidden_size": 7}).encode().replace(b"7", b"1" * 5000)
    yield folder("config: endless number", "is not a JSON object: Exceeds", partial(write, CONFIG_FILE, raw))
    says = "config.json: is not a JSON object: it is nested too deeply"
    yield folder("config: nested", says, partial(write, CONFIG_FILE, b'{"a":' + b"[" * 100_000))
    yield folder(
        "config: a list", "is not a JSON object: it holds a list", partial(write, CONFIG_FILE, b"[]")
    )
    yield folder("config: empty", "config.json: is empty", partial(write, CONFIG_FILE, b""))
    yield folder("config: a pipe", "config.json: is not a regular file", partial(pipe, CONFIG_FILE))
    says = "config.json: the file, at byte 0: it needs 5368709120 bytes; hetrun reads up to"
    yield folder("config: 5 GiB", says, partial(huge, CONFIG_FILE, 5 << 30))
    yield folder("config: none", "has no config.json", lambda path: (path / CONFIG_FILE).unlink())
    yield folder("config: code", "model_type is 'mine'; folders of", code)


def code(path: Path) -> None:
    """What transformers would run with trust_remote_code."""
    (path / "mine.py").write_text(f"open({str(path / RAN)!r}, 'w')\n")
    asked = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}, "trust_remote_code": True}
    put(CONFIG_FILE, asked, path)


# --- the vocabulary and the template


def vocabularies() -> Iterator[Case]:
    says = "is not a tokenizer that can be read"
    for name, raw in (("text", b"hello"), ("no model", b"{}"), ("nested", b'{"a":' * 100_000)):
        yield folder(f"tokenizer.json: {name}", f"{TOKENIZER}: {says}", partial(write, TOKENIZER, raw))
    yield folder("tokenizer.json: empty", f"{TOKENIZER}: is empty", partial(write, TOKENIZER, b""))
    yield folder("tokenizer.json: a pipe", f"{TOKENIZER}: is not a regular file", partial(pipe, TOKENIZER))
    says = f"{TOKENIZER}: the file, at byte 0: it needs 524288000 bytes; hetrun reads up to"
    yield folder("tokenizer.json: 500 MB", says, partial(huge, TOKENIZER, 500 << 20))
    rows: tuple[tuple[str, object, str], ...] = (
        ("template as number", 3, "chat_template must be a text, or a list of named ones"),
        ("template that does not parse", "{% for %}", "line 1: Expected an expression"),
    )
    for name, value, says in rows:
        yield folder(name, says, partial(put, SETTINGS, {"chat_template": value}))
    yield folder("settings are a list", f"{SETTINGS}: is not a JSON object", partial(write, SETTINGS, b"[]"))
    says = "chat_template.jinja: byte 0 is not UTF-8"
    yield folder("template is not UTF-8", says, partial(write, "chat_template.jinja", b"\xff"))


# --- what is done to a folder


def put(name: str, values: Mapping[str, object], path: Path) -> None:
    """Other values in a JSON file; None takes them out."""
    found = {**json.loads((path / name).read_text()), **values}
    (path / name).write_text(json.dumps({k: v for k, v in found.items() if v is not None}))


def write(name: str, raw: bytes, path: Path) -> None:
    (path / name).write_bytes(raw)


def pipe(name: str, path: Path) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)


def huge(name: str, size: int, path: Path) -> None:
    """A file of that size, which takes no room."""
    os.truncate(path / name, size)


def link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


CASES = (*headers(), *indexes(), *configs(), *vocabularies())
