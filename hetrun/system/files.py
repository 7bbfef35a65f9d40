"""Files: what the user named is read if it is a regular one; ours are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path


class NotAFile(OSError):
    """What a path leads to is no regular file; strerror says what it is."""


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """A descriptor of a regular file, for reading; OSError says why there is none. Not `follow`: also for a
    symbolic link."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait for someone to write into it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except ValueError as error:
        raise NotAFile(errno.EINVAL, "is not a path: it holds a NUL") from error
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    raise NotAFile(
        errno.EINVAL, "is a directory, not a file" if stat.S_ISDIR(mode) else "is not a regular file"
    )


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """A text file of at most `most` bytes; ValueError says what is wrong with it."""
    try:
        with open(open_regular(path), "rb") as file:
            content = file.read(most + 1)
            if len(content) > most:
                raise ValueError(f"has {os.fstat(file.fileno()).st_size} bytes; it may have {most}")
    except OSError as error:
        raise ValueError(error.strerror) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 text") from None


def replace_file(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file that is this user's alone, and its folder if there is none. Readers see the old content or
    the new one, also if several processes write at once.

    `durable`: that holds after a power cut, too, and the new one is on the disk when this returns. Otherwise
    nothing waits for the disk, and after a power cut the file may hold anything: its reader must find out.
    """
    import tempfile  # not needed by those who only read

    if durable:
        make_folder(path.parent)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    if durable:
        sync_names(path.parent)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it that are missing; all of them are on the disk when this returns."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for folder in reversed(missing):
        sync_names(folder.parent)


def sync_file(path: Path) -> None:
    """Have on the disk what a file holds; its name is there when its folder is synced."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sync_names(folder: Path) -> None:
    """Have the names in a folder on the disk, where the file system can: some cannot, and need not."""
    with suppress(OSError):
        sync_folder(folder)


def is_template(given: str) -> bool:
    """Whether this is a template's text; no path holds blocks of Jinja."""
    return "{{" in given or "{%" in given
