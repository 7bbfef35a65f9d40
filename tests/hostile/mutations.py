"""Changes to a valid model that leave its syntax legal and make its meaning absurd, and changes of bytes.

A `Case` is a seed and some edits, all plain data, drawn by hypothesis: so it is the same in every run, and a
case that fails is made smaller before anybody looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from hypothesis import strategies as st

from tests.hostile.absurd import INTS, MORE_PAIRS, MORE_SETTINGS, STRINGS, absurd
from tests.hostile.seeds import Seed, seeds, written
from tests.hostile.trees import Node, Table, children, retyped

Op = Literal["replace", "delete", "repeat", "rename", "swap", "insert"]
# As often as each is drawn; the last three only where there are keys.
OPS: tuple[Op, ...] = (
    *("replace",) * 10,
    *("delete", "delete", "delete", "swap", "swap", "repeat", "repeat", "insert"),
    *("insert", "rename", "rename"),
)


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one node, found by its number in each table on the way; numbers wrap around."""

    path: tuple[int, ...]
    op: Op
    value: Node = None
    key: str = ""
    other: int = 0  # with which sibling it is swapped

    def apply(self, root: Table) -> Table:
        """The tree with the change."""
        found = self._change(root, self.path)
        assert isinstance(found, Table)
        return found

    def _change(self, node: Node, path: tuple[int, ...]) -> Node:
        below = children(node)
        if not below:
            return node  # an edit before this one has made a leaf of it
        at = path[0] % len(below)
        items = list(node.items) if isinstance(node, Table) else [("", v) for v in below]
        key, value = items[at]
        if len(path) > 1 and children(value):
            items[at] = (key, self._change(value, path[1:]))
        else:
            self._change_item(items, at, key, value)
        if isinstance(node, Table):
            return replace(node, items=tuple(items))
        return tuple(v for _, v in items)

    def _change_item(self, items: list[tuple[str, Node]], at: int, key: str, value: Node) -> None:
        other = self.other % len(items)
        if self.op == "replace":
            items[at] = (key, self.value)
        elif self.op == "delete":
            del items[at]
        elif self.op == "repeat":
            items.insert(other, items[at])
        elif self.op == "rename":
            items[at] = (self.key, value)
        elif self.op == "insert":
            items.insert(at, (self.key, self.value))
        else:
            items[at], items[other] = (key, items[other][1]), (items[other][0], value)


@dataclass(frozen=True, slots=True)
class Patch:
    """A change of the bytes of one file: `n` bytes at `at` become `new`."""

    file: int
    at: int
    n: int
    new: bytes
    times: int = 1

    def apply(self, raw: bytes) -> bytes:
        """The changed bytes."""
        at = min(self.at, len(raw))
        return raw[:at] + self.new * self.times + raw[at + self.n :]


@dataclass(frozen=True, slots=True)
class Case:
    """A seed and what is done to it."""

    seed: Seed
    edits: tuple[Edit, ...] = ()
    patches: tuple[Patch, ...] = ()

    @property
    def kind(self) -> str:
        """Which sort of mutation it is."""
        what = "gguf" if self.seed.opened else "folder"
        return f"{what}, {'both' if self.edits and self.patches else 'bytes' if self.patches else 'meaning'}"

    def files(self) -> dict[str, bytes]:
        """The files to write, by names that stay in their folder."""
        tree = self.seed.files
        for edit in self.edits:
            tree = edit.apply(tree)
        same = {
            id(node): raw for (_, node), raw in zip(self.seed.files.items, _pristine(self.seed), strict=True)
        }
        found = {_safe(name): same.get(id(node)) or written_one(name, node) for name, node in tree.items}
        for patch in self.patches:
            if names := list(found):
                name = names[patch.file % len(names)]
                found[name] = patch.apply(found[name])
        return found


@cache
def _pristine(seed: Seed) -> tuple[bytes, ...]:
    return tuple(written(seed.files).values())


def written_one(name: str, node: Node) -> bytes:
    """The bytes of one file."""
    return written(Table(((name, node),)))[name]


def _safe(name: str) -> str:
    """A file's name that a test can write, whatever an edit made of it."""
    plain = "".join(c if c.isascii() and c.isprintable() and c not in "/\\" else "_" for c in name[:100])
    return plain.strip(".") or "_"


# --- what is drawn


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A seed with one to four edits: of its meaning, of its bytes, or of both."""
    seed = draw(st.sampled_from(seeds()))
    n = draw(st.sampled_from((1, 1, 1, 2, 2, 3, 4)))
    kind = draw(st.sampled_from(("meaning", "meaning", "meaning", "meaning", "bytes", "both")))
    n_patches = {"meaning": 0, "bytes": n, "both": max(1, n // 2)}[kind]
    edits: list[Edit] = []
    for _ in range(n - n_patches if kind == "both" else 0 if kind == "bytes" else n):
        edits += draw(_edits(seed))
    return Case(seed, tuple(edits), tuple(draw(_patch(seed)) for _ in range(n_patches)))


@st.composite
def _edits(draw: st.DrawFn, seed: Seed) -> list[Edit]:
    """One edit somewhere in the tree, or two where a type and its value change together."""
    path, keys, parent, value = draw(_place(seed))
    if keys[-1] in ("kind", "items") and draw(st.booleans()):
        return draw(_retyping(path, parent))
    op = draw(st.sampled_from(OPS if isinstance(parent, Table) else OPS[:-3]))
    other = draw(st.integers(0, 400)) if op in ("swap", "repeat") else 0
    if op == "replace":
        return [Edit(path, op, draw(absurd(value, keys)))]
    if op == "rename":
        return [
            Edit(
                path, op, key=draw(st.sampled_from((*_names(keys), *STRINGS, keys[-1] + "x", keys[-1][:-1])))
            )
        ]
    if op == "insert":
        key, new = draw(st.sampled_from(_known(keys) or ((keys[-1], value),)))
        if draw(st.booleans()):
            new = draw(_absurd_item(new, keys, key))
        return [Edit(path, op, new, key)]
    return [Edit(path, op, other=other)]


def _absurd_item(item: Node, keys: tuple[str, ...], key: str) -> st.SearchStrategy[Node]:
    """Something absurd of an item that is inserted; a GGUF pair keeps its type."""
    if not (isinstance(item, Table) and "value" in (k for k, _ in item.items)):
        return absurd(item, (*keys[:-1], key))
    table = item
    return absurd(table.get("value"), (*keys[:-1], key, "value")).map(lambda v: table.set("value", v))


@st.composite
def _place(draw: st.DrawFn, seed: Seed) -> tuple[tuple[int, ...], tuple[str, ...], Node, Node]:
    """A node: its path, the keys on the way, what it lies in, and itself."""
    path: list[int] = []
    keys: list[str] = []
    parent: Node = None
    node: Node = seed.files
    least = draw(st.sampled_from((1, 3, 3, 3, 3, 3)))  # how deep it lies; high up is little to choose from
    while children(node) and (len(path) < least or draw(st.integers(0, 3))):
        parent, below = node, children(node)
        weights = [i for i, child in enumerate(below) for _ in range(8 if children(child) else 1)]
        at = draw(st.sampled_from(weights))
        path.append(at)
        keys.append(parent.items[at][0] if isinstance(parent, Table) else keys[-1])
        node = below[at]
    return tuple(path), tuple(keys), parent, node


@st.composite
def _retyping(draw: st.DrawFn, path: tuple[int, ...], parent: Node) -> list[Edit]:
    """A GGUF value as one of another type."""
    kind = draw(st.sampled_from((0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 255)))
    assert isinstance(parent, Table)
    found = [i for i, (k, _) in enumerate(parent.items) if k == "value"]
    if not found or (isinstance(parent.get("value"), tuple) and kind == 13):
        return [Edit(path, "replace", kind)]
    value = retyped(parent.get("value"), kind)
    return [Edit(path, "replace", kind), Edit((*path[:-1], found[0]), "replace", value)]


# --- what seeds of the same kind have: keys that this one may lack


def _known(keys: tuple[str, ...]) -> tuple[tuple[str, Node], ...]:
    """Items that may lie where these keys lead, from all seeds and the lists above."""
    return _inventory().get(_where(keys), ())


def _names(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(k for k, _ in _known(keys))


def _where(keys: tuple[str, ...]) -> str:
    """Which place it is: tensors of GGUF, the settings of config.json."""
    name = keys[0] if len(keys) > 1 else ""
    kind = next((e for e in (".gguf", ".safetensors") if name.endswith(e)), name)
    return f"{kind}:{keys[1] if kind.startswith('.') and len(keys) == 3 else len(keys)}"


@cache
def _inventory() -> Mapping[str, tuple[tuple[str, Node], ...]]:
    found: dict[str, dict[str, Node]] = {}
    for seed in seeds():
        for name, tree in seed.files.items:
            found.setdefault(_where((name,)), {})[name] = tree
            for key, node in tree.items if isinstance(tree, Table) else ():
                found.setdefault(_where((name, key)), {})[key] = node
                for below, deep in node.items if isinstance(node, Table) else ():
                    found.setdefault(_where((name, key, below)), {})[below] = deep
    for architecture in ("", "llama.", "qwen2.", "qwen3moe.", "gemma3.", "phi3."):
        for key, node in MORE_PAIRS.items():
            general = key.startswith(("general.", "split.", "tokenizer."))
            if general == (not architecture):
                found[".gguf:pairs"][architecture + key] = Table((("value", node),))
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        found[f"{file}:2"] |= MORE_SETTINGS
    return {place: tuple(items.items()) for place, items in found.items()}


# --- bytes


@st.composite
def _patch(draw: st.DrawFn, seed: Seed) -> Patch:
    """One change of bytes, mostly among the first ones, where the structure lies."""
    file = draw(st.integers(0, len(seed.files.items) - 1))
    raw = _pristine(seed)[file]
    end = draw(st.sampled_from((32, 1024, 8192, 8192, len(raw))))
    at = draw(st.integers(0, max(0, min(end, len(raw)) - 1)))
    make = draw(st.sampled_from(PATCHES))
    return draw(make(file, at, raw))


Maker = Callable[[int, int, bytes], st.SearchStrategy[Patch]]


def _flip(file: int, at: int, raw: bytes) -> st.SearchStrategy[Patch]:
    byte = raw[at] if raw else 0
    return st.integers(0, 7).map(lambda bit: Patch(file, at, 1, bytes([byte ^ 1 << bit])))


def _number(file: int, at: int, raw: bytes) -> st.SearchStrategy[Patch]:
    def patch(size: int, value: int) -> Patch:
        return Patch(file, at, size, (value % (1 << 8 * size)).to_bytes(size, "little"))

    return st.builds(patch, st.sampled_from((1, 2, 4, 8)), st.sampled_from((*INTS, len(raw), len(raw) - at)))


def _insert(file: int, at: int, raw: bytes) -> st.SearchStrategy[Patch]:
    some = st.sampled_from(
        (b"\0", b"\xff", b"{", b"[", b'"', b",", b"\n", b"GGUF", b"\x80", b"1e999", raw[at : at + 40])
    )
    return st.builds(lambda new, n: Patch(file, at, 0, new, n), some, st.sampled_from((1, 1, 2, 8, 4096)))


def _cut(file: int, at: int, raw: bytes) -> st.SearchStrategy[Patch]:
    return st.sampled_from((1, 4, 8, 32, 1000, len(raw))).map(lambda n: Patch(file, at, n, b""))


def _copy(file: int, at: int, raw: bytes) -> st.SearchStrategy[Patch]:
    def patch(source: int, n: int, over: bool) -> Patch:
        return Patch(file, at, n if over else 0, raw[source : source + n])

    return st.builds(patch, st.integers(0, len(raw)), st.sampled_from((1, 8, 64, 4096)), st.booleans())


def _fill(file: int, at: int, raw: bytes) -> st.SearchStrategy[Patch]:
    def patch(n: int, byte: bytes) -> Patch:
        return Patch(file, at, n, byte, n)

    return st.builds(
        patch, st.sampled_from((1, 8, 64, 4096)), st.sampled_from((b"\0", b"\xff", b"\x7f", b" "))
    )


PATCHES: tuple[Maker, ...] = (_flip, _number, _number, _insert, _cut, _copy, _fill)
