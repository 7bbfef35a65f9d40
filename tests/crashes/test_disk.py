"""Which states a power cut may leave, by the calls before it; and what the recorder writes down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.crashes.disk import PAGE, STRATEGIES, Disk, NameChange, StoredFile, closed, contents
from tests.crashes.recorder import Event, Kind, build, read_log

STATES = 200
State = dict[str, bytes]

# Run in a process with the library: each uses a folder that is there, and syncs or does not.
WRITE = "f = open(d + '/new', 'wb', 0); f.write(b'a' * 5000); f.write(b'b' * 5000); "
REPLACE = WRITE + "os.rename(d + '/new', d + '/old'); "
SYNC_FILE, SYNC_FOLDER = "os.fsync(f.fileno()); ", "os.fsync(os.open(d, os.O_RDONLY)); "


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found, reason = build(tmp_path_factory.mktemp("library"))
    if found is None:
        pytest.skip(reason)
    return found


Record = Callable[[str], tuple[Disk, list[Event]]]


@pytest.fixture
def record(library: Path, tmp_path: Path) -> Record:
    """What a line of Python does to a folder, as a disk that has seen it, and as events."""

    def run(code: str) -> tuple[Disk, list[Event]]:
        (folder := tmp_path / "d").mkdir()
        (folder / "old").write_bytes(b"old")
        disk, log = Disk(folder), tmp_path / "log"
        head = "import os, sys\nfrom pathlib import Path\nfrom tests.crashes.recorder import Recorder\n"
        body = f"d, log = sys.argv[1:]\nr = Recorder()\nwith r.recording(Path(d), Path(log)):\n {code}"
        command = [sys.executable, "-c", head + body, str(folder), str(log)]
        subprocess.run(command, check=True, env={**os.environ, "LD_PRELOAD": str(library)})
        events = read_log(log.read_bytes())
        for event in events:
            disk.apply(event)
        return disk, events

    return run


def states(disk: Disk, folder: Path) -> list[State]:
    """Many states that it may be in."""
    found = []
    for seed in range(STATES):
        disk.write_state(target := folder / f"s{seed}", Random(seed))
        found.append({str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()})
    return found


def test_a_file_that_is_renamed_and_not_synced_may_hold_anything(record: Record, tmp_path: Path) -> None:
    disk, _ = record(REPLACE)
    whole, found = b"a" * 5000 + b"b" * 5000, states(disk, tmp_path)
    held = {state["old"] for state in found}
    assert {b"old", whole, b"", bytes(10_000)} <= held
    assert any(0 < len(content) < 10_000 and content != b"old" for content in held)


def test_pages_come_in_any_order() -> None:
    file, whole = StoredFile(), b"a" * 5000 + b"b" * 5000
    for at, byte in ((0, b"a"), (5000, b"b")):
        file.apply(Event(Kind.WRITE, 1, at, 5000, "", "", byte * 5000))
    found = {contents(file, how, Random(seed)) for how in STRATEGIES for seed in range(200)}
    assert {b"", whole[:5000], whole, bytes(10_000), bytes(5000) + whole[5000:]} <= found
    assert any(one[:PAGE] == bytes(PAGE) and one[PAGE:] == whole[PAGE:] for one in found)
    assert any(
        one[:PAGE] == whole[:PAGE] and 10_000 == len(one) and one[PAGE : 2 * PAGE] != whole[PAGE : 2 * PAGE]
        for one in found
    )


def test_a_file_that_is_synced_and_renamed_is_the_old_one_or_the_new_one(
    record: Record, tmp_path: Path
) -> None:
    disk, _ = record(WRITE + SYNC_FILE + "os.rename(d + '/new', d + '/old')")
    found = states(disk, tmp_path)
    assert {state["old"] for state in found} == {b"old", b"a" * 5000 + b"b" * 5000}
    assert any("new" not in state and state["old"] == b"old" for state in found)


def test_what_is_synced_with_its_folder_is_there(record: Record, tmp_path: Path) -> None:
    disk, _ = record(REPLACE + SYNC_FILE + SYNC_FOLDER + "r.mark('done')")
    assert disk.marks == ["done"]
    assert all(state == {"old": b"a" * 5000 + b"b" * 5000} for state in states(disk, tmp_path))


def test_a_file_in_a_folder_whose_name_is_not_synced_may_be_gone(record: Record, tmp_path: Path) -> None:
    disk, _ = record(
        "os.mkdir(d + '/sub'); f = open(d + '/sub/x', 'wb', 0); f.write(b'x'); os.fsync(f.fileno()); "
        "os.fsync(os.open(d + '/sub', os.O_RDONLY))"
    )
    found = states(disk, tmp_path)
    assert {"old": b"old"} in found
    assert {"old": b"old", "sub/x": b"x"} in found
    assert all(state.get("sub/x", b"x") == b"x" for state in found)


EVERY_CALL = """
import mmap
f = os.open(d + '/f', os.O_RDWR | os.O_CREAT)
os.pwrite(f, b'abc', 5)
os.writev(f, [b'x', b'yz'])
os.ftruncate(f, 9)
os.truncate(d + '/f', 7)
os.symlink('f', d + '/s')
os.link(d + '/f', d + '/l')
os.fdatasync(f)
Path(d, 'g').mkdir()
at = os.open(d, os.O_RDONLY)
os.rename('g', 'h', src_dir_fd=at, dst_dir_fd=at)
os.rmdir(d + '/h')
os.unlink(d + '/old')
for part in (b'1', b'2'):
    with open(d + '/old', 'ab') as g:
        g.write(part)
c = os.open(d + '/c', os.O_WRONLY | os.O_CREAT)
os.sendfile(c, f, 0, 7)
open(d + '/c', 'wb').close()
m = mmap.mmap(os.open(d + '/l', os.O_RDWR), 7)
open('/dev/null', 'wb').write(b'nothing that lasts')
"""


def test_every_kind_of_call_is_seen(record: Record, tmp_path: Path) -> None:
    disk, events = record(EVERY_CALL.replace("\n", "\n "))
    assert {event.kind for event in events} == set(Kind) - {Kind.MARK, Kind.PUNCH, Kind.SYNC_ALL}
    content = {p.name: p.read_bytes() for p in (tmp_path / "d").iterdir()}
    assert content == {**dict.fromkeys("fsl", b"xyz\0\0ab"), "old": b"12", "c": b""}
    found = states(disk, tmp_path)
    assert any(
        (state.keys(), state.get("old"), state.get("c")) == (content.keys(), b"12", b"") for state in found
    )
    # What came by way of a mapping was not seen: it may be anything.
    assert len({state["f"] for state in found if "f" in state}) > 2


def test_changes_of_one_name_stay_in_order() -> None:
    def change(*names: str) -> NameChange:
        return NameChange(tuple(((0, name), 1) for name in names))

    changes = [change("a"), change("b"), change("a", "c"), change("b"), change("c")]
    assert closed(changes, {4}) == {0, 2, 4}
    assert closed(changes, {3}) == {1, 3}
    assert closed(changes, {1}) == {1}
