"""Files of prompts: what is written comes back, whole or not at all, whatever happens to it."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.errors import BudgetError, UserError
from hetrun.memory.kv import prefix_file
from hetrun.memory.kv.prefix_cache import PrefixEntry
from hetrun.memory.kv.prefix_file import DIGEST, HEADER, ROW, Unusable, load, save
from tests.support.examples import examples
from tests.support.tiers import first

WHOSE, OTHERS = bytes(range(32)), bytes(32)
CONTEXT, N_VOCAB = 1000, 100


@dataclass
class Texts:
    """Rows of two tables that say which token they are of."""

    shares: bool = True
    places: int = 1 << 20
    texts: dict[int, list[int]] = field(default_factory=dict)
    second: dict[int, list[int]] = field(default_factory=dict)  # what the second table says
    given: int = 0  # sequences that there ever were

    def sizes(self, begin: int, end: int) -> list[int]:
        return [4 * (end - begin), 8 * (end - begin)]

    def export(self, seq: int, begin: int, end: int) -> Iterator[memoryview]:
        rows = np.array(self.texts[seq][begin:end])
        yield memoryview((3 * rows).astype(np.int32).tobytes())
        yield memoryview((7 * rows).astype(np.int64).tobytes())

    def restore(self, parent: int | None, begin: int, end: int, fill: Callable[[memoryview], object]) -> int:
        assert (parent is None) == (begin == 0)
        assert self.shares or parent is None
        beginning = [] if parent is None else self.texts[parent][:begin]
        if len(self.texts) == self.places:
            raise BudgetError("full")
        tables = [bytearray(size) for size in self.sizes(begin, end)]
        for table in tables:
            fill(memoryview(table))
        self.given += 1
        self.texts[self.given] = beginning + (np.frombuffer(tables[0], np.int32) // 3).tolist()
        self.second[self.given] = beginning + (np.frombuffer(tables[1], np.int64) // 7).tolist()
        return self.given

    def free(self, seq: int) -> None:
        del self.texts[seq], self.second[seq]

    def entries(self) -> list[PrefixEntry]:
        return [PrefixEntry(seq, np.array(text, np.int32)) for seq, text in self.texts.items()]


def texts(*some: list[int], shares: bool = True) -> Texts:
    return Texts(shares, texts=dict(enumerate(some)))


def written(path: Path, *some: list[int]) -> bytes:
    rows = texts(*some)
    assert save(path, WHOSE, rows.entries(), rows) == len(some)
    return path.read_bytes()


def read(
    path: Path, identity: bytes = WHOSE, context: int = CONTEXT, rows: Texts | None = None
) -> list[list[int]]:
    """The texts of a file: their rows say the same as their tokens; of a bad file nothing is left."""
    rows = rows or Texts()
    before = dict(rows.texts)
    try:
        entries = load(path, identity, rows, context, N_VOCAB)
    except Unusable:
        assert rows.texts == before
        raise
    assert {e.seq for e in entries} == set(rows.texts) - set(before)
    assert all(e.tokens.tolist() == rows.texts[e.seq] == rows.second[e.seq] for e in entries)
    return [e.tokens.tolist() for e in entries]


SYSTEM = list(range(40))
TALKS = ([*SYSTEM, 1, 2, 3], [*SYSTEM, 1, 2, 4, 5], [9] * 20, [*SYSTEM[:30], 7])
SOME = st.lists(
    st.tuples(st.integers(0, 50), st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=9)).map(
        lambda t: [*range(t[0]), *t[1]]
    ),
    max_size=6,
)


# --- what is written comes back


@given(some=SOME, shares=st.booleans())
@settings(max_examples=examples(40))
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, some: list[list[int]], shares: bool
) -> None:
    path = tmp_path_factory.mktemp("p") / "prompts"
    rows = texts(*some, shares=shares)
    save(path, WHOSE, rows.entries(), rows)
    assert read(path, rows=Texts(shares)) == some


def test_a_shared_beginning_is_stored_once(tmp_path: Path) -> None:
    once = len(written(tmp_path / "a", [*SYSTEM, 1]))
    twice = len(written(tmp_path / "b", [*SYSTEM, 1], [*SYSTEM, 2]))
    assert twice - once == ROW.size + 4 + 4 + 8


def test_the_last_used_come_first_where_there_is_no_room_for_all(tmp_path: Path) -> None:
    rows = texts(*TALKS)
    size = len(written(tmp_path / "all", *TALKS))
    assert save(tmp_path / "some", WHOSE, rows.entries(), rows, most=size - 1) == 3
    assert read(tmp_path / "some") == list(TALKS[:3])
    assert (tmp_path / "some").stat().st_size < size


@pytest.mark.parametrize("places", range(4))
def test_what_has_no_room_is_left_out(tmp_path: Path, places: int) -> None:
    written(tmp_path / "p", *TALKS)
    found = read(tmp_path / "p", rows=Texts(places=places))
    assert found == [t for t in TALKS if t in found]
    assert len(found) == places


def test_what_is_longer_than_the_context_is_left_out_with_what_begins_like_it(tmp_path: Path) -> None:
    written(tmp_path / "p", [*SYSTEM, 1, 2, 3], [*SYSTEM, 5], [9] * 20)
    assert read(tmp_path / "p", context=42) == [[9] * 20]


def test_without_a_file_there_is_nothing(tmp_path: Path) -> None:
    assert read(tmp_path / "p") == []
    (tmp_path / "p").touch()
    assert read(tmp_path / "p") == []


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.touch(0o644)
    written(path, SYSTEM)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    written(tmp_path / "link", SYSTEM)
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "real") == [SYSTEM]


# --- what is not as it was written


def refused(path: Path, identity: bytes = WHOSE) -> str:
    with pytest.raises(Unusable) as e:
        read(path, identity)
    return str(e.value)


def test_other_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "p"
    whole = written(path, *TALKS)
    assert refused(path, OTHERS) == "belongs to another model, or to other options of it"
    path.write_bytes(whole[:8] + b"\2" + whole[9:])
    assert refused(path) == "was written by another version of hetrun: its format is 2, not 1"
    path.write_bytes(b"GGUF" + whole)
    assert refused(path) == "is not a prompt cache"
    path.write_bytes(whole[:-1])
    assert refused(path) == f"is damaged: it has {len(whole) - 1} bytes and should have {len(whole)}"
    assert refused(tmp_path) == "cannot be read: is a directory, not a file"
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == "cannot be read: is not a regular file"


@cache
def talks(path: Path) -> bytes:
    """A file of several conversations; brought to the disk once."""
    return written(path, *TALKS)


@given(data=st.data())
@settings(max_examples=examples(200))
def test_any_byte_that_differs_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped"
    whole = bytearray(talks(path))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    refused(path)
    path.unlink()


def test_every_length_but_its_own_is_found(tmp_path: Path) -> None:
    whole = written(tmp_path / "p", [*SYSTEM, 1], [*SYSTEM, 2])
    for n in range(1, len(whole), 3):
        (tmp_path / "p").write_bytes(whole[:n])
        refused(tmp_path / "p")
    (tmp_path / "p").write_bytes(whole + b"x")
    refused(tmp_path / "p")


def forged(saved: list[tuple[int, int, int]], tokens: list[int], rows: int, n: int | None = None) -> bytes:
    """A file whose checksums are right, and whose sizes say what we like."""
    index = b"".join(ROW.pack(*s) for s in saved)
    text = np.array(tokens, "<i4").tobytes()
    size = HEADER.size + len(index) + len(text) + 2 * DIGEST + rows
    n = len(saved) if n is None else n
    head = HEADER.pack(prefix_file.MAGIC, prefix_file.VERSION, n, len(tokens), size, WHOSE) + index + text
    head += hashlib.blake2b(head, digest_size=DIGEST).digest()
    body = head + bytes(rows)
    return body + hashlib.blake2b(body, digest_size=DIGEST).digest()


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (forged([(-1, 0, 2)], [1, 1], 23), "is damaged: the figures in its header contradict each other"),
        (forged([(-1, 0, 3)], [1, 1], 24), "is damaged: the figures in its header contradict each other"),
        (
            forged([(-1, 0, (1 << 32) - 1)], [1, 1], 24),
            "is damaged: the figures in its header contradict each other",
        ),
        (forged([(-1, 1, 3)], [1, 1], 24), "is damaged: prompt 0 is not valid"),
        (forged([(0, 1, 3)], [1, 1], 24), "is damaged: prompt 0 is not valid"),
        (forged([(-2, 0, 2)], [1, 1], 24), "is damaged: prompt 0 is not valid"),
        (forged([(-1, 0, 0)], [], 0), "is damaged: prompt 0 is not valid"),
        (forged([(-1, 0, 1), (0, 2, 3)], [1, 1], 24), "is damaged: prompt 1 is not valid"),
        (forged([(-1, 0, 1), (0, 1, 1)], [1, 1], 24), "is damaged: prompt 1 is not valid"),
        (
            forged([(-1, 0, 2)], [1, N_VOCAB], 24),
            "is damaged: it contains tokens that the model does not have",
        ),
        (forged([], [], 0, n=99), "is damaged: 99 prompts with 0 tokens do not fit into it"),
    ],
)
def test_what_says_impossible_things_is_refused(tmp_path: Path, file: bytes, says: str) -> None:
    (tmp_path / "p").write_bytes(file)
    assert refused(tmp_path / "p") == says


def test_the_forgery_would_be_read_if_it_were_possible(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(forged([(-1, 0, 2)], [0, 0], 24))
    assert read(tmp_path / "p") == [[0, 0]]


def test_rows_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "p", [*SYSTEM, 1], [*SYSTEM, 2])
    with pytest.raises(Unusable, match="prompt 1 is not valid"):
        read(tmp_path / "p", rows=Texts(shares=False))


@pytest.mark.parametrize("fails", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_nothing_is_left_when_reading_ends_early(tmp_path: Path, fails: BaseException) -> None:
    freed: list[int] = []

    class Failing(Texts):
        def free(self, seq: int) -> None:
            super().free(seq)
            freed.append(seq)

        def restore(
            self, parent: int | None, begin: int, end: int, fill: Callable[[memoryview], object]
        ) -> int:
            if self.given:
                raise fails
            return super().restore(parent, begin, end, fill)

    written(tmp_path / "p", *TALKS)
    with pytest.raises((Unusable, KeyboardInterrupt)):
        read(tmp_path / "p", rows=Failing())
    assert freed == [1]


# --- what happens while it is written


def in_child(work: Callable[[], object]) -> int:
    """What became of a process that did this: its exit code, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dying_after(steps: int, work: Callable[[], object]) -> Callable[[], object]:
    """The same, killed at its so manyth step in the module under test."""
    left = steps

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal left
        if frame.f_code.co_filename != prefix_file.__file__:
            return None
        if event == "line":
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    def traced() -> None:
        sys.settrace(trace)  # type: ignore[arg-type]
        work()

    return traced


@pytest.mark.parametrize("apart", first([3, 1]))
def test_killed_at_any_line_the_file_is_the_old_or_the_new_one(tmp_path: Path, apart: int) -> None:
    path = tmp_path / "p"
    new = texts([*SYSTEM, 1], [*SYSTEM, 2])
    found: list[int] = []
    steps, code = 1, -signal.SIGKILL
    while code == -signal.SIGKILL:
        path.unlink(missing_ok=True)
        written(path, [5] * 30)
        code = in_child(dying_after(steps, lambda: save(path, WHOSE, new.entries(), new)))
        found.append(len(read(path)))
        steps += apart
    assert code == 0
    assert found == sorted(found)  # old ones first, new ones then, and nothing else
    assert set(found) == {1, 2}
    assert steps > 60


@pytest.mark.parametrize("apart", first([3, 1]))
def test_what_a_killed_process_left_is_written_over(tmp_path: Path, apart: int) -> None:
    rows, steps = texts(*TALKS), 1
    while not (tmp_path / ".p.new").exists():
        assert in_child(dying_after(steps, lambda: save(tmp_path / "p", WHOSE, rows.entries(), rows))) < 0
        steps += apart
    (tmp_path / ".p.new").write_bytes(b"longer than anything" * 10000)
    written(tmp_path / "p", *TALKS)
    assert read(tmp_path / "p") == list(TALKS)
    assert os.listdir(tmp_path) == ["p"]


@pytest.mark.parametrize("limit", [0, 100, 500, 1000])
def test_on_a_full_disk_the_old_file_stays(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "p"
    old, rows = written(path, [5] * 30), texts([*range(99)] * 3)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(UserError, match=r"p was not written: File too large$"):
            save(path, WHOSE, rows.entries(), rows)

    assert in_child(fill) == 0
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["p"]


def test_a_disk_that_fails_at_the_end_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = written(tmp_path / "p", [5] * 30)

    def fsync(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match="p was not written: No space left on device"):
        written(tmp_path / "p", *TALKS)
    assert (tmp_path / "p").read_bytes() == old
    assert os.listdir(tmp_path) == ["p"]


def test_two_processes_do_not_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "p"

    class Meanwhile(Texts):
        def export(self, seq: int, begin: int, end: int) -> Iterator[memoryview]:
            with pytest.raises(UserError, match="p was not written: another process is writing it"):
                written(path, SYSTEM)
            return super().export(seq, begin, end)

    rows = Meanwhile(texts={0: [5] * 30})
    save(path, WHOSE, rows.entries(), rows)
    assert read(path) == [[5] * 30]


def test_what_is_no_file_of_prompts_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"GGUF")
    with pytest.raises(
        UserError, match="model was not written: a file of that name exists and is not a prompt cache"
    ):
        written(tmp_path / "model", SYSTEM)
    assert (tmp_path / "model").read_bytes() == b"GGUF"
    with pytest.raises(UserError, match="that name is taken by something that is not a regular file"):
        written(tmp_path, SYSTEM)
    with pytest.raises(UserError, match="No such file or directory"):
        written(tmp_path / "none" / "p", SYSTEM)


def test_an_entry_that_another_one_begins_with_has_a_token_of_its_own(tmp_path: Path) -> None:
    written(tmp_path / "p", [*SYSTEM, 1], SYSTEM)
    assert read(tmp_path / "p") == [[*SYSTEM, 1], SYSTEM]
