"""A disk that forgets what was not synced: which states a power cut may leave, by the calls before it.

The rules are those of POSIX as file systems keep it, ext4 with data=writeback among them:

1. What a file held when it was last synced is there, except what was written over since.
2. Of what was written since, each page of 4096 bytes holds what it held after any one of the writes, or what
   it held before; so writes are whole, torn, missing, or in another order. Its size is any that it has had.
   A page that is within the size and was never written to the disk holds zeros or anything.
3. A name (created, renamed, removed) is on the disk when its *folder* was synced; a file's own sync says
   nothing of its names. A rename is one step, also between folders. Changes of one name stay in order.
4. With a journal of names ("journal") what is there is a beginning of all changes of names, and a file's sync
   writes them to the last that concerned that file. Without one ("free") each change is there or not.
5. Names and bytes do not wait for each other: a renamed file may be empty, an unnamed one complete.
6. What is written by way of a shared mapping is not seen: a file that was so mapped may hold anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.crashes.recorder import Event, Kind

PAGE = 4096
ROOT = 0
STRATEGIES = ("old", "new", "zeros", "writes", "pages", "garbage")

Place = tuple[int, str]  # a folder, and a name in it


@dataclass
class StoredFile:
    """A file: what is on the disk, and what was written since."""

    synced: bytes = b""
    now: bytearray = field(default_factory=bytearray)
    pending: list[Event] = field(default_factory=list)
    is_mapped: bool = False

    def apply(self, event: Event) -> None:
        """A call that changes bytes or size."""
        change(self.now, event)
        self.pending.append(event)

    def sync(self) -> None:
        """All of it is on the disk."""
        if self.pending:
            self.synced = bytes(self.now)
            self.pending = []


def change(content: bytearray, event: Event) -> None:
    """What a write, a truncation or a hole makes of a file's bytes."""
    end = event.at + event.size
    if event.kind is Kind.TRUNCATE:
        del content[event.size :]
        content.extend(bytes(event.size - len(content)))
    elif event.kind is Kind.PUNCH:
        end = min(end, len(content))
        content[event.at : end] = bytes(max(0, end - event.at))
    else:
        content.extend(bytes(max(0, event.at - len(content))))
        content[event.at : end] = event.data


@dataclass(frozen=True, slots=True)
class NameChange:
    """Names that one call changed: what each leads to from then on, None: to nothing."""

    to: tuple[tuple[Place, int | None], ...]

    @property
    def places(self) -> set[Place]:
        return {place for place, _ in self.to}

    @property
    def folders(self) -> set[int]:
        return {folder for (folder, _), _ in self.to}


Node = StoredFile | str | None  # a link's target; None: a folder


class Disk:
    """A folder on it, from a state in which all is synced, and every call since."""

    def __init__(self, folder: Path) -> None:
        self._root = str(folder)
        self._nodes: dict[int, Node] = {ROOT: None}
        self._names: dict[Place, int] = {}  # as programs see them
        self._by_inode = {folder.stat().st_ino: ROOT}
        self._take(folder, ROOT)
        self._synced_names = dict(self._names)
        self._changes: list[NameChange] = []
        self._free: set[int] = set()  # changes that are on the disk without a journal
        self._journal = 0  # changes that are on the disk with one
        self._concern: dict[int, int] = {}  # the last change of a name that concerned a node
        self.marks: list[str] = []

    def _take(self, folder: Path, number: int) -> None:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            node: Node = None
            if entry.is_symlink():
                node = os.readlink(entry)
            elif entry.is_file():
                content = Path(entry).read_bytes()
                node = StoredFile(content, bytearray(content))
            child = self._add(node, entry.stat(follow_symlinks=False).st_ino)
            self._names[number, entry.name] = child
            if entry.is_dir(follow_symlinks=False):
                self._take(Path(entry), child)

    def _add(self, node: Node, inode: int) -> int:
        number = len(self._nodes)
        self._nodes[number] = node
        self._by_inode[inode] = number
        return number

    # --- calls

    def apply(self, event: Event) -> None:
        """The next call."""
        if event.kind is Kind.MARK:
            self.marks.append(event.name)
        elif event.kind in (Kind.WRITE, Kind.TRUNCATE, Kind.PUNCH):
            self._file(event).apply(event)
        elif event.kind is Kind.MAPPED:
            self._file(event).is_mapped = True
        elif event.kind is Kind.SYNC:
            self._sync(self._by_inode[event.inode])
        elif event.kind is Kind.SYNC_ALL:
            for number in self._nodes:
                self._sync(number)
        else:
            self._rename(event)

    def _file(self, event: Event) -> StoredFile:
        node = self._nodes[self._by_inode[event.inode]]
        assert isinstance(node, StoredFile)
        return node

    def _sync(self, number: int) -> None:
        node = self._nodes[number]
        if isinstance(node, StoredFile):
            node.sync()
        else:
            self._free |= {i for i, c in enumerate(self._changes) if number in c.folders}
        self._journal = max(self._journal, self._concern.get(number, 0))

    def _rename(self, event: Event) -> None:
        place = self._place(event.name)
        if event.kind is Kind.RENAME:
            moved = self._names[place]
            self._change(moved, ((place, None), (self._place(event.other), moved)))
        elif event.kind in (Kind.UNLINK, Kind.RMDIR):
            self._change(self._names[place], ((place, None),))
        elif event.kind is Kind.LINK:
            number = self._by_inode[event.inode]
            self._change(number, ((place, number),))
        else:
            nodes: dict[Kind, Node] = {Kind.MKDIR: None, Kind.SYMLINK: event.other}
            number = self._add(nodes.get(event.kind, StoredFile()), event.inode)
            self._change(number, ((place, number),))

    def _change(self, number: int, to: tuple[tuple[Place, int | None], ...]) -> None:
        self._changes.append(NameChange(to))
        for concerned in (number, *(folder for (folder, _), _ in to)):
            self._concern[concerned] = len(self._changes)
        _put(self._names, to)

    def _place(self, path: str) -> Place:
        *parents, name = path.removeprefix(self._root).strip("/").split("/")
        folder = ROOT
        for parent in parents:
            folder = self._names[folder, parent]
        return folder, name

    # --- a power cut

    def write_state(self, target: Path, rng: Random) -> tuple[str, dict[int, int]]:
        """Write a state that a power cut may leave now into a folder that is not there yet; in words, what it
        is like, and what files' inodes have become."""
        order = rng.choice(("journal", "free"))
        names, all_bytes = rng.choice((("all", "zeros"), ("none", "new"), ("all", ""), ("", ""), ("", "")))
        chosen = self._chosen(order, names, rng)
        reached = dict(self._synced_names)
        for i in sorted(chosen):
            _put(reached, self._changes[i].to)
        said = [f"names {order}, {len(chosen)} of {len(self._changes)}"]
        written: dict[int, Path] = {}

        def write(folder: int, path: Path) -> None:
            path.mkdir()
            for (_, name), number in sorted(item for item in reached.items() if item[0][0] == folder):
                node, at = self._nodes[number], path / name
                if node is None:
                    write(number, at)
                elif isinstance(node, str):
                    at.symlink_to(node)
                elif number in written:
                    at.hardlink_to(written[number])
                else:
                    how = all_bytes or rng.choice(STRATEGIES)
                    at.write_bytes(contents(node, how, rng))
                    written[number] = at
                    said.extend([f"{name}: {how}"] if node.pending else [])

        write(ROOT, target)
        inodes = {n: written[i].stat().st_ino for n, i in self._by_inode.items() if i in written}
        return "; ".join(said), inodes

    def _chosen(self, order: str, names: str, rng: Random) -> set[int]:
        """Which changes of names are on the disk."""
        count = len(self._changes)
        if order == "journal":
            return set(
                range({"all": count, "none": self._journal}.get(names, rng.randint(self._journal, count)))
            )
        share = {"all": 1.0, "none": 0.0}.get(names, rng.choice((0.1, 0.5, 0.9)))
        chosen = self._free | {i for i in range(count) if rng.random() < share}
        return closed(self._changes, chosen)


def closed(changes: Sequence[NameChange], chosen: Iterable[int]) -> set[int]:
    """With each change those before it of the same names: they stay in order."""
    found = set(chosen)
    wanted: set[Place] = set()
    for i in reversed(range(len(changes))):
        if i in found or changes[i].places & wanted:
            found.add(i)
            wanted |= changes[i].places
    return found


def _put(names: dict[Place, int], to: Iterable[tuple[Place, int | None]]) -> None:
    for place, number in to:
        if number is None:
            names.pop(place, None)
        else:
            names[place] = number


def contents(file: StoredFile, how: str, rng: Random) -> bytes:
    """What a file may hold after a power cut, in one of the `STRATEGIES`."""
    if file.is_mapped:
        return rng.randbytes(len(file.now))
    if how == "new" or not file.pending:
        return bytes(file.now)
    if how == "old":
        return file.synced
    if how == "writes":
        found = bytearray(file.synced)
        for event in file.pending:
            if rng.random() < 0.7:
                change(found, event)
        return bytes(found)
    return _in_pages(file, how, rng)


def _in_pages(file: StoredFile, how: str, rng: Random) -> bytes:
    """Each page as it was after another one of the writes; `zeros`: none of them came to the disk."""
    versions = [file.synced]
    content = bytearray(file.synced)
    for event in file.pending:
        change(content, event)
        versions.append(bytes(content))
    size = len(file.now if how == "zeros" else rng.choice((versions[-1], rng.choice(versions))))
    written = max(map(len, versions))
    found = bytearray()
    for at in range(0, size, PAGE):
        source = (
            file.synced if how == "zeros" else rng.choice((versions[0], versions[-1], rng.choice(versions)))
        )
        page = source[at : at + PAGE]
        lost = min(PAGE, written - at) - len(page)
        if how == "garbage" and not page:
            page = rng.randbytes(lost)
        found += page + bytes(max(0, PAGE - len(page)))
    return bytes(found[:size])
