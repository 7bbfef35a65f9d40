"""Changes to a valid model that leave its syntax legal and make its meaning absurd, and changes of bytes.

A `Case` is a seed and some edits, all plain data. Tests let hypothesis choose them, which makes a case that
fails smaller; `fuzz` takes the choices of a random number generator, which repeats itself less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from random import Random
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


def cases() -> st.SearchStrategy[Case]:
    """Cases whose every choice is hypothesis's, so that one that fails is made smaller."""
    return st.randoms(use_true_random=False).map(make_case)


def make_case(random: Random) -> Case:
    """A seed with one to four edits: of its meaning, of its bytes, or of both."""
    seed = random.choice(seeds())
    n = random.choice((1, 1, 1, 2, 2, 3, 4))
    kind = random.choice(("meaning", "meaning", "meaning", "meaning", "bytes", "both"))
    n_edits = {"meaning": n, "bytes": 0, "both": -(-n // 2)}[kind]
    edits = [edit for _ in range(n_edits) for edit in _edits(random, seed)]
    return Case(
        seed, tuple(edits), tuple(_patch(random, seed) for _ in range(max(n - n_edits, kind == "both")))
    )


def _edits(random: Random, seed: Seed) -> list[Edit]:
    """One edit somewhere in the tree, or two where a type and its value change together."""
    path, keys, parent, value = _place(random, seed)
    if keys[-1] in ("kind", "items") and isinstance(parent, Table) and random.random() < 0.5:
        return _retyping(random, path, parent)
    op = random.choice(OPS if isinstance(parent, Table) else OPS[:-3])
    if op == "replace":
        return [Edit(path, op, absurd(random, value, keys))]
    if op == "rename":
        known = tuple(k for k, _ in _known(keys)) or STRINGS
        return [
            Edit(path, op, key=random.choice((*known, keys[-1] + "x", keys[-1][:-1], random.choice(STRINGS))))
        ]
    if op == "insert":
        key, new = random.choice(_known(keys) or ((keys[-1], value),))
        return [
            Edit(
                path, op, new if random.random() < 0.5 else _absurd_item(random, new, (*keys[:-1], key)), key
            )
        ]
    return [Edit(path, op, other=random.randrange(400))]


def _absurd_item(random: Random, item: Node, keys: tuple[str, ...]) -> Node:
    """Something absurd of an item that is inserted; a GGUF pair keeps its type."""
    if isinstance(item, Table) and any(k == "value" for k, _ in item.items):
        return item.set("value", absurd(random, item.get("value"), (*keys, "value")))
    return absurd(random, item, keys)


def _place(random: Random, seed: Seed) -> tuple[tuple[int, ...], tuple[str, ...], Node, Node]:
    """A node: its path, the keys on the way, what it lies in, and itself."""
    path: list[int] = []
    keys: list[str] = []
    parent: Node = None
    node: Node = seed.files
    least = 1 if random.random() < 0.06 else 3  # how deep it lies: high up is little to choose from
    while (below := children(node)) and (len(path) < least or random.random() < 0.7):
        parent = node
        # Of a GGUF file the pairs and tensors, and not the numbers of them.
        often = 20 if len(path) == 1 and isinstance(parent, Table) and parent.form != "json" else 3
        weights = [often if children(child) or not path else 1 for child in below]
        at = random.choices(range(len(below)), weights)[0]
        path.append(at)
        keys.append(parent.items[at][0] if isinstance(parent, Table) else keys[-1])
        node = below[at]
    return tuple(path), tuple(keys), parent, node


def _retyping(random: Random, path: tuple[int, ...], parent: Table) -> list[Edit]:
    """A GGUF value as one of another type."""
    kind = random.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 255))
    found = [i for i, (k, _) in enumerate(parent.items) if k == "value"]
    edit = Edit(path, "replace", kind)
    if not found:
        return [edit]
    return [edit, Edit((*path[:-1], found[0]), "replace", retyped(parent.get("value"), kind))]


def _known(keys: tuple[str, ...]) -> tuple[tuple[str, Node], ...]:
    """Items that may lie where these keys lead, from all seeds and the lists above."""
    return _inventory().get(_where(keys), ())


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


def _patch(random: Random, seed: Seed) -> Patch:
    """One change of bytes, mostly among the first ones, where the structure lies."""
    file = random.randrange(len(seed.files.items))
    raw = _pristine(seed)[file]
    end = random.choice((32, 1024, 8192, 8192, len(raw)))
    at = random.randrange(max(1, min(end, len(raw))))
    return random.choice(PATCHES)(random, file, at, raw)


def _flip(random: Random, file: int, at: int, raw: bytes) -> Patch:
    return Patch(file, at, 1, bytes([(raw[at] if raw else 0) ^ 1 << random.randrange(8)]))


def _number(random: Random, file: int, at: int, raw: bytes) -> Patch:
    size = random.choice((1, 2, 4, 8))
    value = random.choice((*INTS, len(raw), len(raw) - at)) % (1 << 8 * size)
    return Patch(file, at, size, value.to_bytes(size, "little"))


def _insert(random: Random, file: int, at: int, raw: bytes) -> Patch:
    some = (b"\0", b"\xff", b"{", b"[", b'"', b",", b"\n", b"GGUF", b"\x80", b"1e999", raw[at : at + 40])
    return Patch(file, at, 0, random.choice(some), random.choice((1, 1, 2, 8, 4096)))


def _cut(random: Random, file: int, at: int, raw: bytes) -> Patch:
    return Patch(file, at, random.choice((1, 4, 8, 32, 1000, len(raw))), b"")


def _copy(random: Random, file: int, at: int, raw: bytes) -> Patch:
    source, n = random.randrange(len(raw) + 1), random.choice((1, 8, 64, 4096))
    return Patch(file, at, random.choice((0, n)), raw[source : source + n])


def _fill(random: Random, file: int, at: int, raw: bytes) -> Patch:
    n = random.choice((1, 8, 64, 4096))
    return Patch(file, at, n, random.choice((b"\0", b"\xff", b"\x7f", b" ")), n)


PATCHES = (_flip, _number, _number, _insert, _cut, _copy, _fill)
