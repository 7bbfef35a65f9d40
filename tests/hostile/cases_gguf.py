"""The checklist's GGUF files."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.hostile.checklist import (
    F32,
    I32,
    Case,
    entry,
    file_of,
    gguf,
    good_gguf,
    typed,
)
from tests.hostile.trees import ARRAY, STRING, Node, Table, gguf_tree, write_gguf
from tests.unit import test_gguf_malformed as malformed
from tests.unit.test_gguf_malformed import File, array, pair, u64

NAN, INF = math.nan, math.inf
LLAMA = "llama."
VOCABULARY = "tokenizer.ggml."


def settings() -> Iterator[Case]:
    """Legal syntax, absurd values."""
    rows: tuple[tuple[str, Node, str], ...] = (
        ("block_count", 0, "'llama.block_count' must be between 1 and 4096, it is 0"),
        ("block_count", 1, "block_count is 1, but there is a tensor of blk.1"),
        ("block_count", 500, "the tensor blk.2.attn_norm.weight is missing"),
        ("block_count", 1 << 31, "'llama.block_count' must be between 1 and 4096, it is 2147483648"),
        ("block_count", "2", "'llama.block_count' must be a whole number, it is the string '2'"),
        ("block_count", 2.0, "'llama.block_count' must be a whole number, it is 2.0"),
        ("block_count", (2, 2), "'llama.block_count' must be a whole number, it is an array of 2"),
        ("context_length", 0, "'llama.context_length' must be between 1 and"),
        ("context_length", 2**32 - 1, "'llama.context_length' must be between 1 and 2147483648, it is 42"),
        ("embedding_length", 0, "'llama.embedding_length' must be between 1 and 1048576, it is 0"),
        ("embedding_length", 2**32 - 1, "'llama.embedding_length' must be between 1 and 1048576"),
        ("embedding_length", 64, "'llama.rope.dimension_count' must be between 2 and 16, it is 32"),
        ("embedding_length", 256, "token_embd.weight is 320 x 128, but the settings say 320 x 256"),
        ("feed_forward_length", 0, "'llama.feed_forward_length' must be between 1 and"),
        ("feed_forward_length", 191, "blk.0.ffn_gate.weight is 192 x 128, but the settings say 191 x 128"),
        ("attention.head_count", 0, "'llama.attention.head_count' must be between 1 and 16384, it is 0"),
        ("attention.head_count", 7, "7 heads cannot share 2 KV heads"),
        ("attention.head_count_kv", 0, "'llama.attention.head_count_kv' must be between 1 and 4, it is 0"),
        ("attention.head_count_kv", 8, "'llama.attention.head_count_kv' must be between 1 and 4, it is 8"),
        ("attention.key_length", 0, "'llama.attention.key_length' must be between 1 and 4096, it is 0"),
        ("rope.dimension_count", 3, "rope.dimension_count is 3, which is odd"),
        ("rope.dimension_count", 4096, "'llama.rope.dimension_count' must be between 2 and 32, it is 4096"),
        ("rope.freq_base", 0.0, "rope.freq_base is 0.0"),
        ("rope.freq_base", NAN, "'llama.rope.freq_base' must be a finite number, it is nan"),
        ("rope.freq_base", -INF, "'llama.rope.freq_base' must be a finite number, it is -inf"),
        ("rope.scaling.factor", 1e30, "rope.scaling.factor gives a scale of 1e-30"),
        ("rope.scaling.type", "sideways", "rope.scaling.type is 'sideways'"),
        ("attention.layer_norm_rms_epsilon", NAN, "rms_epsilon' must be a finite number, it is nan"),
        ("attention.layer_norm_rms_epsilon", -1.0, "attention.layer_norm_rms_epsilon is -1.0"),
        ("embedding_length", None, "metadata key 'llama.embedding_length' is missing"),
        ("attention.head_count", None, "metadata key 'llama.attention.head_count' is missing"),
    )  # fmt: skip
    for key, value, says in rows:
        yield gguf(f"{key} {value!r}", says, {LLAMA + key: value})
    experts = {f"{LLAMA}expert_count": 2, f"{LLAMA}expert_used_count": 3}
    yield gguf("more experts used", "'llama.expert_used_count' must be between 1 and 2, it is 3", experts)
    says = "the tensor blk.0.ffn_gate_inp.weight is missing"
    yield gguf("experts missing", says, experts | {f"{LLAMA}expert_used_count": 2})
    architectures: tuple[tuple[str, Node, str], ...] = (
        ("none", None, "metadata key 'general.architecture' is missing"),
        ("empty", "", "metadata key '.block_count' is missing"),
        ("of no one", "nothing", "metadata key 'nothing.block_count' is missing"),
        ("with a NUL", "llama\0", "metadata key 'llama\\x00.block_count' is missing"),
        ("a path", "../../etc", "metadata key '../../etc.block_count' is missing"),
        ("a number", 3, "metadata key 'general.architecture' must be a string, it is 3"),
    )
    for name, value, says in architectures:
        yield gguf(f"architecture {name}", says, {"general.architecture": value})
    keys = {key: pair for key, pair in good_gguf().get("pairs").items if key.startswith(LLAMA)}
    renamed = {f"nothing.{key.removeprefix(LLAMA)}": pair for key, pair in keys.items()}
    says = "llama.cpp cannot load it; get or convert it again (unknown model architecture: 'nothing')"
    yield gguf("architecture unknown", says, {"general.architecture": "nothing", **renamed})
    yield gguf("name of a wrong type", "'general.name' must be a string", {"general.name": 3})
    says = "'general.sampling.temp' must be a finite number"
    yield gguf("temperature NaN", says, {"general.sampling.temp": NAN})


def tensors() -> Iterator[Case]:
    """Tensors that are missing, of a wrong shape, of no type, or nowhere."""
    rows: tuple[tuple[str, Table, str], ...] = (
        ("of another shape", entry(dims=(64, 320)), "is 320 x 64, but the settings say 320 x 128"),
        ("of one row", entry(dims=(128,)), "is 1 x 128, but the settings say 320 x 128"),
        (
            "of a type for no weights",
            entry(type=26),
            "the tensor output.weight holds I32, which is not a type for weights",
        ),
        ("of 0 rows", entry(dims=(128, 0)), "its dimensions [128, 0] cannot be a tensor's"),
        ("of -1 rows", entry(dims=(128, 2**64 - 1)), "its dimensions [128, 18446744073709551615] cannot be"),
        ("of 2^62 rows", entry(dims=(128, 2**62)), "its dimensions [128, 4611686018427387904] cannot be"),
        ("as large as nothing", entry(dims=(2**32, 2**32)), "its dimensions [4294967296, 4294967296] cannot"),
        ("of 9 dimensions", entry(dims=(1,) * 9), "it has 9 dimensions, ggml has 1 to 4"),
        ("of half a block", entry(type=2, dims=(33, 320)), "rows of 33 weights are not whole Q4_0 blocks"),
        ("over another", entry(offset=0), "tensors 'token_embd.weight' and 'output.weight' share bytes"),
        ("behind the end", entry(offset=1 << 40), "tensor 'output.weight' needs bytes 1099511"),
        ("before the beginning", entry(offset=2**64 - 32), "needs bytes 18446744073709559072.."),
        ("not aligned", entry(offset=33), "its offset 33 is not a multiple of the alignment 32"),
    )  # fmt: skip
    for name, value, says in rows:
        yield gguf(f"tensor {name}", says, output__weight=value)
    for kind in (250, 4, 5, 36, 37, 38):
        says = f"its type is {kind}, which hetrun does not know"
        yield gguf(f"tensor of type {kind}", says, output__weight=entry(type=kind))
    says = "the tensor output_norm.weight is missing"
    yield gguf("tensor is missing", says, output_norm__weight=None)
    for alignment in (3, 1 << 31):
        says = f"the alignment is {alignment}, it must be a power of two up to"
        yield gguf(f"alignment {alignment}", says, {"general.alignment": alignment})
    yield gguf("alignment as text", "the alignment must be a uint32", {"general.alignment": "32"})


def vocabularies() -> Iterator[Case]:
    """What a native library would read without looking."""
    tokens = good_gguf().get("pairs").get(f"{VOCABULARY}tokens").get("value")
    types = good_gguf().get("pairs").get(f"{VOCABULARY}token_type").get("value")
    n, negative = len(tokens), tuple(-float(i) for i in range(len(tokens)))
    spm: dict[str, Node] = {"model": "llama", "scores": typed(negative, F32)}
    as_bytes = typed((*types[:9], 6, *types[10:]), I32)
    rows: tuple[tuple[str, dict[str, Node], str], ...] = (
        ("no tokens", {"tokens": None}, "tokenizer.ggml.tokens' is missing or empty"),
        ("tokens empty", {"tokens": typed((), STRING)}, "tokenizer.ggml.tokens' is missing or empty"),
        ("tokens are numbers", {"tokens": tuple(range(n))}, "tokens' must be an array of strings"),
        ("fewer tokens", {"tokens": tokens[:-9]}, "has 311 tokens, but token_embd.weight has 320 rows"),
        ("more tokens", {"tokens": (*tokens, "x")}, "has 321 tokens, but token_embd.weight has 320 rows"),
        ("fewer scores", {"scores": typed(negative[1:], F32)}, f"scores' must be an array of {n} elements"),
        ("scores NaN", {"scores": typed((*negative[1:], NAN), F32)}, "scores' holds nan for token 319"),
        ("more types", {"token_type": typed((*types, 1), I32)}, f"token_type' must be an array of {n}"),
        ("types are texts", {"token_type": tokens}, "token_type' must be an array of numbers"),
        ("bos out of the vocabulary", {"bos_token_id": n}, f"bos_token_id' must be between 0 and {n - 1}"),
        ("eos 2^32-1", {"eos_token_id": 2**32 - 1}, f"eos_token_id' must be between 0 and {n - 1}"),
        ("eos as text", {"eos_token_id": "1"}, "eos_token_id' must be a whole number"),
        ("no such model", {"model": "nope"}, "nope"),
        ("model of a wrong type", {"model": 3}, "'tokenizer.ggml.model' must be a string"),
        ("no such pre-tokenizer", {"pre": "nope"}, "nope"),
        ("merges are no pairs", {"merges": ("ab", "cd")}, "tokenizer.ggml.merges"),
        ("merges are numbers", {"merges": (1, 2)}, "tokenizer.ggml.merges"),
        ("a byte that is none", {**spm, "tokens": (*tokens[:9], "<0x-1>", *tokens[10:]),
                                 "token_type": as_bytes}, "<0x-1>"),
    )  # fmt: skip
    for name, pairs, says in rows:
        yield gguf(f"vocabulary: {name}", says, {VOCABULARY + key: value for key, value in pairs.items()})
    templates: tuple[tuple[str, Node, str], ...] = (
        ("is a number", 3, "'tokenizer.chat_template' must be a string"),
        ("does not parse", "{% for %}", "tokenizer.chat_template), line 1: "),
    )
    for name, value, says in templates:
        yield gguf(f"template {name}", says, {"tokenizer.chat_template": value})


def bytes_of_files() -> Iterator[Case]:
    """What is wrong before anybody knows what it means: the reader's own table."""
    for name, (made, says) in malformed.MALFORMED.items():
        yield file_of(f"header: {name}", made if isinstance(made, bytes) else made.bytes(), says)
    for says, start in (
        ("its text needs 943718400 bytes", pair("k", STRING, u64(900 << 20))),
        ("its text needs 1099511627776 bytes", pair("k", STRING, u64(1 << 40))),
        ("an array of 1073741824 elements needs", pair("k", ARRAY, array(0, 1 << 30))),
        ("an array of 9223372036854775808 elements", pair("k", ARRAY, array(0, 1 << 63))),
    ):
        yield file_of(f"header: {says}", File([start]).bytes(), says)
    for count in (1 << 32, 1 << 63, (1 << 64) - 1):
        yield file_of(f"header: {count} tensors", File(n_tensors=count).bytes(), f"{count} tensors, hetrun")
        yield file_of(
            f"header: {count} pairs", File(n_pairs=count).bytes(), f"{count} metadata pairs, hetrun"
        )
    yield file_of("header: key with a NUL", File([pair("k\0", 13, b"")]).bytes(), "key 'k\\x00'")
    whole = write_gguf(good_gguf())
    for name, (at, says) in borders(whole).items():
        yield file_of(f"cut behind {name}", whole[:at], says)
        yield file_of(f"cut before the end of {name}", whole[: at - 1], says)


def borders(whole: bytes) -> dict[str, tuple[int, str]]:
    """Where the parts of the good file end, and what must be said if it ends there."""
    pairs, (_, last) = good_gguf().get("pairs"), good_gguf().get("tensors").items[-1]
    data = sum(-(-len(t.get("data")) // 32) * 32 for _, t in good_gguf().get("tensors").items)
    cut, truncated = "but the file ends after", "it is truncated, download it again"
    return {
        "the version": (8, cut),
        "the counts": (24, cut),
        "the pairs": (len(write_gguf(gguf_tree(pairs, Table(()))).rstrip(b"\0")), cut),
        "the padding": (len(whole) - data, truncated),
        "a tensor": (len(whole) - len(last.get("data")), truncated),
        "all but a byte": (len(whole) - 1, truncated),
    }


# --- what is no file, and files in several parts


def in_place(name: str, says: str, make: Callable[[Path], object]) -> Case:
    """A case of something at a path that is no file."""

    def made(folder: Path) -> Path:
        make(folder / "bad.gguf")
        return folder / "bad.gguf"

    return Case(name, made, says)


def places() -> Iterator[Case]:
    yield in_place("nothing", "there is no such file", lambda path: None)
    yield in_place("empty", "is empty: download it again", Path.touch)
    yield in_place("loop of links", "Too many levels of symbolic links", lambda path: path.symlink_to(path))
    yield in_place("link to nowhere", "there is no such file", lambda path: path.symlink_to("nowhere"))
    yield in_place("directory", "has no config.json, so it is not a model folder", Path.mkdir)
    yield in_place("pipe", "is not a regular file", os.mkfifo)
    yield in_place("/dev/zero", "is not a regular file", lambda path: path.symlink_to("/dev/zero"))
    says = "it begins with the bytes 00 00 00 00, not 'GGUF'"
    yield in_place("5 GiB of zeros", says, lambda path: sparse(path, b""))
    text = File([pair("k", STRING, u64(4 << 30))]).bytes()
    yield in_place("a text of 4 GiB", "hetrun reads up to", lambda path: sparse(path, text))
    for border in (1 << 32, 1 << 33):
        says = f"tensor 'w' needs bytes {border - 64}..{border + 64}: it is truncated"
        yield in_place(
            f"one byte less behind {border >> 30} GiB", says, partial(across, border=border, more=-1)
        )


def sparse(path: Path, start: bytes, size: int = 5 << 30) -> None:
    """A file that has this size and takes no room."""
    path.write_bytes(start)
    os.truncate(path, size)


def across(path: Path, border: int, more: int = 0) -> None:
    """A sparse file whose second tensor has 64 bytes on each side of a border."""
    start = 96  # of the data
    where = border - 64 - start
    tensors = [malformed.tensor("big", [where // 4]), malformed.tensor("w", [32], offset=where)]
    head = File(tensors=tensors).bytes()
    assert start - 32 < len(head) <= start
    sparse(path, head, border + 64 + more)


def split(name: str, says: str, harm: Callable[[list[Path]], object], opened: int | str = 0) -> Case:
    """A case of a model in three parts with something done to them."""

    def make(folder: Path) -> Path:
        pairs, tensors = good_gguf().get("pairs").items, good_gguf().get("tensors").items
        paths = []
        for i, part in enumerate((tensors[:7], tensors[7:14], tensors[14:])):
            said = {"split.no": (2, i), "split.count": (2, 3), "split.tensors.count": (5, len(tensors))}
            own = tuple((k, typed(v, kind)) for k, (kind, v) in said.items())
            paths.append(folder / f"m-{i + 1:05}-of-00003.gguf")
            head = (*(pairs if i == 0 else pairs[:1]), *own)
            paths[-1].write_bytes(write_gguf(gguf_tree(Table(head), Table(part))))
        harm(paths)
        return folder / opened if isinstance(opened, str) else paths[opened]

    return Case(f"split: {name}", make, says)


def splits() -> Iterator[Case]:
    yield split("part 2 is missing", "'m-00002-of-00003.gguf' is missing", lambda p: p[1].unlink())
    yield split("part 1 is missing", "'m-00001-of-00003.gguf' is missing", lambda p: p[0].unlink(), opened=1)
    yield split("renamed", "rename it back", lambda p: p[0].rename(p[0].with_name("m.gguf")), "m.gguf")
    yield split("wrong count", "-00001-of-00004.gguf", lambda p: renumber(p[0], "split.count", 3, 4))
    says = "is part 3 of 3, but its name says 2"
    yield split("wrong number", says, lambda p: renumber(p[1], "split.no", 1, 2))
    yield split("part 2 is part 3", says, lambda p: p[1].write_bytes(p[2].read_bytes()))
    says = "m-00002-of-00003.gguf: the file is"
    yield split("part 2 is cut", says, lambda p: os.truncate(p[1], p[1].stat().st_size - 1))
    says = "their general.architecture differ"
    yield split("parts of two models", says, lambda p: edit(p[1], b"llama", b"qwen2"))
    says = "the tensor 'blk.0.attn_q.weight' is also in m-00001-of-00003.gguf"
    yield split("tensor twice", says, lambda p: edit(p[1], b"blk.1.attn_q", b"blk.0.attn_q"))


def renumber(path: Path, key: str, old: int, new: int) -> None:
    start = key.encode() + struct.pack("<I", 2)
    edit(path, start + struct.pack("<H", old), start + struct.pack("<H", new))


def edit(path: Path, old: bytes, new: bytes) -> None:
    raw = path.read_bytes()
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, new))


# --- numbers that are none


def not_numbers() -> Iterator[Case]:
    says = "the tensor 'blk.1.ffn_up.weight' has NaN or infinity among its"
    old = good_gguf().get("tensors").get("blk.1.ffn_up.weight").get("data")
    for name, value in (("NaN", NAN), ("infinity", INF)):
        new = entry(data=old[:4000] + struct.pack("<f", value) + old[4004:])
        case = gguf(f"{name} among weights", f"{says} F32 weights: 1 of 24576,", blk__1__ffn_up__weight=new)
        yield replace(case, weights=True)
    blocks = bytearray(18 * 768)
    blocks[18 * 100 : 18 * 100 + 2] = struct.pack("<e", NAN)
    new = entry(type=2, data=bytes(blocks))
    case = gguf("NaN among scales", f"{says} Q4_0 scales: 1 of 768,", blk__1__ffn_up__weight=new)
    yield replace(case, weights=True)


CASES = (
    *bytes_of_files(),
    *settings(),
    *tensors(),
    *vocabularies(),
    *places(),
    *splits(),
    *not_numbers(),
)
