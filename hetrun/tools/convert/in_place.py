"""A model that is repacked where it lies, on a disk that has no room for a second one.

The new file grows beside the old one. As soon as some hundred megabytes of it are on the disk, and a journal
says so, their bytes in the old file become a hole: both together never take much more than one. At any
moment every byte lies in one of them, so that a later call goes on after a kill or a power cut:

    model.gguf, model.gguf.repacked                     nothing has begun; what was left is thrown away
    ... and model.gguf.repack-journal                   all is ready
    model.gguf.repacking, .repacked, .repack-journal    some of the bytes have moved
    model.gguf, and .repacking or .repack-journal       done, but for tidying up

What goes where is not written down: the headers of both files say it, and neither is touched.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import disk_usage

from hetrun.errors import ModelFileError, OptionError
from hetrun.loader import expert_names
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.formats.gguf_file import GGUFFile, TensorInfo
from hetrun.loader.half_repacked import Names
from hetrun.system import holes
from hetrun.system.files import sync_folder

WINDOW = 256 << 20  # bytes that lie in both files at once
PIECE = 4 << 20  # copied in one go
VERSION = 1

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class BytesMove:
    """Bytes of the old file, and where in the new one they belong."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Journal:
    """What must be known of a work that was cut short."""

    inode: int  # of the old file
    before: int  # its size
    after: int  # that of the new one
    copied: int = 0  # bytes of tensors that are on the disk in the new file, in the order of that


def begin(file: GGUFFile, header: Sequence[bytes], size: int, progress: Progress | None) -> None:
    """Give a model another layout: that of a header, of a file of this size."""
    names = Names(Path(file.path))
    _check(file, names)
    with _said(names), _held(names.model) as source:
        try:
            _check_unused(source, names)
            _check_holes(names)
            _check_room(names, size - file.size, sum(map(len, header)))
            _write_header(names, header, size, os.fstat(source).st_mode)
            moves = _moves(file.tensors, names)
            _write(names, Journal(os.fstat(source).st_ino, file.size, size))
        except BaseException:
            if not names.journal.exists():
                names.target.unlink(missing_ok=True)
            raise
        _go_on(names, source, moves, progress)


def finish(model: Path, progress: Progress | None) -> tuple[int, int] | None:
    """Go on with what an earlier call began; the sizes before and after, None where nothing was begun."""
    names = Names(model)
    if not names.journal.exists():
        if names.source.exists():
            raise ModelFileError(str(names.source), "has no journal, so what has been moved is unknown")
        return None
    journal = _read(names)
    with _said(names):
        if names.target.exists():
            old = names.source if names.source.exists() else names.model
            _check_both(names, journal)
            with _held(old) as source:
                _go_on(names, source, _moves(read_gguf(old).tensors, names), progress)
        else:
            _check_done(names, journal)
            _tidy(names)
    return journal.before, journal.after


def is_begun(model: Path) -> bool:
    """Whether a later call would go on with this model."""
    return Names(model).journal.exists()


# --- what is refused


def _check(file: GGUFFile, names: Names) -> None:
    if len(file.paths) > 1:
        raise OptionError(f"{names.model} is one of several parts, which become one file: use -o")
    if names.model.is_symlink():
        raise OptionError(f"{names.model} is a link to {names.model.resolve()}: name that file to repack it")
    if (links := names.model.stat().st_nlink) > 1:
        raise OptionError(f"{names.model} has {links} names, and would be lost under the others: use -o")
    if names.source.exists():
        raise OptionError(f"{names.source} exists already and does not belong to this model: move it away")


def _check_unused(source: int, names: Names) -> None:
    """Its bytes vanish, which a program that has it mapped could not know: the kernel knows of such."""
    try:
        fcntl.fcntl(source, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(source, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as e:
        if e.errno == errno.EAGAIN:
            raise OptionError(f"{names.model} is in use: end the program that has it open first") from e
        # Another's file, or a file system that does not know leases: it cannot be told.


def _check_holes(names: Names) -> None:
    """Try it on the disk that it will be done on."""
    file = os.open(names.target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(file, bytes(1 << 16), 0)
        holes.punch(file, 0, 1 << 16)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise OptionError(
            f"{names.model.parent}: this file system cannot free parts of a file, so nothing can be "
            "repacked in place there; write another file with -o"
        ) from e
    finally:
        os.close(file)


def _check_room(names: Names, more: int, header: int) -> None:
    need, free = max(0, more) + header + WINDOW, disk_usage(names.model.parent).free
    if need > free:
        raise OptionError(
            f"{names.model}: needs {need:,} bytes of disk space, but only {free:,} are free there"
        )


def _check_both(names: Names, journal: Journal) -> None:
    """Whether the files are those of the journal, and no other has taken the model's name."""
    if names.source.exists() and names.model.exists():
        raise OptionError(f"{names.model} and {names.source} both exist: move one of them away")
    old = names.source if names.source.exists() else names.model
    status = old.stat()
    if (status.st_ino, status.st_size) != (journal.inode, journal.before):
        raise ModelFileError(
            str(old), f"is not the file that {names.journal.name} belongs to: move the journal away"
        )
    if names.target.stat().st_size != journal.after:
        raise ModelFileError(str(names.target), f"is not {journal.after} bytes long, as it was when it began")


def _check_done(names: Names, journal: Journal) -> None:
    """Whether only tidying up is left."""
    if not names.model.exists() or names.model.stat().st_size != journal.after:
        what = "there is no such file, and the part of the model that was copied is lost"
        raise ModelFileError(str(names.target), what)


# --- what is moved


def _moves(tensors: Mapping[str, TensorInfo], names: Names) -> list[BytesMove]:
    """From the old file to the new one, in the order of the new one."""
    new = read_gguf(names.target)
    found = []
    for t in sorted(new.tensors.values(), key=lambda t: t.offset):
        at = t.offset
        for offset, nbytes in _places(tensors, t):
            found.append(BytesMove(offset, at, nbytes))
            at += nbytes
        if at != t.offset + t.nbytes:
            raise ModelFileError(new.path, f"its tensor {t.name} is not what it was before")
    if sum(m.nbytes for m in found) != sum(t.nbytes for t in tensors.values()):
        raise ModelFileError(new.path, "does not have all tensors of the model")
    return found


def _places(tensors: Mapping[str, TensorInfo], t: TensorInfo) -> Iterator[tuple[int, int]]:
    """Where a tensor of the new file lies in the old one: as it is, as some of another, or as several."""
    if here := tensors.get(t.name):
        yield here.offset, here.nbytes
    elif one := expert_names.of_one(t.name):
        if all_of_them := tensors.get(expert_names.whole(*one[:2])):
            yield all_of_them.offset + one[2] * t.nbytes, t.nbytes
    elif every := expert_names.of_all(t.name):
        for e in range(t.shape[0]):
            if here := tensors.get(expert_names.single(*every, e)):
                yield here.offset, here.nbytes


def _cut(moves: Iterable[BytesMove], most: int) -> Iterator[BytesMove]:
    """The same in pieces."""
    for m in moves:
        for at in range(0, m.nbytes, most):
            yield BytesMove(m.source + at, m.target + at, min(most, m.nbytes - at))


def _halves(moves: Iterable[BytesMove], copied: int) -> tuple[list[BytesMove], list[BytesMove]]:
    """What makes the first `copied` bytes, and all after it."""
    before, behind, done = [], [], 0
    for m in moves:
        n = min(m.nbytes, max(0, copied - done))
        before += [BytesMove(m.source, m.target, n)] if n else []
        behind += [BytesMove(m.source + n, m.target + n, m.nbytes - n)] if n < m.nbytes else []
        done += m.nbytes
    return before, behind


# --- moving


def _go_on(names: Names, source: int, moves: Sequence[BytesMove], progress: Progress | None) -> None:
    """From where the journal is to the end."""
    if not names.source.exists():
        os.rename(names.model, names.source)
        sync_folder(names.model.parent)
    journal, total = _read(names), sum(m.nbytes for m in moves) or 1
    before, behind = _halves(moves, journal.copied)
    _drop(source, before)  # again: the kill may have come between the journal and the holes
    copied, window = journal.copied, list[BytesMove]()
    with _opened(names.target) as target:
        for m in _cut(behind, PIECE):
            _copy(source, target, m)
            window.append(m)
            copied += m.nbytes
            if copied - journal.copied >= WINDOW or copied == total:
                os.fsync(target)
                journal = replace(journal, copied=copied)
                _write(names, journal)
                _drop(source, window)
                window = []
            if progress:
                progress(copied / total)
    os.replace(names.target, names.model)
    sync_folder(names.model.parent)
    _tidy(names)


def _copy(source: int, target: int, move: BytesMove) -> None:
    data = os.pread(source, move.nbytes, move.source)
    if len(data) < move.nbytes:
        raise OSError(errno.EIO, f"the file ends at byte {move.source + len(data)}")
    view, at = memoryview(data), move.target
    while view:
        n = os.pwrite(target, view, at)
        view, at = view[n:], at + n


def _drop(source: int, moves: Iterable[BytesMove]) -> None:
    """Make holes of what was copied; neighbours become one, for only whole blocks are given back."""
    begin = end = 0
    for m in sorted(moves, key=lambda m: m.source):
        if m.source != end:
            _punch(source, begin, end)
            begin = m.source
        end = m.source + m.nbytes
    _punch(source, begin, end)


def _punch(source: int, begin: int, end: int) -> None:
    if begin < end:
        holes.punch(source, begin, end - begin)


def _tidy(names: Names) -> None:
    names.source.unlink(missing_ok=True)
    sync_folder(names.model.parent)  # a journal of nothing is harmless, an old file without one is not
    names.journal.unlink(missing_ok=True)


# --- files


@contextmanager
def _said(names: Names) -> Iterator[None]:
    """What the disk refuses, in a sentence; whether anything was begun is said too."""
    try:
        yield
    except OSError as e:
        more = "; fix that and run the same command again to continue" if is_begun(names.model) else ""
        raise OptionError(f"{names.model} cannot be repacked: {e.strerror}{more}") from e


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def _held(path: Path) -> Iterator[int]:
    """A file that no other process repacks meanwhile; a kill lets go of it."""
    with _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise OptionError(f"{path} is being repacked by another process") from e
        if not path.exists() or os.fstat(file).st_ino != path.stat().st_ino:
            raise OptionError(f"{path} was repacked by another process just now")
        yield file


def _write_header(names: Names, header: Sequence[bytes], size: int, mode: int) -> None:
    """The new file with nothing but its header; its tensors are one hole."""
    with open(names.target, "wb") as file:
        file.writelines(header)
        file.truncate(size)
        os.fchmod(file.fileno(), mode & 0o777)
        os.fsync(file.fileno())


def _read(names: Names) -> Journal:
    try:
        found = json.loads(names.journal.read_bytes())
        if found.pop("version") != VERSION:
            raise ValueError
        return Journal(**{key: int(value) for key, value in found.items()})
    except OSError as e:
        raise ModelFileError(str(names.journal), f"cannot be read: {e.strerror}") from e
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ModelFileError(str(names.journal), "cannot be read: another hetrun wrote it") from e


def _write(names: Names, journal: Journal) -> None:
    """Replace the journal; it is on the disk when this returns, and whole at any moment."""
    new = names.journal.with_name(names.journal.name + ".new")
    with open(new, "wb") as file:
        file.write(json.dumps({"version": VERSION, **asdict(journal)}).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, names.journal)
    sync_folder(names.model.parent)
