"""Prompts in a file: what the prefix cache holds, for the next process; whole or not at all.

    header   what it is: see `HEADER`
    index    for each entry: which earlier one it begins like (or none), how far, and how many tokens it has
    tokens   of each entry, int32, those that it does not share
    digest   of all that
    rows     of each entry the keys and values of the tokens that it does not share, table after table
    digest   of all that

Entries come in the order of their last use, the last used first; all numbers are little-endian.

A file is written beside its place, brought to the disk, and then takes the place of the old one: what
kills the process, or the machine, leaves the old file or the new one. Reading believes nothing: every size
follows from the header, the index and the model's own rows, and must add up to the file's before any row is
read; a file that is damaged, or is another model's, gives nothing. The digests find damage (they are
BLAKE2b's: CRC32 would be twice as fast, but 50 ms for the rows of 2000 tokens of a small model are not worth
a doubt). They are no signature: who may write the file may write any rows into it, so it is its owner's
alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from hetrun.errors import BudgetError, UserError, printable
from hetrun.memory.kv.prefix_cache import PrefixEntry
from hetrun.memory.kv.radix_tree import Tokens, TokenTree
from hetrun.system.files import open_regular, sync_names

MAGIC = b"HETRUNKV"
VERSION = 1
# Magic, version, entries, tokens that are stored, bytes of the whole file, whose rows they are.
HEADER = struct.Struct("<8sIIQQ32s")
ROW = struct.Struct("<iII")  # of the index
DIGEST = 32
MOST_ENTRIES = 4096
MOST_BYTES = 1 << 30  # of a file: a process that ends must not write for minutes
PIECE = 1 << 20  # bytes read at once of what is skipped

Fill = Callable[[memoryview], object]


class SerializedRows(Protocol):
    """The model's rows, as they go to files."""

    @property
    def shares(self) -> bool:
        """Whether rows of a beginning can be left out where another entry has them."""
        ...

    def sizes(self, begin: int, end: int) -> list[int]:
        """Bytes of each block of rows that the tokens from `begin` to `end` of a sequence are."""
        ...

    def export(self, seq: int, begin: int, end: int) -> Iterator[memoryview]:
        """These blocks, of a sequence."""
        ...

    def restore(self, parent: int | None, begin: int, end: int, fill: Fill) -> int:
        """A new sequence: the first `begin` tokens are the parent's, and `fill` writes each block of the
        rest. BudgetError without room; whatever `fill` raises leaves nothing behind."""
        ...

    def free(self, seq: int) -> None:
        """Give a sequence back."""
        ...


class Unusable(Exception):
    """Why nothing can be taken from a file: the rest of a sentence that begins with its name."""


@dataclass(frozen=True, slots=True)
class _SavedEntry:
    """An entry of a file."""

    parent: int  # an earlier one; -1: none
    shared: int
    end: int


# --- writing


def save(
    path: Path,
    identity: bytes,
    entries: Sequence[PrefixEntry],
    rows: SerializedRows,
    most: int = MOST_BYTES,
    *,
    follow: bool = True,
) -> int:
    """Write entries, the last used first and as many as `most` bytes hold; how many those were.

    `identity` are 32 bytes that only the same rows of the same model have. UserError says why nothing was
    written; what had this name before is left as it was then. Not `follow`: a symbolic link is refused.
    """
    saved, entries = _arranged(entries, rows, most)
    head = _head(identity, saved, [e.tokens[s.shared :] for s, e in zip(saved, entries, strict=True)], rows)
    try:
        if not follow and path.is_symlink():
            raise OSError(0, "that name is taken by a symbolic link")
        # What takes the place of a name never goes where a link of that name points.
        with _replacing(Path(os.path.realpath(path)) if follow else path) as file:
            digest = hashlib.blake2b(head, digest_size=DIGEST)
            file.write(head)
            for s, entry in zip(saved, entries, strict=True):
                for block in rows.export(entry.seq, s.shared, s.end):
                    digest.update(block)
                    file.write(block)
            file.write(digest.digest())
    except OSError as error:
        raise UserError(f"{_named(path)} was not written: {error.strerror or error}") from error
    return len(entries)


def _arranged(
    entries: Sequence[PrefixEntry], rows: SerializedRows, most: int
) -> tuple[list[_SavedEntry], list[PrefixEntry]]:
    """How each entry is stored, and those for which there is room."""
    saved: list[_SavedEntry] = []
    chosen: list[PrefixEntry] = []
    before, places = TokenTree(), dict[int, int]()
    size = HEADER.size + 2 * DIGEST
    for entry in entries[:MOST_ENTRIES]:
        found = before.shared(entry.tokens) if rows.shares else {}
        parent, shared = max(found.items(), key=lambda pair: pair[1], default=(-1, 0))
        end = len(entry.tokens)
        shared = min(shared, end - 1)
        size += ROW.size + 4 * (end - shared) + sum(rows.sizes(shared, end))
        if size > most:
            break
        saved.append(_SavedEntry(places.get(parent, -1), shared, end))
        before.add(entry.seq, entry.tokens)
        places[entry.seq] = len(chosen)
        chosen.append(entry)
    return saved, chosen


def _head(
    identity: bytes, saved: Sequence[_SavedEntry], tokens: Sequence[Tokens], rows: SerializedRows
) -> bytes:
    """Everything in front of the rows."""
    index = b"".join(ROW.pack(s.parent, s.shared, s.end) for s in saved)
    text = b"".join(t.astype("<i4").tobytes() for t in tokens)
    size = HEADER.size + len(index) + len(text) + 2 * DIGEST + _row_bytes(saved, rows)
    header = HEADER.pack(MAGIC, VERSION, len(saved), len(text) // 4, size, identity)
    head = header + index + text
    return head + hashlib.blake2b(head, digest_size=DIGEST).digest()


def _row_bytes(saved: Sequence[_SavedEntry], rows: SerializedRows) -> int:
    return sum(sum(rows.sizes(s.shared, s.end)) for s in saved)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another when everything in it lies on the disk.

    Until then it has a name of its own, always the same: what a killed process left there is written over.
    A lock says whether another process is still at it.
    """
    _check_ours(path)
    beside = path.with_name(f".{path.name}.new")
    with open(os.open(beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        _lock(file.fileno(), beside)
        try:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise
        sync_names(path.parent)


def _lock(fd: int, path: Path) -> None:
    """Only one process writes, and only into the file that has this name."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = os.path.samestat(os.fstat(fd), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        alone = False
    except OSError:  # no locks here: nothing is written, so nothing stays
        if not os.fstat(fd).st_size:
            with suppress(OSError):
                os.unlink(path)
        raise
    if not alone:
        raise OSError(0, "another process is writing it")


def _check_ours(path: Path) -> None:
    """What is not a prompt cache keeps its place: the wrong name was given."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "that name is taken by something that is not a regular file")
    if status.st_size:
        with open(open_regular(path), "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise OSError(0, "a file of that name exists and is not a prompt cache; choose another name")


# --- reading


def load(
    path: Path, identity: bytes, rows: SerializedRows, context: int, n_vocab: int, *, follow: bool = True
) -> list[PrefixEntry]:
    """The entries of a file, the last used first: sequences of the model from now on, which are the caller's.

    Those that are longer than the context, or have no room, are left out. Without a file there are none; of
    one that cannot be used `Unusable` says why, and nothing has changed then. Not `follow`: a symbolic link
    is refused.
    """
    try:
        file = open(open_regular(path, follow=follow), "rb")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Unusable(f"cannot be read: {error.strerror}") from error
    with file:
        try:
            return _PrefixFileReader(file, rows, context).entries(identity, n_vocab)
        except OSError as error:
            raise Unusable(f"cannot be read: {error.strerror}") from error


class _PrefixFileReader:
    """A file that is being read, and the digest of what was read."""

    def __init__(self, file: BufferedReader, rows: SerializedRows, context: int) -> None:
        self._file = file
        self._rows = rows
        self._context = context
        self._digest = hashlib.blake2b(digest_size=DIGEST)
        self._size = os.fstat(file.fileno()).st_size

    def entries(self, identity: bytes, n_vocab: int) -> list[PrefixEntry]:
        """All that there is room for; nothing, if the file is not what was written."""
        if not self._size:
            return []
        saved, tokens = self._head(identity, n_vocab)
        found: list[PrefixEntry | None] = []
        try:
            for s, own in zip(saved, tokens, strict=True):
                found.append(self._entry(s, own, found))
            self._check_digest()
        except BaseException:
            for entry in found:
                if entry:
                    self._rows.free(entry.seq)
            raise
        return [entry for entry in found if entry]

    def _head(self, identity: bytes, n_vocab: int) -> tuple[list[_SavedEntry], list[Tokens]]:
        """Everything in front of the rows, which the file's size must agree with."""
        n, n_tokens = self._header(identity)
        if n > MOST_ENTRIES or HEADER.size + n * ROW.size + 4 * n_tokens + 2 * DIGEST > self._size:
            raise Unusable(f"is damaged: {n} prompts with {n_tokens} tokens do not fit into it")
        saved = [_SavedEntry(*row) for row in ROW.iter_unpack(self._read(n * ROW.size))]
        text = np.frombuffer(self._read(4 * n_tokens), "<i4").astype(np.int32)
        self._check_digest()
        for i, s in enumerate(saved):
            most = saved[s.parent].end if 0 <= s.parent < i and self._rows.shares else 0
            if not -1 <= s.parent < i or not s.shared <= most or not s.shared < s.end:
                raise Unusable(f"is damaged: prompt {i} is not valid")
        own = [s.end - s.shared for s in saved]
        rest = self._size - self._file.tell() - DIGEST
        if sum(own) != n_tokens or _row_bytes(saved, self._rows) != rest:
            raise Unusable("is damaged: the figures in its header contradict each other")
        if n_tokens and text.max() >= n_vocab:  # below 0 are rows of pictures
            raise Unusable("is damaged: it contains tokens that the model does not have")
        return saved, np.split(text, np.cumsum(own)[:-1]) if n else []

    def _header(self, identity: bytes) -> tuple[int, int]:
        """How many entries and tokens follow."""
        if self._file.peek(len(MAGIC))[: len(MAGIC)] != MAGIC:
            raise Unusable("is not a prompt cache")
        _, version, n, n_tokens, size, whose = HEADER.unpack(self._read(HEADER.size))
        if version != VERSION:
            raise Unusable(
                f"was written by another version of hetrun: its format is {version}, not {VERSION}"
            )
        if whose != identity:
            raise Unusable("belongs to another model, or to other options of it")
        if size != self._size:
            raise Unusable(f"is damaged: it has {self._size} bytes and should have {size}")
        return n, n_tokens

    def _entry(self, s: _SavedEntry, own: Tokens, before: Sequence[PrefixEntry | None]) -> PrefixEntry | None:
        """The next entry; None where there is no room for it, or was none for the one that it needs."""
        parent = before[s.parent] if s.shared else None
        sizes = self._rows.sizes(s.shared, s.end)
        read: list[int] = []

        def fill(block: memoryview) -> None:
            self._fill(block)
            read.append(len(block))

        if (parent or not s.shared) and s.end <= self._context:
            try:
                seq = self._rows.restore(parent.seq if parent else None, s.shared, s.end, fill)
            except BudgetError:
                pass
            else:
                beginning = parent.tokens[: s.shared] if parent else own[:0]
                return PrefixEntry(seq, np.concatenate((beginning, own)))
        self._skip(sum(sizes) - sum(read))
        return None

    def _read(self, n: int) -> bytes:
        found = self._file.read(n)
        if len(found) != n:
            raise Unusable("was truncated while it was read")
        self._digest.update(found)
        return found

    def _fill(self, block: memoryview) -> None:
        at = 0
        while at < len(block):
            got = self._file.readinto(block[at:])
            if not got:
                raise Unusable("was truncated while it was read")
            at += got
        self._digest.update(block)

    def _skip(self, n: int) -> None:
        """What there is no room for is still checked."""
        while n > 0:
            n -= len(self._read(min(n, PIECE)))

    def _check_digest(self) -> None:
        expected = self._digest.digest()
        if self._read(DIGEST) != expected:
            raise Unusable("is damaged: its checksum is wrong")


def _named(path: Path) -> str:
    return printable(str(path))
