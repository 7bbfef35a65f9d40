"""Files that weights are read from for as long as a model is open."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping

from hetrun.errors import ModelFileError
from hetrun.graph import Extent, Weight
from hetrun.prefetch.native import OpenFile
from hetrun.prefetch.ring_buffer import ENDED, PAGE, ReadFault
from hetrun.system.file_identity import Stamp, unchanged
from hetrun.system.files import open_regular


class OpenFiles:
    """The files of some weights, open, and numbered in the order in which they were found.

    Direct reads leave the system's cache alone, which otherwise fills with what is read only once a pass, and
    pushes out what is needed: they are used wherever the file system has them.
    """

    def __init__(self, weights: Iterable[Weight], direct: bool) -> None:
        self.files: list[OpenFile] = []
        self._stamps: dict[str, Stamp] = {}
        try:
            for path, stamp in _stamps(weights).items():
                fd = _open(path)
                self.files.append(OpenFile(fd, False))
                self._stamps[path] = stamp or Stamp.of(os.fstat(fd))
                self._stamps[path].check(path, os.fstat(fd))
                self.files[-1] = OpenFile(fd, direct and not go_direct(fd))
        except BaseException:
            self.close()
            raise
        self.paths = tuple(self._stamps)
        self.numbers: Mapping[str, int] = {path: i for i, path in enumerate(self.paths)}

    def check(self) -> None:
        """Refuse to go on if a file was written to, cut or replaced."""
        with unchanged(self._stamps):  # the same path, the same file: it is the one that is open
            pass

    def explained(self, fault: ReadFault, name_at: Callable[[str, int], str]) -> ModelFileError:
        """Why bytes of one did not come; `name_at` says which tensor has a byte of a file."""
        try:
            self.check()
        except ModelFileError as e:
            return e  # which explains everything else
        path, at = self.paths[fault.file], fault.offset
        name = name_at(path, at)
        if fault.error == ENDED:
            where = f"inside the tensor {name}, at byte {at}"
            return ModelFileError(path, f"the file ends {where}: it was truncated while in use; get it again")
        return ModelFileError(path, f"reading {name} at byte {at} failed: {os.strerror(fault.error)}")

    def close(self) -> None:
        """Close all of them."""
        files, self.files = self.files, []
        for file in files:
            os.close(file.fd)


def _stamps(weights: Iterable[Weight]) -> dict[str, Stamp | None]:
    parts = (part for weight in weights for part in weight.parts)
    return {part.path: part.stamp for part in parts if isinstance(part, Extent)}


def _open(path: str) -> int:
    try:
        fd = open_regular(path)
    except OSError as e:
        raise ModelFileError(path, f"was changed while in use: {e.strerror}; open it again") from e
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # we know better what is read next
    return fd


def go_direct(fd: int) -> str:
    """Read the file directly from now on; or the reason if it cannot be, which some file systems give only
    when it is tried."""
    flag: int = getattr(os, "O_DIRECT", 0)
    if not flag:
        return "this system has no such reads"
    import fcntl  # where there are such flags

    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, before | flag)
        with mmap.mmap(-1, PAGE) as page:
            os.preadv(fd, [page], 0)
    except OSError as e:
        fcntl.fcntl(fd, fcntl.F_SETFL, before)
        return e.strerror or str(e)
    return ""
