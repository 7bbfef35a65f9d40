"""`hetrun plan`, `inspect` and `devices`: what is, without loading a model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hetrun import registry
from hetrun.backend import Available
from hetrun.chat import ChatTemplate
from hetrun.config import Settings
from hetrun.formats.gguf import GGUFFile, StringArray
from hetrun.llm import make_plan
from hetrun.source import GGUFModel, open_model, parameters
from hetrun.visible import visible


def print_plan(settings: Settings, as_json: bool) -> None:
    """The plan for the settings' model."""
    plans = make_plan(settings)
    print(json.dumps(plans.to_json(), indent=1) if as_json else plans.to_text())


def print_devices(as_json: bool) -> None:
    """Every backend, available or not."""
    rows = []
    for name, descriptor in registry.backends().items():
        probe = descriptor.probe()
        ok = isinstance(probe, Available)
        detail = probe.detail if isinstance(probe, Available) else probe.reason
        rows.append({"backend": name, "available": ok, "detail": detail, "summary": descriptor.summary})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['backend']:<10} {'yes' if row['available'] else 'no ':<4} {row['detail']}")


def print_model(path: Path, tensors: bool, as_json: bool) -> None:
    """What a file says of itself."""
    source = open_model(path)
    assert isinstance(source, GGUFModel)
    facts = model_facts(source)
    if tensors:
        facts["tensors"] = tensor_facts(source.file)
    if as_json:
        print(json.dumps(facts, indent=1, ensure_ascii=False))
        return
    for name, value in facts.items():
        if name != "tensors":
            print(f"{name.replace('_', ' '):<14} {_line(value)}")
    for t in facts.get("tensors", []):
        print(f"{visible(t['name']):<40} {t['type']:<6} {' x '.join(map(str, t['shape'])):<16} {t['bytes']}")


def _line(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return visible(f"{value:,}" if isinstance(value, int) else str(value))


def model_facts(source: GGUFModel) -> dict[str, Any]:
    """The facts that people ask for first."""
    file = source.file
    types: Counter[str] = Counter()
    for t in file.tensors.values():
        types[_type_name(t.quant)] += t.nbytes
    vocabulary = file.metadata.get("tokenizer.ggml.tokens")
    return {
        "path": str(file.path),
        "name": file.get_str("general.name", ""),
        "architecture": source.architecture,
        "parameters": parameters(source),
        "bytes": file.size,
        "gguf_version": file.version,
        "types": {name: f"{100 * n / max(1, types.total()):.1f}%" for name, n in types.most_common()},
        "layers": source.get_int("block_count", 0, 0, 1 << 31),
        "width": source.get_int("embedding_length", 0, 0, 1 << 31),
        "context": source.get_int("context_length", 0, 0, 1 << 31),
        "vocabulary": len(vocabulary) if isinstance(vocabulary, StringArray) else 0,
        "tokenizer": file.get_str("tokenizer.ggml.model", "none"),
        "template": ChatTemplate.of_model(file.get_str("tokenizer.chat_template", "") or None).origin,
    }


def tensor_facts(file: GGUFFile) -> list[dict[str, Any]]:
    """Every tensor."""
    return [
        {
            "name": t.name,
            "type": _type_name(t.quant),
            "shape": list(t.shape),
            "offset": t.offset,
            "bytes": t.nbytes,
        }
        for t in file.tensors.values()
    ]


def _type_name(quant: object) -> str:
    return str(getattr(quant, "name", quant))
