"""The contract between the runtime and what computes: backends, their buffers and their runners.

A backend starts as one file: a table of op functions and the base class in `hetrun.backend.interpreter`. A
fast one overrides `wants` (how it would like its weights) and `compile` (a segment as one native call).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hetrun.backend.expert_slots import ExpertSlots, Slots, Slotted, first_slots
from hetrun.backend.library_model import LibraryBackend
from hetrun.backend.op_profile import ActivityTimes
from hetrun.backend.picture_encoder import Pictures
from hetrun.backend.weight_streaming import Cacheable, Mappable, PartialCompute
from hetrun.graph import Op, Rows as WhichRows, Value, Weight
from hetrun.graph.ops import MIXTURE, Attention, Moe
from hetrun.graph.top_logits import Rows as Rows, TopLogits as TopLogits
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.kv.paged_allocator import KvView
from hetrun.memory.kv.states import StateView

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Chosen = Callable[[str, NDArray[np.integer[Any]]], None]  # rows of experts' numbers
FLOAT_BYTES = 4
# A product, or one whose results are logits; rows of a table; small numbers; the products of a mixture; one
# product for each head.
Use = Literal["product", "logits", "lookup", "vector", "experts", "heads"]
Precision = Literal["exact", "fast"]
# In which attention tokens of a pass see those after them: nowhere, everywhere, or where there is a window.
SeesWhole = Literal["", "all", "windows"]


@dataclass(frozen=True, slots=True)
class Available:
    """A backend can work here."""

    detail: str


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A backend cannot work here."""

    reason: str


Probe = Available | Unavailable


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """What may be taken of the memory that a device has to itself."""

    limit: int  # bytes, in all
    besides: int  # of these what is not for weights: the driver, what passes work in, keys and values
    rows: int = 0  # of that what keys and values have in any case

    @property
    def room(self) -> int:
        """What weights may take."""
        return self.limit - self.besides


@dataclass(frozen=True, slots=True)
class SequencePart:
    """The tokens of one sequence inside a pass: rows a to b of it, of which `wanted` rows are asked for.

    `kv` has a view for each group of layers. It ends with this pass's own tokens and begins with the first
    token that one of them sees: token i of the part sees the rows before view.length - (b - a) + i + 1, and
    in a group with a window only the last of those. In a pass that is `whole` it sees those after it,
    too.
    """

    a: int
    b: int
    wanted_a: int
    wanted_b: int
    kv: tuple[KvView, ...]
    states: StateView | None = None  # where the layers that keep states of a fixed size have them


@dataclass(slots=True)
class Pass:
    """One trip through the graph: tokens of one or more sequences, each one's tokens next to each other.

    When no token is wanted, values of wanted rows are empty, and a backend need not make them.
    """

    tokens: Ints
    positions: Ints
    slots: tuple[Ints, ...]  # for each group of layers the KV row of each token
    wanted: Ints  # which tokens' results are asked for
    parts: tuple[SequencePart, ...]
    values: dict[str, Floats] = field(default_factory=dict)  # filled as segments run
    # A value, and how many of the greatest numbers of each row are enough of it: a backend that makes it may
    # leave the others out, and puts them into `greatest` instead of `values`.
    enough: tuple[str, int] | None = None
    greatest: TopLogits | None = None
    # To be called as often as is convenient in a long pass: passes of other sequences may run meanwhile, on
    # this thread and maybe on this backend. Only inside of `submit`, by the thread that called it.
    between: Callable[[], None] | None = None
    # To be told which experts the rows of a mixture have chosen, by the name of its router, if that is asked
    # for; by what holds all of them, in `submit` or `wait`. A backend that can only say it slowly need not.
    chosen: Chosen | None = None
    # Of mixtures with slots which slot each expert has, or -1; of others it is as in the beginning. Nothing
    # changes that while a pass runs.
    residents: Mapping[Slotted, Slots] = field(default_factory=dict)
    places: Ints | None = None  # of each token its positions in time, height and width; None: all are one
    # Where each token sees those of the pass after it, as rows of some pictures do. It has tokens of
    # one sequence then, and a window counts backwards only.
    whole: SeesWhole = ""
    # What a backend has worked out of the pass for one of its segments, and needs for others.
    worked_out: dict[Any, Any] = field(default_factory=dict)

    def along(self, axis: int, rows: WhichRows = "tokens") -> Ints:
        """The positions along an axis of all tokens, or of those that are wanted, for what turns by them."""
        found = self.positions if self.places is None else self.places[:, axis]
        return found if rows == "tokens" else found[self.wanted]

    @property
    def shape(self) -> PassShape:
        """What a compiled segment depends on."""
        return PassShape(tuple([(p.b - p.a, p.wanted_b - p.wanted_a) for p in self.parts]), self.whole)

    @property
    def depth(self) -> float:
        """Tokens that a token of the pass sees on average, itself included: what attention costs grows."""
        seen = sum(
            (p.b - p.a) * (max([v.length for v in p.kv], default=1) - (p.b - p.a - 1) / 2) for p in self.parts
        )
        return seen / len(self.tokens)

    def rows(self, value: Value) -> int:
        """Rows that a value has in this pass."""
        return len(self.tokens) if value.rows == "tokens" else len(self.wanted)


@dataclass(frozen=True, slots=True)
class PassShape:
    """For each sequence of a pass its tokens and its wanted rows."""

    parts: tuple[tuple[int, int], ...]
    whole: SeesWhole = ""

    @property
    def tokens(self) -> int:
        """Tokens in the pass."""
        return sum(p[0] for p in self.parts)

    @property
    def wanted(self) -> int:
        """Wanted rows in the pass."""
        return sum(p[1] for p in self.parts)


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops that one backend runs as one call, and why it is this backend."""

    name: str
    backend: str
    ops: tuple[Op, ...]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    why: str


@dataclass(frozen=True, slots=True)
class WeightUse:
    """A weight in the form a backend wants it for one purpose: `w_q+w_k+w_v` as a product.

    `matrices` matrices of one shape lie on top of each other in the weight of some experts. With `slots`
    there is room for as many of them, and these lie there at first. A vector is wanted as float32 numbers,
    `offset` added to each.
    """

    weight: Weight
    use: Use
    matrices: int = 1
    offset: float = 0.0
    slots: tuple[int, ...] = ()


class Buffer(Protocol):
    """A weight where a backend wants it."""

    @property
    def nbytes(self) -> int:
        """Memory of the host that it takes."""
        ...


ReadInto = Callable[[Weight, NDArray[np.uint8]], None]
Buffers = Mapping[WeightUse, Buffer]


class Done(Protocol):
    """Work that was given to a device."""

    def wait(self) -> None:
        """Return when it is done, or raise what went wrong."""
        ...


class Runner(Protocol):
    """A compiled segment."""

    def submit(self, work: Pass) -> Done:
        """Read the segment's inputs from `work.values` and put its results there.

        In the middle of it, wherever `work.between` is called, other runners may run, but never this one.
        """
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


class Finished:
    """Work that was done when it was submitted."""

    def wait(self) -> None:
        """Nothing is left to do."""


FINISHED = Finished()


class Backend(ABC):
    """One way to compute on one device."""

    name: str
    native_seconds = 0.0  # inside calls that leave Python
    asynchronous = False  # its runners' `submit` returns before the work is done
    started = True  # False: `start` must be called before weights are brought in
    spent: ActivityTimes | None = (
        None  # where runners book what each kind of work takes, while that is measured
    )
    crossed = 0  # bytes of weights that came over a link so far, where they do for each pass
    # It lends states, may bring rows later, and has those home that it reads and others have.
    keeps_states = False
    exact = False  # whether results are wanted that are as close to the model's as this backend can make them
    sees_whole = False  # its attention knows passes in which tokens see those after them (`Pass.whole`)
    whole = False  # whether there will be such passes: what does not know them supports no attention then
    leaves_to_slots = False  # its mixtures can leave to others what lies in their slots in a pass
    arithmetic = ""  # what products are computed in, where it is not the weights' own type: "bf16"

    def start(self) -> None:  # noqa: B027 - most are ready when they are made
        """Load the libraries that compute. What takes a second or 100 MiB waits until a plan needs it."""

    def grant(self, nbytes: int | None) -> OwnMemory | None:
        """Take `nbytes` of the device's own memory at most; None: what is free, less a part that is left
        to others. Called before anything is brought in, if at all; BudgetError where it cannot work with so
        much. The result is None where the device has no memory to itself."""
        return None

    @property
    def granted(self) -> OwnMemory | None:
        """What it may take of that memory now: less than was granted, where others came first while it was
        not started; None if nothing was granted."""
        return None

    @abstractmethod
    def supports(self, op: Op) -> bool:
        """Whether it can run an op of this kind on weights of these types."""

    def rounding(self, op: Op) -> float:
        """About how large the error of an op's results is, in parts of their size; 0: what float32 makes."""
        return 0.0

    def wants(self, ops: Sequence[Op]) -> tuple[WeightUse, ...]:
        """The weights of a segment in the form that `compile` will look them up."""
        return tuple(dict.fromkeys(use_of(op, i) for op in ops for i in range(len(op.weights))))

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        """Memory of the host that these weights will take once they are brought in."""
        return sum(use.weight.nbytes for use in wanted)

    def device_bytes(self, wanted: Sequence[WeightUse]) -> int:
        """The same of the device's own memory."""
        return 0

    def most_at_once(self, ops: Sequence[Op]) -> int:
        """Tokens of a pass of a long prompt, where a device says so itself; 0: by what a core can do."""
        return 0

    def streaming(self, largest: int) -> tuple[Backend, OwnMemory] | None:
        """A second way to work on the same device, by the side of this one: with weights that stay on the
        host and cross a link for every pass; and what of the device's memory is left then. Asked where that
        has no room for all weights, before any is brought in; `largest`: what a layer's part takes there."""
        return None

    def most_needed_at_once(self, ops: Sequence[Op]) -> int:
        """The most bytes of the device's memory that the weights of one call take: weights that cross a link
        may come and go in pieces of that size."""
        return self.device_bytes(self.wants(ops))

    def streams(self, wanted: WeightUse) -> bool:
        """Whether a weight does not stay in the device's own memory, and crosses a link for every pass."""
        return False

    @property
    def bytes_from_files(self) -> int:
        """Memory of the host with which weights that cross a link can come from their files for every pass;
        0: they cannot."""
        return 0

    def stream_from_files(self, read: ReadInto) -> None:
        """Keep no weights that cross a link on the host: `read` reads them for every pass, on threads of the
        backend's own. Before any is brought in."""
        raise NotImplementedError(f"{self.name} cannot read weights for every pass")

    def evict_streamed(self) -> None:  # noqa: B027 - where nothing crosses
        """Between two runs: weights that have crossed are to cross again, as in a pass, in which those of
        other layers come in between. A part of a model that is measured would find its own."""

    @abstractmethod
    def upload(self, wanted: WeightUse, read: ReadInto) -> Buffer:
        """Bring a weight in; `read` fills a buffer with the stored bytes of a weight, or of rows of it."""

    def partial(self) -> PartialCompute | None:
        """How it computes with weights of which only a part is in memory; None if it cannot."""
        return None

    def experts(self) -> Cacheable | None:
        """How it computes with experts that come when they are wanted; None if it cannot."""
        return None

    def expert_slots(self) -> ExpertSlots | None:
        """How experts come into slots of its own memory while it runs; None if it has none."""
        return None

    def mapping(self) -> Mappable | None:
        """How it computes with weights that lie in their files, mapped; None if it cannot."""
        return None

    def release(self, buffer: Buffer) -> None:  # noqa: B027 - where a buffer's memory ends with the object
        """Give the memory of a weight back; nothing that was compiled with it runs any more."""

    @abstractmethod
    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        """Prepare a segment for passes of one shape."""

    def set_threads(self, threads: int) -> None:  # noqa: B027 - most backends have no threads of their own
        """Compute with that many threads from now on."""

    def alike(self, ops: Sequence[Op]) -> int:
        """The most rows of a pass of these ops whose bits do not tell how many rows there are."""
        return 1

    def watch(self, spent: ActivityTimes | None) -> None:
        """Book what the ops of every run take, from now on or (None) no more. Runs may be slower meanwhile.

        A backend whose runners do not look at `spent` can only be timed from outside.
        """
        self.spent = spent

    def peaks(self) -> Mapping[str, float]:
        """Operations per second that its products reach, by what they are computed in: measured now, where a
        backend knows how to, in half a second."""
        return {}

    def cancel(self) -> None:  # noqa: B027 - a backend whose calls are short needs none
        """End the call that is running, from any thread; it raises Cancelled."""

    def rearm(self) -> None:  # noqa: B027 - the pair of cancel
        """Forget a cancel, so that the next call runs."""

    @property
    def overhead_bytes(self) -> int:
        """Memory held besides buffers: compiled graphs, scratch."""
        return 0

    def close(self) -> None:  # noqa: B027 - optional
        """Give everything back."""


def writes_rows(op: Op) -> bool:
    """Whether it must run even if no row is wanted: it puts keys and values into the cache."""
    return isinstance(op.attrs, Attention) and op.attrs.sharing != "borrows"


def slotted(op: Op) -> Slotted:
    """By what a pass says where the experts of a mixture with slots lie."""
    assert isinstance(op.attrs, Moe)
    return op.weights[0].name, op.attrs.slots


def slots_of(op: Op, work: Pass) -> Slots:
    """Which slot each expert of such a mixture has in a pass."""
    assert isinstance(op.attrs, Moe)
    found = work.residents.get(slotted(op))
    return first_slots(op.attrs.n_experts, op.attrs.slots) if found is None else found


def sees_whole(whole: SeesWhole, window: int) -> bool:
    """Whether tokens of such a pass see those after them in attention with a window, or (0) without."""
    return whole == "all" or (whole == "windows" and window > 0)


def looks_up(op: Op) -> bool:
    """Whether its weight is a table, of which a pass reads a few rows."""
    return op.kind in ("embed", "positions")


def use_of(op: Op, index: int) -> WeightUse:
    """An op's index-th weight, and what it does with it."""
    weight = op.weights[index]
    if looks_up(op):
        return WeightUse(weight, "lookup")
    if isinstance(op.attrs, Moe) and 0 < index < MIXTURE:
        return WeightUse(weight, "experts", op.attrs.matrices)
    if op.kind == "per_head":
        return WeightUse(weight, "heads")
    return WeightUse(weight, "product" if op.kind in ("linear", "head", "moe") and index == 0 else "vector")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What the registry knows about a backend before it is loaded."""

    name: str
    probe: Callable[[], Probe]
    create: Callable[[], Backend]
    summary: str = ""
    preference: int = 50  # the backend with the highest one runs what it can; 0: only what no other can
    way_of: str = (
        ""  # another backend, of which it is a second way to work: who names that one allows this too
    )
    precision: Precision = "exact"  # a fast one is only there if the user wants it fast
    by_name: bool = False  # only there if the user names it: naming what it is a way of is not enough
    own_memory: bool = False  # its device has memory to itself, of which --vram says how much may be taken
    examine: Callable[[], Probe] | None = None  # `probe` with a closer look, which may take seconds
    whole: LibraryBackend | None = None  # it takes no segments, only whole models; no planner chooses it
    pictures: Pictures | None = None  # it encodes pictures, whatever runs the model

    @property
    def is_last_resort(self) -> bool:
        """Whether it runs only what no other backend can: it is not made to be fast."""
        return self.preference <= 0
