"""The GGUF reader on bad files: every refusal is a sentence, quickly, and costs no memory."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from hetrun.errors import ModelFileError
from hetrun.loader.formats.gguf import GGUFFile, read_gguf
from tests.support.effort import effort
from tests.support.examples import examples
from tests.support.tiers import first

U8, I8, U32, BOOL, STRING, ARRAY, U64 = 0, 1, 4, 7, 8, 9, 10
F32, Q4_0, Q4_K = 0, 2, 12


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def array(kind: int, count: int, value: bytes = b"") -> bytes:
    return u32(kind) + u64(count) + value


def tensor(name: str | bytes, dims: list[int], kind: int = F32, offset: int = 0, n_dims: int = -1) -> bytes:
    n = len(dims) if n_dims < 0 else n_dims
    return text(name) + u32(n) + b"".join(u64(d) for d in dims) + u32(kind) + u64(offset)


@dataclass(frozen=True)
class File:
    """A GGUF file to be, each part of which a case may make wrong."""

    pairs: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    version: int = 3
    n_tensors: int = -1
    n_pairs: int = -1

    def bytes(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors < 0 else self.n_tensors
        n_pairs = len(self.pairs) if self.n_pairs < 0 else self.n_pairs
        head = b"GGUF" + u32(self.version) + u64(n_tensors) + u64(n_pairs)
        head += b"".join(self.pairs) + b"".join(self.tensors)
        return head + bytes(-len(head) % 32) + self.data if self.data else head


ALIGN = "general.alignment"

# name: the file, and what the message must say.
MALFORMED: dict[str, tuple[File | bytes, str]] = {
    "no magic": (b"GG", "it begins with 'GG', not 'GGUF'"),
    "other magic": (b"abcdefgh", "is not a GGUF file: it begins with 'abcd'"),
    "zip": (b"PK\x03\x04" + bytes(60), "it is a zip or PyTorch archive"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\n", "run `git lfs pull`"),
    "web page": (b"<!DOCTYPE html><html>", "it looks like a web page"),
    "ggjt": (b"tjgg" + bytes(60), "it is GGJT, the format before GGUF"),
    "safetensors": (u64(2000) + b'{"a":{}}', "it is a safetensors file"),
    "magic only": (b"GGUF", "the header, at byte 4: the version needs 4 bytes, but the file ends after 0"),
    "version 0": (File(version=0), "at byte 4: GGUF version 0 is not known"),
    "version 1": (File(version=1), "GGUF version 1 is too old: convert the model again"),
    "version 4": (File(version=4), "GGUF version 4 is not known: hetrun reads 2 and 3"),
    "big-endian": (File(version=3 << 24), "the file is big-endian"),
    "no counts": (b"GGUF" + u32(3), "the number of tensors needs 8 bytes"),
    "absurd tensors": (File(n_tensors=2**64 - 1), "byte 8: 18446744073709551615 tensors, hetrun reads up to"),
    "absurd pairs": (File(n_pairs=2**63), "byte 16: 9223372036854775808 metadata pairs, hetrun reads up to"),
    "more tensors than bytes": (
        File(n_tensors=40),
        "a table of 40 tensors needs 1320 bytes, but the file ends",
    ),
    "more pairs than bytes": (
        File(n_pairs=40),
        "a table of 40 metadata pairs needs 560 bytes, but the file ends",
    ),
    "pairs end early": (
        File([pair("k", U32, u32(1)), pair("j", U32, b"1")]),
        "key 'j', at byte 54: its value needs 4 bytes",
    ),
    "key too long": (
        File([pair("k" * 65536, U8, b"1")]),
        "its key is 65536 bytes long, it must be 1 to 65535",
    ),
    "key length absurd": (
        File([u64(2**64 - 1) + bytes(20)]),
        "byte 24: its key is 18446744073709551615 bytes",
    ),
    "key behind the end": (
        File([u64(99) + bytes(20)]),
        "metadata pair 0, at byte 32: its key needs 99 bytes",
    ),
    "empty key": (File([pair("", U32, u32(1))]), "its key is 0 bytes long"),
    "key not utf-8": (File([pair(b"k\xff", U8, b"1")]), "its key is not UTF-8: b'k\\xff'"),
    "key twice": (File([pair("k", U8, b"1")] * 2), "metadata key 'k', at byte 52: the key appears twice"),
    "unknown type": (File([pair("k", 13, b"1")]), "metadata key 'k', at byte 33: its type is 13"),
    "type absurd": (File([pair("k", 2**32 - 1, b"1")]), "its type is 4294967295, which GGUF does not have"),
    "value missing": (File([pair("k", U64, b"1234567")]), "'k', at byte 37: its value needs 8 bytes"),
    "boolean of 2": (File([pair("k", BOOL, b"\2")]), "it is a boolean and holds 2, not 0 or 1"),
    "string too long": (File([pair("k", STRING, u64(5) + b"1234")]), "its text needs 5 bytes"),
    "string absurd": (File([pair("k", STRING, u64(2**64 - 1))]), "its text needs 18446744073709551615 bytes"),
    "array of unknown": (File([pair("k", ARRAY, array(99, 1, b"1"))]), "its elements are of type 99"),
    "array of arrays": (
        File([pair("k", ARRAY, array(ARRAY, 1, array(U8, 1, b"1")))]),
        "arrays within arrays are not supported",
    ),
    "array absurd": (
        File([pair("k", ARRAY, array(U64, 2**61))]),
        "an array of 2305843009213693952 elements needs 18446744073709551616 bytes",
    ),
    "array one short": (
        File([pair("k", ARRAY, array(U32, 3, bytes(11)))]),
        "an array of 3 elements needs 12",
    ),
    "strings absurd": (File([pair("k", ARRAY, array(STRING, 2**60))]), "elements needs 9223372036854775808"),
    "strings one short": (
        File([pair("k", ARRAY, array(STRING, 2, bytes(15)))]),
        "an array of 2 elements needs 16",
    ),
    "a string in an array too long": (
        File([pair("k", ARRAY, array(STRING, 2, text("ab") + u64(9) + b"12345678"))]),
        "metadata key 'k', at byte 59: string 1 of 2 needs 17 bytes, but the file ends after 16",
    ),
    "a string in an array absurd": (
        File([pair("k", ARRAY, array(STRING, 2, u64(2**64 - 1) + bytes(8)))]),
        "byte 49: string 0 of 2 needs 18446744073709551623 bytes",
    ),
    "the next string has no room": (
        File([pair("k", ARRAY, array(STRING, 2, text("abcdefgh")))]),
        "byte 65: string 1 of 2 needs 8 bytes, but the file ends after 0",
    ),
    "booleans of 3": (
        File([pair("k", ARRAY, array(BOOL, 3, b"\0\1\3"))]),
        "booleans that are neither 0 nor 1",
    ),
    "alignment 0": (File([pair(ALIGN, U32, u32(0))]), "the alignment is 0, it must be a power of two"),
    "alignment 24": (File([pair(ALIGN, U32, u32(24))]), "the alignment is 24, it must be a power of two"),
    "alignment huge": (
        File([pair(ALIGN, U32, u32(1 << 17))]),
        "is 131072, it must be a power of two up to 65536",
    ),
    "alignment u64": (File([pair(ALIGN, U64, u64(32))]), "the alignment must be a uint32"),
    "name too long": (File(tensors=[tensor("t" * 65, [1])]), "its name is 65 bytes long, it must be 1 to 64"),
    "name not utf-8": (File(tensors=[tensor(b"t\xc3", [1])]), "tensor 0, at byte 32: its name is not UTF-8"),
    "name twice": (
        File(tensors=[tensor("t", [1]), tensor("t", [1], offset=32)], data=bytes(64)),
        "tensor 't', at byte 90: the name appears twice",
    ),
    "no dimensions": (
        File(tensors=[tensor("t", [], n_dims=0) + bytes(8)]),
        "it has 0 dimensions, ggml has 1 to 4",
    ),
    "five dimensions": (File(tensors=[tensor("t", [1] * 5)]), "tensor 't', at byte 33: it has 5 dimensions"),
    "dimensions absurd": (File(tensors=[tensor("t", [1], n_dims=2**32 - 1)]), "it has 4294967295 dimensions"),
    "dimension 0": (File(tensors=[tensor("t", [4, 0])]), "its dimensions [4, 0] cannot be a tensor's"),
    "product too large": (
        File(tensors=[tensor("t", [2**32, 2**31])]),
        "its dimensions [4294967296, 2147483648]",
    ),
    "product wraps to 0": (File(tensors=[tensor("t", [2**32, 2**32])]), "cannot be a tensor's"),
    "not whole blocks": (
        File(tensors=[tensor("t", [33, 32], Q4_0)], data=bytes(4096)),
        "its rows of 33 weights are not whole Q4_0 blocks of 32",
    ),
    "not whole blocks of another": (
        File(tensors=[tensor("t", [32], 16)], data=bytes(4096)),
        "its rows of 32 weights are not whole IQ2_XXS blocks of 256",
    ),
    "type unknown": (File(tensors=[tensor("t", [32], 99)]), "tensor 't', at byte 45: its type is 99"),
    "type removed": (File(tensors=[tensor("t", [32], 4)]), "its type is 4, which hetrun does not know"),
    "table ends early": (File(tensors=[tensor("t", [32])[:-1]]), "a table of 1 tensors needs 33 bytes"),
    "offset not aligned": (
        File(tensors=[tensor("t", [1], offset=16)], data=bytes(64)),
        "its offset 16 is not a multiple of the alignment 32",
    ),
    "truncated": (
        File(tensors=[tensor("blk.3.ffn_up.weight", [256, 8], Q4_K)], data=bytes(1151)),
        "the file is 1247 bytes but tensor 'blk.3.ffn_up.weight' needs bytes 96..1248: "
        "it is truncated, download it again",
    ),
    "no data at all": (
        File(tensors=[tensor("t", [1])]),
        "but tensor 't' needs bytes 64..68: it is truncated",
    ),
    "offset behind the end": (
        File(tensors=[tensor("t", [1], offset=2**63)], data=bytes(64)),
        "needs bytes 9223372036854775872..9223372036854775876: it is truncated",
    ),
    "offset wraps": (
        File(tensors=[tensor("t", [64], offset=2**64 - 32)], data=bytes(512)),
        "needs bytes 18446744073709551648..18446744073709551904",
    ),
    "size absurd": (
        File(tensors=[tensor("t", [2**62])], data=bytes(64)),
        "needs bytes 64..18446744073709551680: it is truncated",
    ),
    "overlap": (
        File(tensors=[tensor("a", [16]), tensor("b", [16], offset=32)], data=bytes(256)),
        "tensors 'a' and 'b' share bytes 128..160",
    ),
    "same place": (
        File(tensors=[tensor("a", [16]), tensor("b", [8])], data=bytes(256)),
        "tensors 'a' and 'b' share bytes 96..128",
    ),
}


def refused(path: Path | str) -> str:
    """The message with which the file is refused."""
    with pytest.raises(ModelFileError) as error:
        read_gguf(path)
    assert error.value.path == str(path)
    assert str(error.value).startswith(f"{path}: ".replace("\0", "\\x00"))
    return error.value.reason


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    made, says = MALFORMED[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(made if isinstance(made, bytes) else made.bytes())
    assert says in refused(path)


def test_the_file_on_which_other_readers_hang(tmp_path: Path) -> None:
    raw = File([pair("k", ARRAY, array(U8, 2**64 - 1))]).bytes()
    assert len(raw) == 49
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with effort() as took:
        assert "an array of 18446744073709551615 elements needs 18446744073709551615 bytes" in refused(path)
    assert took.calls < 1000


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(tmp_path / "none.gguf") == "there is no such file"
    assert refused(tmp_path) == "is a directory, not a file"
    assert refused("nul\0.gguf") == "is not a path: it holds a NUL"
    assert refused(str(tmp_path / ("x" * 300))) == "cannot be opened: File name too long"
    (tmp_path / "empty.gguf").touch()
    assert refused(tmp_path / "empty.gguf") == "is empty: download it again"
    os.mkfifo(tmp_path / "pipe.gguf")  # opening it would wait for a writer
    assert refused(tmp_path / "pipe.gguf") == "is not a regular file"

    def denied(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        message = refused(tmp_path / "empty.gguf")
    assert message == "may not be read: check its permissions"


@pytest.mark.parametrize(
    ("pread", "says"),
    [
        (lambda fd, count, at: b"", "the file became shorter while it was read"),
        (lambda fd, count, at: os.read(-1, count), "cannot be read: Bad file descriptor"),
    ],
)
def test_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pread: Callable[[int, int, int], bytes], says: str
) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(VALID)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        reason = refused(path)
    assert says in reason


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (pair("k", STRING, u64(300 << 20)), "its text needs 314572800 bytes; hetrun reads up to"),
        (pair("k", ARRAY, array(U8, 1 << 25)), "it has 33554432 elements, hetrun reads up to 16777216"),
        (
            pair("k", ARRAY, array(STRING, (1 << 24) + 1)),
            "it has 16777217 elements, hetrun reads up to 16777216",
        ),
        (
            pair("k", ARRAY, array(STRING, 2, u64(300 << 20))),
            "string 0 of 2 needs 314572808 bytes; hetrun reads",
        ),
    ],
)
def test_a_small_header_in_a_huge_file_costs_nothing(tmp_path: Path, start: bytes, says: str) -> None:
    """The file could hold it all, so only the limits on what a header may be help."""
    path = tmp_path / "huge.gguf"
    path.write_bytes(File([start]).bytes())
    os.truncate(path, 4 << 30)  # sparse
    tracemalloc.start()
    try:
        assert says in refused(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


VALID = File(
    pairs=[
        pair("general.architecture", STRING, text("llama")),
        pair(ALIGN, U32, u32(32)),
        pair("llama.block_count", U32, u32(2)),
        pair("f", 6, struct.pack("<f", 0.5)),
        pair("b", BOOL, b"\1"),
        pair("tokens", ARRAY, array(STRING, 4, text("a") + text("") + text("bcd" * 9) + text(b"\xff"))),
        pair("types", ARRAY, array(U32, 4, bytes(16))),
        pair("flags", ARRAY, array(BOOL, 4, b"\0\1\0\1")),
    ],
    tensors=[tensor("t", [32, 4], Q4_0), tensor("u", [8], offset=96), tensor("v", [2, 2, 2], 1, 128)],
    data=bytes(144),
).bytes()


def outcome(path: Path, raw: bytes) -> GGUFFile | ModelFileError:
    """What reading gives, which is nothing else, not slow and not large."""
    path.write_bytes(raw)
    tracemalloc.start()
    found: GGUFFile | ModelFileError
    with effort() as took:
        try:
            found = read_gguf(path)
        except ModelFileError as error:
            found = error
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert took.calls < 1000
    assert peak < len(raw) + (2 << 20)
    if isinstance(found, ModelFileError):
        assert found.reason.isprintable(), "a name from the file must not reach a terminal as it is"
    return found


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    assert isinstance(outcome(path, VALID), GGUFFile)
    for length in range(len(VALID)):
        assert isinstance(outcome(path, VALID[:length]), ModelFileError), length


@pytest.mark.parametrize("of_each", first([1, 3]))
def test_every_byte_may_be_wrong(tmp_path: Path, of_each: int) -> None:
    path, rng = tmp_path / "flip.gguf", random.Random(0)
    kinds = set()
    for at in range(len(VALID) - 144):
        for value in rng.sample((0, 255, VALID[at] ^ 1 << rng.randrange(8)), of_each):
            kinds.add(type(outcome(path, VALID[:at] + bytes([value]) + VALID[at + 1 :])))
    assert kinds == {GGUFFile, ModelFileError}


@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(VALID)),
            st.sampled_from(["set", "insert", "delete"]),
            st.one_of(st.binary(max_size=9), st.integers(0, 2**64 - 1).map(u64), st.sampled_from([VALID])),
        ),
        max_size=4,
    )
)
@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mutation_is_read_or_refused(tmp_path: Path, edits: list[tuple[int, str, bytes]]) -> None:
    raw = VALID
    for at, kind, new in edits:
        skip = {"set": len(new), "insert": 0, "delete": len(new) + 1}[kind]
        raw = raw[:at] + (b"" if kind == "delete" else new) + raw[at + skip :]
    outcome(tmp_path / "mutated.gguf", raw)
