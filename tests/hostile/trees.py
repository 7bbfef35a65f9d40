"""A model's files as one tree that can be changed anywhere and written back: GGUF, safetensors, JSON.

A `Table` keeps its order and may hold a key twice, which a dict could not; a tuple is an array. Whatever
counts, lengths and offsets the tree does not say are computed when it is written, and a tensor's bytes are
cut or repeated to what its type and shape need: so a file with one absurd value is right in all else.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Node: TypeAlias = "Table | tuple[Any, ...] | str | bytes | int | float | bool | Raw | Nested | None"
Form: TypeAlias = Literal["", "json", "gguf", "safetensors"]

MOST_DATA = 4 << 20  # bytes that a tensor's data may grow to
STRING, ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_SIZES = {int(t): GGML_QUANT_SIZES[t] for t in GGMLQuantizationType}
_DTYPES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Keys and values; `form` says how a table that is a whole file is written."""

    items: tuple[tuple[str, Node], ...]
    form: Form = ""

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - whatever an edit put there
        """The first value of a key."""
        return next((v for k, v in self.items if k == key), default)

    def set(self, key: str, value: Node) -> Table:
        """With another value at the end."""
        return replace(self, items=(*((k, v) for k, v in self.items if k != key), (key, value)))


@dataclass(frozen=True, slots=True)
class Raw:
    """Text that goes into JSON as it is: 1e999."""

    text: str


@dataclass(frozen=True, slots=True)
class Nested:
    """Brackets within brackets."""

    depth: int


def children(node: Node) -> tuple[Node, ...]:
    """What lies directly below a node."""
    if isinstance(node, Table):
        return tuple(v for _, v in node.items)
    return node if isinstance(node, tuple) else ()


def write(node: Node) -> bytes:
    """The bytes of one file."""
    if isinstance(node, bytes):
        return node
    if isinstance(node, Table) and node.form == "gguf":
        return write_gguf(node)
    if isinstance(node, Table) and node.form == "safetensors":
        return write_safetensors(node)
    if isinstance(node, Nested):
        return b"[" * node.depth
    return "".join(_json(node)).encode("utf-8", "surrogatepass")


# --- JSON


def parse_json(raw: bytes) -> Node:
    """A JSON file."""
    return _node(json.loads(raw, object_pairs_hook=_Pairs))


class _Pairs(list[tuple[str, Any]]):
    """What json.loads makes of an object."""


def _node(found: object) -> Node:
    if isinstance(found, _Pairs):
        return Table(tuple((k, _node(v)) for k, v in found), "json")
    if isinstance(found, list):
        return tuple(_node(v) for v in found)
    return found  # type: ignore[return-value]  # a scalar


def _json(node: Node) -> Iterator[str]:
    if isinstance(node, Table):
        yield "{"
        for i, (key, value) in enumerate(node.items):
            yield f"{', ' if i else ''}{json.dumps(key)}: "
            yield from _json(value)
        yield "}"
    elif isinstance(node, tuple):
        yield "["
        for i, value in enumerate(node):
            yield ", " if i else ""
            yield from _json(value)
        yield "]"
    elif isinstance(node, Raw):
        yield node.text
    elif isinstance(node, Nested):
        yield "[" * node.depth + "]" * node.depth
    elif isinstance(node, bytes):
        yield json.dumps(node.decode("latin-1"))
    else:
        yield json.dumps(node)


# --- safetensors


def parse_safetensors(raw: bytes) -> Table:
    """A safetensors file: the header's tables, each with its bytes as `data`."""
    (length,) = struct.unpack_from("<Q", raw)
    header, body = parse_json(raw[8 : 8 + length]), raw[8 + length :]
    assert isinstance(header, Table)
    items: list[tuple[str, Node]] = []
    for name, entry in header.items:
        if isinstance(entry, Table) and name != "__metadata__":
            begin, end = entry.get("data_offsets")
            entry = Table((*entry.set("data_offsets", None).items, ("data", body[begin:end])))
        items.append((name, entry))
    return Table((("length", None), ("header", Table(tuple(items))), ("tail", b"")), "safetensors")


def write_safetensors(tree: Table) -> bytes:
    """The file; offsets that are None are computed."""
    entries: list[tuple[str, Node]] = []
    body = bytearray()
    header = tree.get("header", Table(()))
    for name, entry in header.items if isinstance(header, Table) else ():
        if not isinstance(entry, Table) or name == "__metadata__":
            entries.append((name, entry))
            continue
        data = fitted(_bytes(entry.get("data")), _safetensors_size(entry))
        said = tuple((k, v) for k, v in entry.items if k not in ("data", "data_offsets"))
        offsets = entry.get("data_offsets") or (len(body), len(body) + len(data))
        body += data
        entries.append((name, Table((*said, ("data_offsets", offsets)))))
    text = write(Table(tuple(entries)) if isinstance(header, Table) else header)
    length = tree.get("length")
    count = _whole(length, 64) if length is not None else len(text)
    return struct.pack("<Q", count) + text + body + _bytes(tree.get("tail"))


def _safetensors_size(entry: Table) -> int | None:
    size, shape = _DTYPES.get(str(entry.get("dtype"))), entry.get("shape")
    if size is None or not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        return None
    return size * math.prod(shape)


# --- GGUF


def parse_gguf(raw: bytes) -> Table:
    """A GGUF file: its pairs, and its tensors with their bytes."""
    at = 0

    def number(code: str) -> Any:  # noqa: ANN401
        nonlocal at
        (value,) = struct.unpack_from("<" + code, raw, at)
        at += struct.calcsize(code)
        return value

    def text() -> bytes:
        nonlocal at
        length = number("Q")
        at += length
        return raw[at - length : at]

    def value(kind: int) -> Node:
        if kind == STRING:
            return _str(text())
        found = number(_FORMATS[kind])
        return bool(found) if kind == 7 else found

    _, version, n_tensors, n_pairs = number("4s"), number("I"), number("Q"), number("Q")
    pairs: list[tuple[str, Node]] = []
    for _ in range(n_pairs):
        key, kind = text().decode(), number("I")
        if kind == ARRAY:
            items, count = number("I"), number("Q")
            values = tuple(value(items) for _ in range(count))
            pairs.append((key, Table((("kind", kind), ("items", items), ("value", values)))))
        else:
            pairs.append((key, Table((("kind", kind), ("value", value(kind))))))
    found = []
    for _ in range(n_tensors):
        name = text().decode()
        found.append((name, tuple(number("Q") for _ in range(number("I"))), number("I"), number("Q")))
    start = -(-at // 32) * 32
    tensors: list[tuple[str, Node]] = []
    for name, dims, kind, offset in found:
        size = gguf_size(dims, kind)
        assert size is not None
        data = raw[start + offset : start + offset + size]
        tensors.append((name, Table((("dims", dims), ("type", kind), ("offset", None), ("data", data)))))
    return gguf_tree(Table(tuple(pairs)), Table(tuple(tensors)), version)


def gguf_tree(pairs: Table, tensors: Table, version: int = 3) -> Table:
    """A file with these pairs and tensors."""
    head = (("version", version), ("n_tensors", None), ("n_pairs", None))
    return Table((*head, ("pairs", pairs), ("tensors", tensors)), "gguf")


def gguf_size(dims: object, kind: object) -> int | None:
    """Bytes of a tensor, if its type and dimensions can be one's."""
    if not isinstance(dims, tuple) or not isinstance(kind, int) or kind not in _SIZES:
        return None
    if not all(type(n) is int and n > 0 for n in dims) or not dims:
        return None
    block, size = _SIZES[kind]
    return math.prod(dims) // block * size


def write_gguf(tree: Table) -> bytes:
    """The file; counts and offsets that are None are computed."""
    pairs, tensors = tree.get("pairs"), tree.get("tensors")
    pairs = pairs if isinstance(pairs, Table) else Table(())
    tensors = tensors if isinstance(tensors, Table) else Table(())
    n_tensors, n_pairs = tree.get("n_tensors"), tree.get("n_pairs")
    out = bytearray(b"GGUF" + struct.pack("<I", _whole(tree.get("version", 3), 32)))
    out += struct.pack("<Q", len(tensors.items) if n_tensors is None else _whole(n_tensors, 64))
    out += struct.pack("<Q", len(pairs.items) if n_pairs is None else _whole(n_pairs, 64))
    for key, pair in pairs.items:
        out += _text(key) + _gguf_value(pair)
    alignment = _alignment(pairs)
    body = bytearray()
    for name, tensor in tensors.items:
        t = tensor if isinstance(tensor, Table) else Table(())
        dims, kind, offset = t.get("dims", ()), t.get("type", 0), t.get("offset")
        dims = dims if isinstance(dims, tuple) else (dims,)
        where = len(body) if offset is None else _whole(offset, 64)
        out += _text(name) + struct.pack("<I", len(dims))
        out += b"".join(struct.pack("<Q", _whole(n, 64)) for n in dims)
        out += struct.pack("<IQ", _whole(kind, 32), where)
        body += fitted(_bytes(t.get("data")), gguf_size(dims, kind))
        body += bytes(-len(body) % alignment)
    return bytes(out + bytes(-len(out) % alignment) + body)


def fitted(data: bytes, size: int | None) -> bytes:
    """The bytes cut or repeated to a size, if it is one that a test can write."""
    if size is None or size > MOST_DATA or size == len(data):
        return data
    return ((data or b"\0") * (size // max(1, len(data)) + 1))[:size]


def _alignment(pairs: Table) -> int:
    said = pairs.get("general.alignment")
    value = said.get("value") if isinstance(said, Table) else None
    sane = type(value) is int and 0 < value <= 1 << 16 and not value & (value - 1)
    return value if sane and isinstance(value, int) else 32


def _gguf_value(pair: Node) -> bytes:
    table = pair if isinstance(pair, Table) else Table((("value", pair),))
    value, kind = table.get("value"), table.get("kind")
    if kind == ARRAY or isinstance(value, tuple):
        items = value if isinstance(value, tuple) else (value,)
        of = table.get("items")
        if not isinstance(of, int) or not all(_suits(v, of) for v in items):
            of = _kind_of(items[0]) if items else STRING
        packed = b"".join(_scalar(v, of) for v in items)
        return struct.pack("<IIQ", ARRAY, _whole(of, 32), len(items)) + packed
    if not isinstance(kind, int) or not _suits(value, kind):
        kind = _kind_of(value)
    return struct.pack("<I", _whole(kind, 32)) + _scalar(value, kind)


def retyped(value: Node, kind: int) -> Node:
    """A value as one of another type, so that it is written as that type."""
    if isinstance(value, tuple):
        return tuple(retyped(v, kind) for v in value)
    if kind == STRING:
        return str(value)
    if kind == 7:
        return bool(value)
    if kind in (6, 12):
        return _float(value)
    return _whole(value, 63) if kind in _FORMATS else value


def _suits(value: Node, kind: int) -> bool:
    """Whether a value can be written as that type; any can be written as an unknown type."""
    if kind == STRING:
        return isinstance(value, str | bytes)
    if kind == 7:
        return isinstance(value, bool)
    if kind in (6, 12):
        return isinstance(value, float)
    return type(value) is int or kind not in _FORMATS


def _kind_of(value: Node) -> int:
    if isinstance(value, bool):
        return 7
    if isinstance(value, int):
        return 4 if 0 <= value < 1 << 32 else 5 if -(1 << 31) <= value < 0 else 10 if value > 0 else 11
    return 6 if isinstance(value, float) else STRING


def _scalar(value: Node, kind: int) -> bytes:
    if kind == STRING:
        return _text(value if isinstance(value, str | bytes) else str(value))
    if kind in (6, 12):
        number = _float(value)
        try:
            return struct.pack("<" + _FORMATS[kind], number)
        except OverflowError:
            return struct.pack("<" + _FORMATS[kind], math.copysign(math.inf, number))
    code = _FORMATS.get(kind, "I")
    return _whole(value, 8 * struct.calcsize(code)).to_bytes(struct.calcsize(code), "little")


def _text(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape" if _escaped(text) else
                                                           "surrogatepass")  # fmt: skip
    return struct.pack("<Q", len(raw)) + raw


def _escaped(text: str) -> bool:
    return all(not 0xD800 <= ord(c) < 0xE000 or 0xDC80 <= ord(c) < 0xDD00 for c in text)


def _str(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _bytes(node: Node) -> bytes:
    return (
        node
        if isinstance(node, bytes)
        else b""
        if node is None
        else str(node)[:1000].encode("latin-1", "replace")
    )


def _whole(value: Node, bits: int) -> int:
    """Something as an unsigned number."""
    if isinstance(value, float):
        value = int(value) if math.isfinite(value) else 0
    return value % (1 << bits) if isinstance(value, int) else len(str(value)[:1000])


def _float(value: Node) -> float:
    if isinstance(value, int) and abs(value) > 1 << 1000:
        return math.inf
    return float(value) if isinstance(value, int | float) else math.nan


PARSERS: dict[str, Callable[[bytes], Node]] = {
    ".gguf": parse_gguf,
    ".safetensors": parse_safetensors,
    ".json": parse_json,
}
