"""What there is to measure of a model here: each part on each backend, in passes of several sizes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hetrun.graph import Graph, Op
from hetrun.graph.ops import Attention
from hetrun.graph.signature import Unit, form_of, of_wanted_rows
from hetrun.planner.costmodel import OpWork
from hetrun.planner.segment_cost import FEW

TOKENS = (1, 4, 16, 64, 512)  # of one sequence
SAMPLES, HOME_SAMPLES = 3, 8  # layers that take turns where weights come from memory; the first cost a copy
MIDDLE = 64
SMALL = 16  # up to here a pass reads every weight and does little else: the whole model is run
DEEP = 4096  # tokens in the past of the deepest probe
# The fact: how many times as long a host's work and weights that cross take while both read the same memory.
BESIDE = "beside_link"
LINK = "link_bytes_s"  # the fact: how fast values cross to a backend that works by itself, and back


@dataclass(frozen=True, slots=True)
class Trial:
    """One thing to measure: ops that form a segment, on a backend, in a pass of some size."""

    name: str
    form: str
    ops: tuple[tuple[Op, ...], ...]  # of that form, run in turn: no cache makes them faster than they are
    backend: str
    threads: int
    tokens: int
    seen: int = 0  # tokens before these
    sequences: int = 1
    alone: bool = False  # with nothing before and after it: in a pass a backend may work ahead

    @property
    def work(self) -> OpWork:
        """What it is filed under."""
        device = alone(self.backend) if self.alone else self.backend
        return OpWork(self.form, device, self.threads, self.sequences > 1)

    @property
    def size(self) -> tuple[int, float]:
        """Tokens of all sequences, and how many each sees on average: what its times are kept under."""
        return self.tokens * self.sequences, self.seen + (self.tokens + 1) / 2


def alone(backend: str) -> str:
    """Under which name times are kept of a backend that works by itself, where it had nothing else to do."""
    return f"{backend}:alone"


def largest_of(ubatch: int, context: int) -> list[int]:
    """Tokens of the longest passes of a device: what they take is no multiple of what fewer tokens take,
    where weights have to cross first."""
    return [n for n in (min(ubatch, context),) if n > TOKENS[-1]]


def trials_of(
    graph: Graph,
    units: Sequence[Unit],
    backend: str,
    home: bool,
    threads: Sequence[int],
    context: int,
    ubatch: int,
    wide: Sequence[int] = (),
    device: bool = False,
    there: Collection[str] = (),
) -> list[Trial]:
    """What to measure of a backend, the most telling first; `home` is where every weight lies already, or
    those of the scopes that are `there`, which stand for others like them: a device that they fill has no
    room for more.

    Of the numbers of threads, `wide` are those with which large passes are measured, besides the most.
    """
    most = threads[-1]
    sizes = [n for n in (*TOKENS[:-1], min(TOKENS[-1], ubatch)) if n <= min(ubatch, context)]
    by_form = _by_form(units, there)
    found: list[Trial] = []

    def add(tokens: int, n_threads: int, seen: int = 0, deep: bool = False) -> None:
        for form, members in by_form.items():
            ops = [u.ops for u in members]
            if deep and not any(isinstance(op.attrs, Attention) for op in ops[0]):
                continue
            each, sequences = tokens, 1
            if of_wanted_rows(ops[0]):
                if tokens > FEW:
                    continue  # a row or two are wanted of a large pass, too
                each, sequences = 1, tokens
            # Small passes read weights from memory, so a few layers take turns; in larger ones they work.
            samples = tuple(ops[: (1 if tokens > SMALL else HOME_SAMPLES if home else SAMPLES)])
            found.append(Trial(members[0].scope, form, samples, backend, n_threads, each, seen, sequences))

    # From the middle outwards: with two sizes the others follow roughly. What only wanted rows go through has
    # no middle, takes no time, and nothing is planned without it.
    largest = largest_of(ubatch, context) if device else []
    for tokens in sorted([*sizes, *largest], key=lambda n: abs(n.bit_length() - MIDDLE.bit_length())):
        add(tokens, most)
    found.sort(key=lambda t: t.sequences < FEW)
    seen = min(DEEP, context - max(sizes)) // 32 * 32
    if seen >= 256:
        for tokens in sizes:
            add(tokens, most, seen, deep=True)
    if home:
        whole = not there
        if whole:
            found += _of_all(graph, backend, most, ubatch, seen)
        for fewer in threads[:-1]:
            for tokens in [n for n in sizes if n <= SMALL or fewer in wide]:
                add(tokens, fewer)
                if seen >= 256:
                    add(tokens, fewer, seen, deep=True)
            if whole:
                found.append(Trial("whole", form_of(graph.ops), (graph.ops,), backend, fewer, 1))
    return found


def _by_form(units: Sequence[Unit], there: Collection[str]) -> dict[str, list[Unit]]:
    """Units that are equal work; of each kind those that are `there`, if any are."""
    found: dict[str, list[Unit]] = {}
    for unit in units:
        found.setdefault(unit.form, []).append(unit)
    return {form: [u for u in some if u.scope in there] or some for form, some in found.items()}


def _of_all(graph: Graph, backend: str, threads: int, ubatch: int, seen: int) -> list[Trial]:
    """The whole graph as one segment."""
    whole = "whole", form_of(graph.ops), (graph.ops,), backend, threads
    found = [Trial(*whole, n) for n in (1, 2, 4, 8, 16, 32) if n <= ubatch]
    found += [Trial(*whole, 1, 0, n) for n in (2, 4, 8, 16)]
    return [*found, Trial(*whole, 1, seen)] if seen >= 256 else found
