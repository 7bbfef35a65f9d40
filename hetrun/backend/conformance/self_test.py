"""Whether a backend computes what it says, on the ops of one model: in less than a second, before it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hetrun.backend.conformance.cases import CASES, OpCase, small_mixtures, variant_of
from hetrun.backend.conformance.runner import build, outcome, reference, tried
from hetrun.backend.interface import Backend
from hetrun.errors import BackendUnavailable
from hetrun.graph import Op
from hetrun.graph.ops import MIXTURE

FEW, SHORT = 16, 100  # the most tokens of a small case, and the most that a sequence has seen before


class Kind(NamedTuple):
    """What an op is tried as."""

    kind: str
    types: tuple[str, ...]  # of its weights
    variant: tuple[str, ...] = ()  # where it is another computation than usual


def kind_of(op: Op) -> Kind:
    """Of an op."""
    variant = variant_of(op.attrs, len(op.inputs))
    return Kind(op.kind, tuple([w.quant.name for w in op.weights]), variant)


@dataclass(frozen=True, slots=True)
class ConformanceFault:
    """Something that a backend says it can, and that came out wrong."""

    kind: str
    types: tuple[str, ...]  # of the op's weights
    case: str
    said: str

    def __str__(self) -> str:
        types = f" with weights of {', '.join(dict.fromkeys(self.types))}" if self.types else ""
        return f"{self.kind}{types}: {self.said} (case {self.case})"


def faults(backend: Backend, kinds: Collection[Kind], quick: bool = True) -> list[ConformanceFault]:
    """What comes out wrong of the ops that the backend supports among those of these kinds and types; the
    first fault of each.

    The backend has started. Its threads stay as they are, and everything that it is given is given back.
    Types that cannot be packed here are not tried. `quick`: a few small cases, a millisecond or two each.
    """
    oracle = reference()
    found = (_first(backend, oracle, kind, quick) for kind in sorted(kinds))
    return [fault for fault in found if fault]


def _first(backend: Backend, oracle: Backend, kind: Kind, quick: bool) -> ConformanceFault | None:
    for case in cases_for(kind, quick):
        try:
            op = build(case)
            expected = outcome(case, op, oracle)
        except BackendUnavailable:  # only ggml packs such weights, and it is not here
            return None
        trial = tried(case, op, expected, backend)
        if trial.state in ("wrong", "fails"):
            said = trial.said if trial.state == "wrong" else f"it fails: {trial.said}"
            return ConformanceFault(kind.kind, kind.types, str(case), said)
    return None


def cases_for(of: Kind, quick: bool) -> Iterator[OpCase]:
    """The cases of the table that have as many weights, now of these types."""
    kind, types, variant = of
    if kind == "moe":
        # A router that rounds would choose other experts, and all would be right.
        types = ("F32", *types[1:])
    some = small_mixtures(types[1:MIXTURE], variant) if kind == "moe" and quick else CASES
    same = [c for c in some if (c.kind, len(c.weights), c.variant) == (kind, len(types), variant)]
    small = [c for c in same if not quick or _is_small(c)]
    yield from dict.fromkeys(found for case in small if (found := case.of_types(types)))


def _is_small(case: OpCase) -> bool:
    parts = case.company.parts
    return sum(now for _, now, _ in parts) <= FEW and all(before <= SHORT for before, _, _ in parts)
