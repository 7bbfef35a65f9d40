"""Tiny valid models of every kind, with random weights: what the mutations begin with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from tests.hostile.trees import PARSERS, Node, Table, gguf_tree, write
from tests.models import foreign, hf, tiny
from tests.models.cases_hf import (
    DELTA,
    EXPERTS,
    LLAMA3,
    MIXED,
    SHARED_EXPERT,
    SPARSE,
    TWO,
    TWO_LAYERS,
    YARN,
    longrope,
    rope,
)
from tests.models.hf import Row
from tests.models.tiny import RopeScaling, TinyLlama

SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
F16, BF16 = torch.float16, torch.bfloat16
SHARED = {**MIXED, **rope("yarn", **YARN), "num_hidden_layers": 3}
ROUTED = {**SPARSE, "moe_intermediate_size": 32, "norm_topk_prob": True}
ROWS = (
    Row("llama", "llama", {**SMALL, "attention_bias": True, **rope("llama3", **LLAMA3)}),
    Row("sharded", "llama", {**SMALL, "tie_word_embeddings": True}, style=4, shard="60KB", dtype=F16),
    Row("mistral", "mistral", {**SMALL, "sliding_window": 8}, dtype=BF16),
    Row("mixtral", "mixtral", {**SMALL, **EXPERTS}, dtype=BF16),
    Row("qwen2", "qwen2", {**SMALL, **SHARED}, dtype=F16),
    Row("qwen3", "qwen3", {**SMALL, "head_dim": 32}, style=4, dtype=BF16),
    Row("qwen3moe", "qwen3_moe", {**SMALL, **ROUTED}, dtype=BF16),
    Row("qwen35", "qwen3_5_text", {**SMALL, **DELTA, **TWO_LAYERS}, dtype=F16),
    Row("qwen35moe", "qwen3_5_moe_text", {**SMALL, **SHARED_EXPERT}, fused_experts=True),
    Row("qwen3next", "qwen3_next", {**SMALL, **SHARED_EXPERT}, dtype=BF16),
    Row("gemma3", "gemma3_text", {**SMALL, **TWO, "final_logit_softcapping": 3.0}, dtype=BF16),
    Row("phi3", "phi3", {**SMALL, **longrope()}, dtype=F16),
)
OPT = Row("opt", "opt", {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32}, dtype=F16)
NARROW = TinyLlama("f32", layers=1, embd=32, ffn=32, heads=2, kv_heads=1, head_dim=16)
GGUF = (
    replace(NARROW, rope=RopeScaling("yarn", 4.0)),
    replace(NARROW, name="q4_0", quant="Q4_0", rope=RopeScaling("llama3", 8.0)),
    replace(NARROW, name="q4_k", embd=256, ffn=256, head_dim=128, quant="Q4_K", tied=True),
)
TYPES = ("f32", "f16", "bf16", "q8_0")  # that the folders are converted to, in turn
TOOLS = (
    "{%- macro say(m) -%}{{ m.role }}: {{ m.content | trim }}{%- endmacro -%}\n"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ bos_token if loop.first }}{{ say(m) }}{{ eos_token if not loop.last }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True, slots=True, eq=False)
class Seed:
    """The files of one model as trees by name, and which of them is opened ("" is their folder)."""

    name: str
    files: Table
    opened: str = ""

    def __repr__(self) -> str:
        return self.name


def names() -> tuple[str, ...]:
    """Of the seeds, in their order, for what must know them before there is time to make any."""
    made = [f"gguf-tiny-{model.name}" for model in GGUF]
    made += [f"gguf-{kind}" for kind in (*VOCABULARIES, "split")]
    made += [f"gguf-{other.architecture}" for other in (foreign.GPT2, foreign.MAMBA)]
    for i, row in enumerate(ROWS):
        made += [f"hf-{row.name}", f"gguf-{row.name}-{TYPES[i % len(TYPES)]}"]
    return (*made, f"hf-{OPT.name}")


def named(name: str) -> Seed:
    """One of them."""
    return next(seed for seed in seeds() if seed.name == name)


@cache
def seeds() -> tuple[Seed, ...]:
    """Every seed; they are made once, and are the same every time."""
    with TemporaryDirectory(prefix="hetrun-seeds-") as folder:
        found = list(_make(Path(folder)))
    return tuple(found)


def _make(room: Path) -> list[Seed]:
    out = []
    for model in GGUF:
        path = tiny.write_gguf(model, room / f"{model.name}.gguf")
        out.append(Seed(f"gguf-tiny-{model.name}", _files(path), path.name))
    plain = out[0].files.get("f32.gguf")
    for kind, pairs in VOCABULARIES.items():
        tree = _with_vocabulary(plain, pairs)
        out.append(Seed(f"gguf-{kind}", Table(((f"{kind}.gguf", tree),)), f"{kind}.gguf"))
    out.append(_split(plain))
    for other in (foreign.GPT2, foreign.MAMBA):
        path = foreign.write(other, room / f"{other.architecture}.gguf")
        out.append(Seed(f"gguf-{other.architecture}", _files(path), path.name))
    for i, row in enumerate((*ROWS, OPT)):
        folder = room / row.name
        shutil.copytree(hf.folder(row), folder)
        _dress(folder, i)
        out.append(Seed(f"hf-{row.name}", _files(*sorted(folder.iterdir()))))
        if row is not OPT:
            quant = TYPES[i % len(TYPES)]
            made = convert_model(ConversionOptions(folder, by_option(quant), room / f"{row.name}.gguf")).path
            out.append(Seed(f"gguf-{row.name}-{quant}", _files(made), made.name))
    return out


def _files(*paths: Path) -> Table:
    return Table(tuple((p.name, parsed(p.name, p.read_bytes())) for p in paths))


def parsed(name: str, raw: bytes) -> Node:
    """A file as a tree, or as its bytes where it is of no known form; writing it gives the same bytes."""
    parse = PARSERS.get(Path(name).suffix)
    return raw if parse is None else parse(raw)


def _split(whole: Table) -> Seed:
    """A model in three files: settings only, and the tensors in two."""
    pairs, tensors = whole.get("pairs"), whole.get("tensors").items
    half = len(tensors) // 2
    parts = ((), tensors[:half], tensors[half:])
    files = []
    for i, part in enumerate(parts):
        said = {"split.no": (2, i), "split.count": (2, 3), "split.tensors.count": (5, len(tensors))}
        own = tuple((k, Table((("kind", kind), ("value", v)))) for k, (kind, v) in said.items())
        head = Table((*(() if i else pairs.items), *own))
        files.append((f"m-{i + 1:05}-of-00003.gguf", gguf_tree(head, Table(part))))
    return Seed("gguf-split", Table(tuple(files)), files[0][0])


# --- vocabularies of GGUF, each of the kinds that llama.cpp reads

_WORDS = (
    "the",
    "and",
    "of",
    "th",
    "he",
    "in",
    "er",
    "an",
    "re",
    "on",
    "you",
    "t",
    "h",
    "e",
    "a",
    "n",
    "o",
    "y",
)
_BYTES = tuple(f"<0x{b:02X}>" for b in range(256))
_SPM = ("<unk>", "<s>", "</s>", *_BYTES, "▁", *(f"▁{w}" for w in _WORDS), *_WORDS, "\n")
_WPM = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁{w}" for w in _WORDS), *_WORDS, "▁.", "▁,")
_UGM = ("<pad>", "</s>", "<unk>", "▁", *(f"▁{w}" for w in _WORDS), *_WORDS, ".", ",")
_RWKV = ("<s>", *(f"\\x{b:02x}" for b in range(256)), *_WORDS)


def _vocabulary(model: str, tokens: tuple[str, ...], types: Mapping[str, int], **more: Node) -> Table:
    """The keys of a vocabulary: its tokens padded to the rows of the tiny model, their scores and types."""
    padded = (*tokens, *(f"<extra_{i}>" for i in range(tiny.VOCAB - len(tokens))))[: tiny.VOCAB]
    kinds = tuple(types.get(t, 6 if t in _BYTES else 1) for t in padded)
    scores = tuple(-float(i) for i in range(len(padded)))
    keys: dict[str, tuple[int, int | None, Node]] = {
        "tokenizer.ggml.model": (8, None, model),
        "tokenizer.ggml.tokens": (9, 8, padded),
        "tokenizer.ggml.scores": (9, 6, scores),
        "tokenizer.ggml.token_type": (9, 5, kinds),
    }
    for key, value in more.items():
        kind = 7 if isinstance(value, bool) else 8 if isinstance(value, str) else 4
        keys[f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}"] = (kind, None, value)
    return Table(
        tuple((k, Table((("kind", kind), ("items", of), ("value", v)))) for k, (kind, of, v) in keys.items())
    )


VOCABULARIES: Mapping[str, Table] = {
    "spm": _vocabulary(
        "llama", _SPM, {"<unk>": 2, "<s>": 3, "</s>": 3}, bos_token_id=1, eos_token_id=2, unknown_token_id=0,
        add_bos_token=True, add_eos_token=False, add_space_prefix=True, chat_template=TOOLS,
    ),
    "wpm": _vocabulary(
        "bert", _WPM, {"[PAD]": 3, "[UNK]": 2, "[CLS]": 3, "[SEP]": 3, "[MASK]": 3}, bos_token_id=2,
        eos_token_id=3, unknown_token_id=1, seperator_token_id=3, padding_token_id=0, mask_token_id=4,
        token_type_count=2,
    ),
    "ugm": _vocabulary(
        "t5", _UGM, {"<pad>": 3, "</s>": 3, "<unk>": 2}, eos_token_id=1, unknown_token_id=2,
        padding_token_id=0, add_space_prefix=True, remove_extra_whitespaces=True, add_bos_token=False,
        add_eos_token=True,
    ),
    "rwkv": _vocabulary("rwkv", _RWKV, {"<s>": 3}, bos_token_id=0, eos_token_id=0),
}  # fmt: skip


def _with_vocabulary(whole: Table, pairs: Table) -> Table:
    kept = tuple((k, v) for k, v in whole.get("pairs").items if not k.startswith("tokenizer."))
    return gguf_tree(Table((*kept, *pairs.items)), whole.get("tensors"))


# --- what lies in a folder besides the model


def _dress(folder: Path, number: int) -> None:
    """The other files that people publish, in one way or another."""
    said = {"bos_token_id": tiny.BOS, "eos_token_id": [tiny.EOS], "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(said))
    config = folder / "tokenizer_config.json"
    tokenizer = json.loads(config.read_text())
    if number % 3 == 1:
        _sentencepiece().save(str(folder / "tokenizer.json"))
        tokenizer |= {
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "add_bos_token": True,
        }
        (folder / "chat_template.jinja").write_text(tokenizer.pop("chat_template"))
    if number % 3 == 2:
        tokenizer["chat_template"] = [
            {"name": "default", "template": TOOLS},
            {"name": "rag", "template": tiny.CHAT_TEMPLATE},
        ]
        special = {"bos_token": tiny.SPECIAL[0], "eos_token": {"content": tiny.SPECIAL[1]}}
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    if folder.name == OPT.name:
        (folder / "tokenizer.json").unlink()
        words = [*tiny.SPECIAL, *tiny.byte_tokens(), *(m.replace(" ", "") for m in tiny.MERGES)]
        (folder / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
        (folder / "merges.txt").write_text("\n".join(("#version: 0.2", *tiny.MERGES)))
        tokenizer |= {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}
    config.write_text(json.dumps(tokenizer))


def _sentencepiece() -> Tokenizer:
    """As llama 2 and gemma have it: U+2581 for a space, tokens for single bytes."""
    words = list(dict.fromkeys(_SPM))
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("▁", "the"), ("h", "e"), ("o", "n")]
    words += [a + b for a, b in merges if a + b not in words]
    t = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    t.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    return t


def written(files: Table) -> dict[str, bytes]:
    """The bytes of each file by name."""
    return {name: write(node) for name, node in files.items}
