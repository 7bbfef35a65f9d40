"""Which versions of glibc's functions a library needs, and older ones in their place.

A linker takes the newest version of each function that this machine has, and the library then loads with no
older glibc. Most functions have been there for long, and a new version only says that they moved
(pthread_create, from libpthread into libc with 2.34) or that errors are told in another way (exp, with 2.29).
glibc keeps the old versions: what a library needs is rewritten to the newest that is old enough. Where there
is none, that is an error.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

GLIBC = re.compile(r"GLIBC_(\d+)\.(\d+)(?:\.(\d+))?")
NEEDED = 1  # a tag of .dynamic
FIRST = "GLIBC_2.2.5"  # on x86-64: each of glibc's libraries has it
ANY = 1  # the number of no version
Version = tuple[int, ...]


class TooNew(Exception):
    """A library needs a function that an old glibc does not have."""


@dataclass(frozen=True)
class Section:
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True)
class Symbol:
    name: str
    is_defined: bool
    number: int  # of its version; 0 and 1: none
    place: int  # of that number in the file


@dataclass(frozen=True)
class Need:
    """A version that some library is to have."""

    file: str
    name: str
    number: int
    place: int  # of struct vernaux in the file


@dataclass
class Elf:
    """What a shared library of 64 bits says of its symbols."""

    data: bytearray
    sections: dict[str, Section] = field(init=False)

    def __post_init__(self) -> None:
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a little-endian ELF file of 64 bits")
        (start,) = struct.unpack_from("<Q", self.data, 0x28)
        size, count, names = struct.unpack_from("<HHH", self.data, 0x3A)
        rows = [struct.unpack_from("<IIQQQQIIQQ", self.data, start + i * size) for i in range(count)]
        self._all = [Section(row[4], row[5], row[6], row[7]) for row in rows]
        self.sections = {
            self._text(self._all[names], row[0]): s for row, s in zip(rows, self._all, strict=True)
        }

    def _text(self, strings: Section, at: int) -> str:
        a = strings.offset + at
        return self.data[a : self.data.index(0, a)].decode()

    @cached_property
    def _strings(self) -> Section:
        return self._all[self.sections[".dynsym"].link]

    def symbols(self) -> Iterator[Symbol]:
        table, versions = self.sections[".dynsym"], self.sections.get(".gnu.version")
        for i in range(1, table.size // 24):
            name, _, _, section = struct.unpack_from("<IBBH", self.data, table.offset + 24 * i)
            place = versions.offset + 2 * i if versions else 0
            number = struct.unpack_from("<H", self.data, place)[0] & 0x7FFF if versions else 0
            yield Symbol(self._text(self._strings, name), bool(section), number, place)

    def needs(self) -> list[Need]:
        """The versions of other libraries' symbols."""
        table = self.sections.get(".gnu.version_r")
        found: list[Need] = []
        at = table.offset if table else 0
        for _ in range(table.info if table else 0):
            _, count, file, aux, following = struct.unpack_from("<HHIII", self.data, at)
            place = at + aux
            for _ in range(count):
                _, _, number, name, step = struct.unpack_from("<IHHII", self.data, place)
                texts = self._text(self._strings, file), self._text(self._strings, name)
                found.append(Need(*texts, number, place))
                place += step
            at += following
        return found

    def libraries(self) -> Iterator[str]:
        """The libraries that it wants loaded."""
        table = self.sections[".dynamic"]
        for at in range(table.offset, table.offset + table.size, 16):
            tag, value = struct.unpack_from("<QQ", self.data, at)
            if tag == NEEDED:
                yield self._text(self._strings, value)

    def versions(self) -> dict[int, str]:
        """The versions that it defines, by number."""
        table = self.sections.get(".gnu.version_d")
        found: dict[int, str] = {}
        at = table.offset if table else 0
        for _ in range(table.info if table else 0):
            _, _, number, _, _, aux, following = struct.unpack_from("<HHHHIII", self.data, at)
            found[number] = self._text(self._strings, struct.unpack_from("<I", self.data, at + aux)[0])
            at += following
        return found

    def find_text(self, text: str) -> int | None:
        """Where the table of names has a text."""
        strings = self._strings
        at = self.data.find(b"\0" + text.encode() + b"\0", strings.offset, strings.offset + strings.size)
        return at + 1 - strings.offset if at >= 0 else None

    def rename(self, need: Need, name: str) -> bool:
        """Want another version; False where its name is not in the file."""
        if (at := self.find_text(name)) is None:
            return False
        struct.pack_into("<I", self.data, need.place, elf_hash(name))
        struct.pack_into("<I", self.data, need.place + 8, at)
        return True

    def choose(self, symbol: Symbol, need: Need | None) -> None:
        """Take a symbol in this version; None: in the one that a glibc has for programs without versions."""
        struct.pack_into("<H", self.data, symbol.place, need.number if need else ANY)


def elf_hash(name: str) -> int:
    """The System V hash of a name."""
    h = 0
    for c in name.encode():
        h = (h << 4) + c
        h = (h ^ ((h & 0xF0000000) >> 24)) & 0x0FFFFFFF
    return h


def glibc_version(name: str) -> Version | None:
    """(2, 34) for GLIBC_2.34; None for what is not glibc's."""
    match = GLIBC.fullmatch(name)
    return tuple(int(part) for part in match.groups() if part) if match else None


def newest_need(path: Path) -> Version:
    """The newest version of glibc that a library wants."""
    versions = (glibc_version(need.name) for need in Elf(bytearray(path.read_bytes())).needs())
    return max((v for v in versions if v), default=(0,))


def lower(path: Path, limit: Version, folder: Path) -> list[str]:
    """Rewrite what a library needs to versions of at most `limit`; the functions that got an older one.

    `folder`: where this machine's glibc lies. Raises TooNew for functions that had no older version.
    """
    elf = Elf(bytearray(path.read_bytes()))
    needs = elf.needs()
    changed = [name for need in needs for name in _replace(elf, need, needs, limit, folder)]
    if changed:
        path.write_bytes(elf.data)
    return changed


def _replace(elf: Elf, need: Need, needs: list[Need], limit: Version, folder: Path) -> list[str]:
    """Remove every need of this version, if it is too new."""
    version = glibc_version(need.name)
    if version is None or version <= limit:
        return []
    users = [s for s in elf.symbols() if s.number == need.number and not s.is_defined]
    older = {s.name: older_version(s.name, folder / need.file, limit) for s in users}
    if missing := [name for name, found in older.items() if found is None]:
        raise TooNew(f"{', '.join(missing)}: not in glibc {'.'.join(map(str, limit))}")
    names = {name for name in older.values() if name}
    if len(names) == 1 and elf.rename(need, *names):
        return list(older)
    here = {n.name: n for n in needs if n.file == need.file and (glibc_version(n.name) or limit) <= limit}
    for symbol in users:
        elf.choose(symbol, here.get(older[symbol.name] or ""))
    # Nothing uses it now, and no place of the file may move: it becomes one that is always there.
    if not any(elf.rename(need, name) for name in (*here, FIRST)):
        raise TooNew(f"{need.name} cannot be taken out of {need.file}'s versions")
    return list(older)


def older_version(symbol: str, library: Path, limit: Version) -> str | None:
    """The newest version of a function up to `limit`; None where it came later."""
    elf = Elf(bytearray(library.read_bytes()))
    names = elf.versions()
    found = [names.get(s.number, "") for s in elf.symbols() if s.name == symbol and s.is_defined]
    known = [(v, name) for name in found if (v := glibc_version(name)) and v <= limit]
    return max(known)[1] if known else None
