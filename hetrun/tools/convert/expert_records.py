"""Experts as records: gate, up and down of one expert beside each other, so that one read brings all three.

GGUF says that with tensors of each expert's own, as its first mixtures had them. Together again they are what
every other program reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from hetrun.graph import Extent
from hetrun.loader import expert_names
from hetrun.loader.expert_names import PARTS
from hetrun.loader.formats.gguf import MAX_TENSORS
from hetrun.loader.formats.gguf_file import TensorInfo


@dataclass(frozen=True, slots=True)
class RecordTensor:
    """A tensor of the file to be, and where its bytes lie now, part behind part."""

    name: str
    shape: tuple[int, ...]
    ggml_id: int
    nbytes: int
    parts: tuple[Extent, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], members: list[TensorInfo]) -> RecordTensor:
        """The tensor that these are, one behind the other."""
        parts = tuple(Extent(t.path, t.offset, 1, t.nbytes, t.nbytes, t.stamp) for t in members)
        return cls(name, shape, members[0].ggml_id, sum(t.nbytes for t in members), parts)


def apart(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors, with each expert's matrices by themselves in those layers where that can be said."""
    layers: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for t in tensors.values():
        if (found := expert_names.of_all(t.name)) and len(t.shape) == 3:
            layers[found[0]][found[1]] = t
    mixed = {one[0] for name in tensors if (one := expert_names.of_one(name))}
    good = {
        layer
        for layer, parts in layers.items()
        if len(parts) == len(PARTS) and len({t.shape[0] for t in parts.values()}) == 1 and layer not in mixed
    }
    more = sum(t.shape[0] for layer in good for t in layers[layer].values())
    if len(tensors) + more > MAX_TENSORS:
        return dict(tensors)
    out: dict[str, TensorInfo] = {}
    for name, t in tensors.items():
        found = expert_names.of_all(name)
        if found and found[0] in good:
            out |= {each.name: each for each in _singles(t, *found)}
        else:
            out[name] = t
    return out


def _singles(t: TensorInfo, layer: str, part: str) -> Iterator[TensorInfo]:
    n = t.shape[0]
    size = t.nbytes // n
    for e in range(n):
        name, at = expert_names.single(layer, part, e), t.offset + e * size
        yield replace(t, name=name, shape=t.shape[1:], offset=at, nbytes=size)


def in_records(order: Iterable[TensorInfo]) -> list[RecordTensor]:
    """Where the first matrix of a layer's experts stood, all of them stand, expert by expert."""
    everything = list(order)
    layers: dict[str, list[tuple[int, int, TensorInfo]]] = defaultdict(list)
    for t in everything:
        if found := expert_names.of_one(t.name):
            layers[found[0]].append((found[2], PARTS.index(found[1]), t))
    out: list[RecordTensor] = []
    for t in everything:
        found = expert_names.of_one(t.name)
        members = sorted(layers.pop(found[0], ()), key=lambda m: m[:2]) if found else [(0, 0, t)]
        out += [RecordTensor.of(m.name, m.shape, [m]) for *_, m in members]
    return out


def together(order: Iterable[TensorInfo]) -> list[RecordTensor]:
    """Where the first of the matrices of one part stood, they stand as one tensor; what is no whole set of
    matrices of one form stays as it is."""
    everything = list(order)
    sets: dict[tuple[str, str], dict[int, TensorInfo]] = defaultdict(dict)
    for t in everything:
        if found := expert_names.of_one(t.name):
            sets[found[:2]][found[2]] = t
    taken = {t.name for t in everything}
    good = {
        key: [members[e] for e in range(len(members))]
        for key, members in sets.items()
        if _alike(members) and expert_names.whole(*key) not in taken
    }
    out: list[RecordTensor] = []
    waiting = dict(good)
    for t in everything:
        found = expert_names.of_one(t.name)
        if not found or found[:2] not in good:
            out.append(RecordTensor.of(t.name, t.shape, [t]))
        elif members := waiting.pop(found[:2], []):
            out.append(RecordTensor.of(expert_names.whole(*found[:2]), (len(members), *t.shape), members))
    return out


def _alike(members: Mapping[int, TensorInfo]) -> bool:
    """Whether these are experts 0, 1, 2 and so on, each a matrix of one shape and type."""
    forms = {(t.shape, t.ggml_id) for t in members.values()}
    return max(members) == len(members) - 1 and len(forms) == 1 and len(next(iter(forms))[0]) == 2


def count(tensors: Iterable[RecordTensor]) -> int:
    """How many experts stand as records."""
    found = (expert_names.of_one(t.name) for t in tensors)
    return len({(each[0], each[2]) for each in found if each})
