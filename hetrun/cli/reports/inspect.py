"""`hetrun inspect`: everything a model says of itself, for people and for programs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from hetrun.cli.output import in_json
from hetrun.errors import printable
from hetrun.loader import expert_names, tensor_list
from hetrun.loader.formats.gguf_file import StringArray, Value
from hetrun.loader.gguf_source import GGUFModel
from hetrun.loader.hf_mapping import Setting
from hetrun.loader.hf_source import HfSource
from hetrun.loader.hub.projectors import find_vision
from hetrun.loader.open_model import open_model
from hetrun.loader.rerankers import is_reranker
from hetrun.loader.source import ModelSource
from hetrun.loader.tensor_list import TensorEntry
from hetrun.loader.vision import Vision
from hetrun.system.terminal_text import align_columns
from hetrun.system.units import counted, format_bytes
from hetrun.text.chat import ChatTemplate
from hetrun.tools import model_summary
from hetrun.tools.model_summary import PARTS, KvSummary, LayerSize

WIDTH = 80
SHOWN = 64  # elements of an array that JSON has, unless all are asked for


def print_model(path: Path, tensors: bool, full: bool, as_json: bool) -> None:
    """What a file or folder says."""
    source = open_model(path)
    found = list(tensor_list.entries(source))
    if as_json:
        print(in_json(to_json(source, found, tensors, full), indent=1))
    else:
        print("\n".join(to_text(source, found, tensors)))


# --- facts


def to_json(source: ModelSource, found: Sequence[TensorEntry], tensors: bool, full: bool) -> dict[str, Any]:
    """Everything, for programs."""
    total = sum(e.nbytes for e in found) or 1
    memory = model_summary.memory(source)
    facts = summary(source, found) | {
        "types": {
            t.type: {"tensors": t.tensors, "bytes": t.nbytes, "share": t.nbytes / total}
            for t in model_summary.by_type(found)
        },
        "parts": {layer.name: dict(layer.parts) for layer in model_summary.by_layer(found)},
        "memory": {
            "weights": total,
            "besides": memory.besides,
            "kv": {str(c): dict(kv) for c, kv in memory.kv.items()},
        },
        "metadata": {key: _plain(value, full) for key, value in metadata(source).items()},
    }
    if memory.note:
        facts["memory"]["note"] = memory.note
    if tensors:
        facts["tensors"] = [
            {"name": e.name, "type": e.type, "shape": list(e.shape), "offset": e.offset, "bytes": e.nbytes}
            for e in found
        ]
    return facts


def summary(source: ModelSource, found: Sequence[TensorEntry]) -> dict[str, Any]:
    """The facts that people ask for first."""
    gguf = source.file if isinstance(source, GGUFModel) else None
    weights = sum(e.weights for e in found)
    return {
        "path": str(source.path),
        "name": source.name,
        "architecture": source.architecture,
        "runs": model_summary.who_runs(source),
        "parameters": weights,
        "bytes": source.nbytes,
        "bits_per_weight": round(8 * sum(e.nbytes for e in found) / max(1, weights), 3),
        "format": f"GGUF {gguf.version}" if gguf else "safetensors",
        "files": len(gguf.paths) if gguf else len({e.path for e in found} - {""}),
        "layers": source.get_int("block_count", 0, 0, 1 << 31),
        "width": source.get_int("embedding_length", 0, 0, 1 << 31),
        "context": source.get_int("context_length", 0, 0, 1 << 31),
        "vocabulary": _vocabulary(source),
        "tokenizer": _tokenizer(source),
        "template": ChatTemplate.of_model(source).origin,
        "reranker": is_reranker(source),
        "pictures": _pictures(source),
    }


def _pictures(source: ModelSource) -> dict[str, Any] | None:
    """What it reads pictures with, or why it reads none; None for models that never do."""
    vision = find_vision(source)
    if isinstance(vision, Vision):
        return {"file": vision.path, "projector": vision.family, "bytes": vision.nbytes}
    return None if vision.usual else {"missing": vision.reason}


def _vocabulary(source: ModelSource) -> int:
    if isinstance(source, GGUFModel) and source.vocabulary:
        tokens = source.file.get_strings("tokenizer.ggml.tokens")
        return len(tokens) if tokens else 0
    table = source.find("token_embd.weight")
    return table.shape[0] if table else 0


def _tokenizer(source: ModelSource) -> str:
    if isinstance(source, GGUFModel) and source.vocabulary:
        kind, cuts = (source.file.get_str(f"tokenizer.ggml.{key}", "") for key in ("model", "pre"))
        return f"{kind or 'none'} ({cuts})" if cuts else kind or "none"
    return source.vocabulary or "none"


def metadata(source: ModelSource) -> Mapping[str, Value | Setting]:
    """A file's keys; of a folder what its settings are in GGUF's words."""
    if isinstance(source, GGUFModel):
        return source.file.metadata
    assert isinstance(source, HfSource)
    settings = {**source.imported.settings, **source.imported.layout}
    return {f"{source.architecture}.{key}": value for key, value in settings.items()}


def _plain(value: Value | Setting, full: bool) -> object:
    """As JSON has it; of long arrays the beginning and the length."""
    if isinstance(value, StringArray | np.ndarray | tuple):
        first = [_plain(v, full) for v in _items(value, None if full else SHOWN)]
        return first if len(first) == len(value) else {"count": len(value), "first": first}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _items(value: StringArray | np.ndarray[Any, Any] | tuple[Any, ...], most: int | None) -> list[Any]:
    n = len(value) if most is None else min(most, len(value))
    if isinstance(value, StringArray):
        return [value.raw(i).decode("utf-8", "replace") for i in range(n)]
    return value[:n].tolist() if isinstance(value, np.ndarray) else list(value[:n])


# --- text


def to_text(source: ModelSource, found: Sequence[TensorEntry], tensors: bool) -> Iterator[str]:
    """80 columns."""
    yield from _heading(summary(source, found))
    yield from _types(found)
    yield from _parts(model_summary.by_layer(found))
    yield from _memory(sum(e.nbytes for e in found), model_summary.memory(source))
    yield from ("", "metadata")
    for key, value in metadata(source).items():
        yield _cut(f"  {printable(key):<42} {_line(value)}")
    if tensors:
        rows = [("tensors", "type", "shape", "bytes")]
        for e in _experts_as_one(found):
            shape = " x ".join(map(str, e.shape))
            rows.append((f"  {printable(e.name)}", e.type, shape, format_bytes(e.nbytes)))
        yield from ("", *align_columns(rows, left={0, 1, 2}, least=(40, 7, 18, 9)))


def _experts_as_one(found: Sequence[TensorEntry]) -> Iterator[TensorEntry]:
    """Matrices that are alike but for their expert are one line: there may be tens of thousands."""
    sets: dict[object, list[TensorEntry]] = defaultdict(list)
    for e in found:
        one = expert_names.of_one(e.name)
        sets[(*one[:2], e.type, e.shape) if one else e.name].append(e)
    for key, (first, *more) in sets.items():
        if not more or not isinstance(key, tuple):
            yield first
            continue
        numbers = sorted(one[2] for e in (first, *more) if (one := expert_names.of_one(e.name)))
        which = f"{{{numbers[0]}-{numbers[-1]}}}"
        name, n = f"{key[0]}.ffn_{key[1]}.{which}.weight", len(numbers)
        yield replace(first, name=name, shape=(n, *first.shape), nbytes=n * first.nbytes)


def _heading(facts: Mapping[str, Any]) -> Iterator[str]:
    files = f" in {facts['files']} files" if facts["files"] != 1 else ""
    rows = {
        "model": facts["name"],
        "path": facts["path"],
        "format": f"{facts['format']}{files}, {format_bytes(facts['bytes'])}",
        "architecture": f"{facts['architecture']}, {facts['runs']}",
        "parameters": f"{facts['parameters']:,}, {facts['bits_per_weight']:.2f} bits each",
        "shape": ", ".join(
            [counted(facts["layers"], "layer"), f"width {facts['width']:,}", f"context {facts['context']:,}"]
        ),
        "tokenizer": f"{facts['tokenizer']}, {counted(facts['vocabulary'], 'token', ',')}",
        "template": facts["template"],
    }
    if facts["reranker"]:
        rows["reranker"] = "yes: hetrun serve ranks documents with it (/v1/rerank)"
    if seen := facts["pictures"]:
        rows["pictures"] = seen.get("missing") or f"with {seen['file']}, {format_bytes(seen['bytes'])}"
    yield from align_columns([(name, printable(str(value))) for name, value in rows.items()], least=(13,))


def _types(found: Sequence[TensorEntry]) -> Iterator[str]:
    total = sum(e.nbytes for e in found) or 1
    rows = [("types", "tensors", "bytes", "share")]
    for t in model_summary.by_type(found):
        share = f"{100 * t.nbytes / total:.1f}%"
        rows.append((f"  {t.type}", f"{t.tensors:,}", format_bytes(t.nbytes), share))
    yield from ("", *align_columns(rows, left={0}, least=(14, 8, 9, 6)))


def _parts(layers: Sequence[LayerSize]) -> Iterator[str]:
    """Layers that follow each other and are alike are one line: what each of them has, and all together."""
    used = [part for part in PARTS if any(layer.parts.get(part) for layer in layers)]
    rows = [("parts", *used, "each", "all")]
    for parts, group in groupby(layers, lambda layer: dict(layer.parts)):
        alike = list(group)
        name = alike[0].name + (f"-{alike[-1].name[4:]}" if len(alike) > 1 else "")
        each = sum(parts.values())
        sizes = [parts.get(part) for part in used] + [each, each * len(alike)]
        rows.append((f"  {printable(name)}", *("" if n is None else format_bytes(n) for n in sizes)))
    yield from ("", *align_columns(rows, left={0}, least=(14, *[9] * (len(used) + 2))))


def _memory(weights: int, memory: KvSummary) -> Iterator[str]:
    """As `hetrun plan` counts it, and in its unit."""
    if memory.kv:
        kinds = list(next(iter(memory.kv.values())))
        heads = [head for kind in kinds for head in (f"KV {kind}", "in all")]
        rows: list[tuple[str, ...]] = [("MiB of memory", "context", "weights", *heads)]
        for context, kv in memory.kv.items():
            held = weights + memory.besides
            sizes = [size for kind in kinds for size in (kv[kind], held + kv[kind])]
            rows.append(("", f"{context:,}", *map(_mib, (weights, *sizes))))
        yield from ("", *align_columns(rows, left={0}, least=(13, 8, 9, *[10, 9] * len(kinds))))
        yield f"  in all: one text, and {_mib(memory.besides)} MiB for the process, as hetrun plan counts it"
    else:
        yield from ("", "memory")
    if memory.note:
        yield f"  {printable(memory.note)}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"


def _line(value: Value | Setting) -> str:
    if isinstance(value, StringArray | np.ndarray | tuple):
        first = ", ".join(repr(v) if isinstance(v, str) else f"{v:g}" for v in _items(value, 8))
        return printable(f"{len(value):,}: {first}{', ...' if len(value) > 8 else ''}")
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return printable(value)
    return str(value).lower()


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."
