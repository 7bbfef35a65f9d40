"""Small vocabularies of every kind, as the keys of GGUF files, and texts with everything that Unicode has.

The keys are without "tokenizer.ggml."; a test changes what it likes and calls `written`.
"""

from __future__ import annotations

import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from struct import pack
from typing import Any

from hetrun.text.hf_tokenizer import STAND_INS
from tests.models.tiny import MERGES

Keys = Mapping[str, Any]

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTES = tuple(f"<0x{b:02X}>" for b in range(256))
WORDS = "▁t ▁a he in re on er ▁the at en ▁s or es it is ▁o ▁w nd ou ing é 你 你好 🙂 ▁▁ ▁▁▁▁".split()


def written(path: Path, keys: Keys, **others: str) -> Path:
    """A GGUF file with these keys and no tensors; `others` are keys of `general`."""
    said = {f"general.{name}": text for name, text in {"architecture": "llama", **others}.items()}
    said |= {PREFIX + key: value for key, value in keys.items() if value is not None}
    pairs = b"".join(_text(key.encode()) + _value(value) for key, value in said.items())
    path.write_bytes(b"GGUF" + pack("<IQQ", 3, 0, len(said)) + pairs)
    return path


def _text(raw: bytes) -> bytes:
    return pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:  # noqa: ANN401 - whatever a key may hold
    match value:
        case bool():
            return pack("<I?", 7, value)
        case int():
            return pack("<II", 4, value)
        case str():
            return pack("<I", 8) + _text(value.encode())
        case bytes():
            return pack("<IIQ", 9, 0, len(value)) + value
        case [int(), *_]:
            return pack("<IIQ", 9, 5, len(value)) + pack(f"<{len(value)}i", *value)
        case [float(), *_]:
            return pack("<IIQ", 9, 6, len(value)) + pack(f"<{len(value)}f", *value)
        case _:
            raws = (text if isinstance(text, bytes) else text.encode() for text in value)
            return pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, raws))


def byte_level(pre: str = "gpt-2") -> dict[str, Any]:
    """As GPT-2, llama 3 and qwen have it."""
    tokens = ["<s>", "</s>", "<|im_end|>", "<tool>", *STAND_INS, *(m.replace(" ", "") for m in MERGES)]
    types = [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (len(tokens) - 4)
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": MERGES, **ids}


def sentencepiece() -> dict[str, Any]:
    """As llama 2 and gemma have it: a score for each piece, and a token for each byte."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *WORDS, "▁", *"abcdefghijklmnoprstuw", "<tool>"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 260) + [USER_DEFINED]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    return {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}


def gemma4() -> dict[str, Any]:
    """As llama.cpp's converter writes Gemma 4's: pieces of SentencePiece, and their merges."""
    marks = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<tool>"]
    merges = ["▁ t", "h e", "▁t he", "i n", "▁ w", "▁ ▁", "▁▁ ▁▁", "你 好"]
    letters = ["▁", *"abcdefghijklmnoprstuw", "é", "你", "好"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", *marks, *BYTES, "\n", "\n\n", *letters]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [CONTROL] * 3 + [UNKNOWN, CONTROL] + [USER_DEFINED] * len(marks) + [BYTE] * 256
    types += [NORMAL] * (len(tokens) - len(types))
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    more = {"scores": [0.0] * len(tokens), "add_bos_token": True, "add_space_prefix": False}
    return {"model": "gemma4", "tokens": tokens, "token_type": types, "merges": merges, **ids, **more}


def wordpiece() -> dict[str, Any]:
    """As BERT has it, in llama.cpp's spelling: ▁ begins a word."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?你好é"]
    tokens += [f"▁{t}" for t in tokens[4:]] + ["▁the", "ing", "▁engine"]
    ids = {"bos_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1, "padding_token_id": 0}
    types = [CONTROL] * 4 + [NORMAL] * (len(tokens) - 4)
    return {"model": "bert", "tokens": tokens, "token_type": types, **ids}


def unigram() -> dict[str, Any]:
    """As T5 has it, with a table of characters."""
    tokens = ["<pad>", "</s>", "<unk>", "▁", *(WORDS[:-2]), *"abcdefghijklmnopqrstuvwxyz.,!?", "fi"]
    types = [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * (len(tokens) - 3)
    scores = [0.0] * 3 + [-1.0 - i / 7 for i in range(len(tokens) - 3)]
    table = charsmap({"ﬁ": "fi", "Ａ": "a", "Ａｂ": "ab", "\t": " ", "\u00a0": " ", "ℌ": "h", "①": ""})  # noqa: RUF001
    more = {"add_space_prefix": True, "remove_extra_whitespaces": True, "precompiled_charsmap": table}
    return {"model": "t5", "tokens": tokens, "token_type": types, "scores": scores, **more}


def rwkv() -> dict[str, Any]:
    """As RWKV has it: any bytes, escaped."""
    tokens = ["<s>", *(_escaped(bytes([b])) for b in range(256))]
    tokens += [_escaped(text.encode()) for text in (" the", "ing", "你", "你好", "é", "\n\n")]
    return {"model": "rwkv", "tokens": tokens, "token_type": [CONTROL] + [NORMAL] * (len(tokens) - 1)}


def _escaped(raw: bytes) -> str:
    names = {9: r"\t", 10: r"\n", 13: r"\r", 92: r"\\"}
    return "".join(names.get(b) or (chr(b) if 32 <= b < 127 else f"\\x{b:02x}") for b in raw)


def plamo() -> dict[str, Any]:
    """As PLaMo 2 has it."""
    tokens = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", *BYTES]
    tokens += ["the", " the", "ing", "你好", "你", "é", *"abcdefghij"]
    types = [CONTROL] * 4 + [BYTE] * 256 + [NORMAL] * (len(tokens) - 260)
    scores = [0.0] * 260 + [-1.0 - i / 8 for i in range(len(tokens) - 260)]
    return {"model": "plamo2", "tokens": tokens, "token_type": types, "scores": scores}


KINDS = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "gemma4": gemma4,
    "wordpiece": wordpiece,
    "unigram": unigram,
    "rwkv": rwkv,
    "plamo": plamo,
}


def charsmap(rules: Mapping[str, str]) -> bytes:
    """SentencePiece's table of these rules: an automaton in an array, and the texts that it leads to."""
    texts = b"".join(text.encode() + b"\0" for text in rules.values())
    offsets, at = {}, 0
    for key, text in rules.items():
        offsets[key.encode()] = at
        at += len(text.encode()) + 1
    units, free, states = [0] * 1024, set(range(1, 1024)), set(range(768))

    def place(node: int, key: bytes) -> None:
        nexts = sorted({k[len(key)] for k in offsets if k.startswith(key) and len(k) > len(key)})
        wanted = [*nexts, 0] if key in offsets else nexts
        state = next(s for s in sorted(states) if all(s ^ c in free for c in wanted))
        states.remove(state)
        free.difference_update(state ^ c for c in wanted)
        units[node] |= (state ^ node) << 10
        if key in offsets:
            units[node] |= 1 << 8
            units[state] = 1 << 31 | offsets[key]
        for c in nexts:
            units[state ^ c] = c
            place(state ^ c, key + bytes([c]))

    place(0, b"")
    raw = b"".join(unit.to_bytes(4, "little") for unit in units)
    return len(raw).to_bytes(4, "little") + raw + texts


# --- texts


@cache
def corpus() -> tuple[str, ...]:
    """Every script, in pieces of some fifty characters, and what else people and attackers write."""
    scripts: dict[str, list[str]] = defaultdict(list)
    for letter in map(chr, range(sys.maxunicode + 1)):
        if name := unicodedata.name(letter, ""):
            scripts[name.split()[0]].append(letter)
    random, texts = Random(0), list(ODD)
    for letters in scripts.values():
        some = letters if len(letters) <= 250 else random.sample(letters, 250)
        texts += (_with_spaces(some[i : i + 50], random) for i in range(0, len(some), 50))
    texts += (random.randbytes(200).decode("utf-8", "replace") for _ in range(40))
    return tuple(texts)


def _with_spaces(letters: Iterable[str], random: Random) -> str:
    return "".join(letter + (" " if random.random() < 0.2 else "") for letter in letters)


ODD = (
    "",
    " ",
    "The engine runs what the planner decides.",
    "  two  spaces, then\n\na\ttab \r\n and trailing   ",
    "It's they've we'll I'M DON'T 'tis o'clock",
    "3 33 333 4444 55555 1234567 3.14 1,000,000 a1b22c333 ½Ⅷ ٣٤ ४",
    "".join(map(chr, range(256))),
    "a\0b\0\0c\x7f\x80\x9f\u00ad",
    "e\u0301a\u0308 Z\u0351\u036b\u0343\u036a\u0302a\u0334\u0334\u032b\u0319 \u0f71\u0f72",
    "👋🏽 👩‍👩‍👧‍👦 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🇩🇪🇫🇷 ❤️ ☺︎ 1️⃣ 🏳️‍🌈",
    "\u200b\u200c\u200d\u200e\u200f\u2028\u2029\u202e\u2060\ufeff\ufffe\uffff\U0010ffff\ue000",
    "<s>x</s> <|im_end|>\n<tool>y</tool> <0x41> <|im_end| > <<s>> <unk>[UNK][CLS] [EMPTY_1]",
    "Grüße aus Köln, 你好，世界。日本語のテキスト 한국어 हिन्दी ไทย עברית العربية",  # noqa: RUF001
    "ﬁ Ａｂ Ａ ℌ ① \u00a0x",  # noqa: RUF001
    " " * 3000,
    "a" * 3000,
    "1" * 3000,
    "-" * 3000,
    "\n" * 300,
    "é🙂" * 300,
    "the " * 300,
    "\ufffd" * 30,
)
