"""Repacking a file where it lies: the same file as elsewhere, and nothing lost whenever it is killed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import pytest

from hetrun.errors import ModelFileError, OptionError
from hetrun.loader import half_repacked
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.half_repacked import Names
from hetrun.loader.open_model import open_model
from hetrun.system import holes
from hetrun.tools.convert import in_place
from hetrun.tools.convert.reorder import RECORDS, RepackOptions, RepackReport, repack_model
from tests.convert.test_expert_records import QWEN3, merged
from tests.loader.test_gguf_split import split_llama
from tests.support.tiers import exhaustive

P = ParamSpec("P")
R = TypeVar("R")
KINDS = ("records", "merged", "again")


@cache
def before(kind: str) -> bytes:
    """A file of which records are made, one of which they are merged, and one that is just put in order."""
    if kind == "records":
        return merged(QWEN3).read_bytes()
    path = merged(QWEN3).with_name("in-place.gguf")
    repack_model(RepackOptions(merged(QWEN3), path, force=True, merged=kind == "again"))
    return path.read_bytes()


@cache
def after(kind: str) -> bytes:
    """What repacking to another file makes of it."""
    source, path = (merged(QWEN3).with_name(f"in-place-{name}.gguf") for name in ("a", "b"))
    source.write_bytes(before(kind))
    repack_model(RepackOptions(source, path, force=True, merged=kind != "records"))
    return path.read_bytes()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and pieces of which a tiny model has several."""
    monkeypatch.setattr(in_place, "WINDOW", 150_000)
    monkeypatch.setattr(in_place, "PIECE", 40_000)


def model(folder: Path, kind: str) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(before(kind))
    path.chmod(0o640)
    return path


def repack(path: Path, kind: str = "records") -> RepackReport:
    return repack_model(RepackOptions(path, force=kind == "again", merged=kind != "records", in_place=True))


@pytest.mark.parametrize("kind", KINDS)
def test_it_becomes_the_same_file_as_elsewhere(kind: str, tmp_path: Path) -> None:
    path = model(tmp_path, kind)
    report = repack(path, kind)
    assert path.read_bytes() == after(kind)
    assert (report.path, report.written) == (path, True)
    assert (report.bytes_before, report.bytes_after) == (len(before(kind)), len(after(kind)))
    assert report.notes == ((RECORDS,) if kind == "records" else ())
    assert os.listdir(tmp_path) == ["model.gguf"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_nothing_to_do(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(after("records"))
    stamp = path.stat()
    assert not repack(path).written
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (stamp.st_ino, stamp.st_mtime_ns)


# --- kills

STEPS = ("fsync", "rename", "replace", "unlink", "pwrite", "pread", "ftruncate")


def killed_at(nth: int, path: Path, kind: str) -> bool:
    """Repack in a child that is killed before or after the nth thing it asks of the disk; whether it was."""
    child = os.fork()
    if not child:
        try:
            _die_at(nth)
            repack(path, kind)
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def _die_at(nth: int) -> None:
    count = 0

    def counted(function: Callable[P, R]) -> Callable[P, R]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal count
            count += 1
            if count == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return run

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
    holes.punch = counted(holes.punch)


def points(kind: str, folder: Path, step: int) -> Iterator[Path]:
    """A folder for each moment at which the work can be cut, or every `step`-th, as the kill left it."""
    nth = 1
    while True:
        here = folder / str(nth)
        here.mkdir()
        if not killed_at(nth, model(here, kind), kind):
            return
        yield here
        shutil.rmtree(here)
        nth += step


SOME = [pytest.param(kind, 7, id=kind) for kind in KINDS]
ALL = [pytest.param(kind, 1, id=f"{kind}-each", marks=exhaustive) for kind in KINDS]


@pytest.mark.parametrize(("kind", "step"), SOME + ALL)
def test_killed_at_any_moment_nothing_is_lost(kind: str, step: int, tmp_path: Path) -> None:
    """And what is opened then is the old model, or the new one, or says what to do."""
    n, refused = 0, 0
    for here in points(kind, tmp_path, step):
        n += 1
        path = here / "model.gguf"
        if path.exists():
            open_model(path)
            assert path.read_bytes() in (before(kind), after(kind))
        else:
            refused += 1
            with pytest.raises(ModelFileError, match="is only partly repacked: `hetrun repack --in-place "):
                open_model(path)
        repack(path, kind)
        assert path.read_bytes() == after(kind)
        assert {*os.listdir(here)} <= {"model.gguf"}
    assert n > refused > 5


def test_killed_again_and_again(tmp_path: Path) -> None:
    """Each call comes a little further."""
    path, calls = model(tmp_path, "records"), 0
    while killed_at(80, path, "records"):
        calls += 1
        assert calls < 200
    assert path.read_bytes() == after("records")
    assert os.listdir(tmp_path) == ["model.gguf"]
    assert calls > 1


def test_what_a_later_call_asks_for_comes_too_late(tmp_path: Path) -> None:
    path = model(tmp_path, "records")
    assert killed_at(40, path, "records")
    report = repack(path, "merged")
    assert report.notes == ("it was finished with the options it was started with", RECORDS)
    assert path.read_bytes() == after("records")


def test_half_a_file_is_not_opened_by_any_of_its_names(tmp_path: Path) -> None:
    path = model(tmp_path, "records")
    assert killed_at(40, path, "records")
    names = Names(path)
    for name in (path, names.source, names.target):
        with pytest.raises(
            ModelFileError, match=r"is only partly repacked: `hetrun repack --in-place .*model\.gguf`"
        ):
            open_model(name)
    assert read_gguf(names.source).size == len(before("records"))  # its header is whole


# --- room


def room(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.iterdir())


def test_both_files_together_take_little_more_than_one(tmp_path: Path) -> None:
    path, most = model(tmp_path, "records"), 0
    at_first = room(tmp_path)

    def look(part: float) -> None:
        nonlocal most
        most = max(most, room(tmp_path))

    repack_model(RepackOptions(path, in_place=True), look)
    # The window, paddings of the new file, and blocks that are half used.
    assert most < at_first + (len(after("records")) - len(before("records"))) + 3 * 150_000


def test_too_little_room_is_found_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model(tmp_path, "records")
    monkeypatch.setattr(in_place, "disk_usage", lambda path: SimpleNamespace(free=1000))
    refused(path, r"model\.gguf: needs [\d,]+ bytes of disk space, but only 1,000 are free there")


def test_a_disk_that_is_full_in_the_middle_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pwrite, writes = model(tmp_path, "records"), os.pwrite, 0

    def failing(file: int, data: bytes, at: int) -> int:
        nonlocal writes
        writes += 1
        if writes == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data, at)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(
        OptionError, match=r"No space left on device; fix that and run the same command again"
    ):
        repack(path)
    repack(path)
    assert path.read_bytes() == after("records")


# --- what is refused


def refused(path: Path, why: str) -> None:
    """With nothing changed."""
    files = {p: p.read_bytes() for p in path.parent.iterdir()}
    with pytest.raises((OptionError, ModelFileError), match=why):
        repack(path)
    assert {p: p.read_bytes() for p in path.parent.iterdir()} == files


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_holes(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(file: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(holes, "punch", failing)
    refused(model(tmp_path, "records"), "this file system cannot free parts of a file")


def test_links_parts_and_other_places(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = model(tmp_path / "a", "records")
    os.symlink(path, tmp_path / "a" / "link.gguf")
    refused(tmp_path / "a" / "link.gguf", r"link\.gguf is a link to .*model\.gguf: name that file")
    os.link(path, tmp_path / "a" / "other.gguf")
    refused(path, r"model\.gguf has 2 names, and would be lost under the others")
    (tmp_path / "b").mkdir()
    refused(split_llama(tmp_path / "b")[0], "is one of several parts, which become one file")
    with pytest.raises(OptionError, match="leave out -o"):
        repack_model(RepackOptions(path, tmp_path / "x.gguf", in_place=True))


def test_a_file_that_is_in_use(tmp_path: Path) -> None:
    path = model(tmp_path, "records")
    with open(path, "rb"):
        refused(path, r"model\.gguf is in use: end the program that has it open first")
    assert repack(path).written


def test_another_process_that_repacks_it(tmp_path: Path) -> None:
    path = model(tmp_path, "records")
    with in_place._held(path):
        refused(path, r"model\.gguf is being repacked by another process")


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    path = model(tmp_path, "records")
    assert killed_at(40, path, "records")
    names = Names(path)
    path.write_bytes(before("records"))  # downloaded again, say
    refused(path, r"both exist: move one of them away")
    path.unlink()
    os.rename(names.journal, tmp_path / "journal")
    refused(path, r"has no journal, so what has been moved is unknown")
    for text in ("{}", "[1]", "no", '{"version": 2}', '{"version": 1, "inode": "x"}'):
        names.journal.write_text(text)
        refused(path, r"repack-journal: cannot be read: another hetrun wrote it")
    os.rename(tmp_path / "journal", names.journal)
    shutil.copy(names.source, tmp_path / "copy")
    os.replace(tmp_path / "copy", names.source)
    refused(path, r"is not the file that model\.gguf\.repack-journal belongs to")


def test_a_missing_model_is_just_missing(tmp_path: Path) -> None:
    assert half_repacked.reason_against(tmp_path / "x.gguf") is None
    with pytest.raises(ModelFileError, match="there is no such file"):
        repack(tmp_path / "x.gguf")
