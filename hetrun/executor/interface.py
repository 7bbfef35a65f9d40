"""What the engine knows of a model, and of the memory that one may take."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from hetrun.backend import Floats, Rows
from hetrun.client.events import DeviceSlots, Streaming
from hetrun.client.queries import LayerPlace
from hetrun.errors import BudgetError
from hetrun.executor.stats import Stats
from hetrun.executor.steps import Between, Step
from hetrun.memory.kv.prefix_cache import Prefixes
from hetrun.planner.plan import PlanSet


class ModelLimits(NamedTuple):
    """What a model takes; known before its weights are read."""

    context: int  # tokens
    n_vocab: int


class BudgetedModel(Protocol):
    """The part of a `Model` that knows how much memory it takes."""

    stats: Stats

    def set_ram(self, nbytes: int) -> None:
        """Take at most `nbytes` bytes from now on, everything together; called between two steps.

        Every sequence stays as it is, and so does the context. BudgetError: not now; it says what would do at
        least, and nothing has changed. OptionError: this model never can.
        """
        ...

    def bill(self) -> Mapping[str, int]:
        """What takes how much now."""
        ...

    def streaming(self) -> Streaming | None:
        """What passes are like that read weights from disk; None where all of them are in memory."""
        ...

    def rest(self) -> None:
        """Give the system back what sequences that are gone had, and what costs little to have again."""
        ...


def set_ram(model: BudgetedModel, nbytes: int, prefixes: Prefixes | None) -> None:
    """Change the budget. Where memory is short cached prompts go first, as everywhere: those that were not
    used for longest, and no more than have to."""
    while True:
        try:
            model.set_ram(nbytes)
            return
        except BudgetError:
            streaming = model.streaming()
            in_vain = streaming is not None and nbytes < streaming.least
            if in_vain or prefixes is None or not prefixes.drop_one():
                raise
            model.rest()


def look(model: BudgetedModel) -> Stats:
    """What was measured, and what the disk is like by now; on the engine's thread."""
    model.stats.streaming = model.streaming()
    if isinstance(model, HasSlots):
        model.stats.device_slots = model.device_slots()
    return model.stats


@runtime_checkable
class HasSlots(Protocol):
    """A model whose experts may have slots on a device."""

    def device_slots(self) -> DeviceSlots | None:
        """How well these do; None where there are none."""
        ...


@runtime_checkable
class LogitChooser(Protocol):
    """A model that can leave out logits that are not used."""

    def choose(self, step: Step, k: int, between: Between | None = None) -> Rows:
        """The k greatest logits of each wanted token, or all of them."""
        ...


class Model(BudgetedModel, Protocol):
    """What the engine knows of a model."""

    n_vocab: int
    width: int  # of hidden states; 0: it does not give them
    context: int
    max_sequences: int  # that may run together
    stats: Stats

    @property
    def stands_aside(self) -> bool:
        """Whether steps of others can run in the middle of a long one."""
        ...

    @property
    def segment(self) -> str:
        """What runs now, in words; from any thread."""
        ...

    @property
    def plans(self) -> PlanSet:
        """The plans in force."""
        ...

    @property
    def places(self) -> tuple[LayerPlace, ...]:
        """Where each layer's weights lie and what computes with them, if known; from any thread."""
        ...

    @property
    def crossed(self) -> Mapping[str, int]:
        """Bytes of weights that came over each device's link so far, for passes; from any thread."""
        ...

    @property
    def reason(self) -> str:
        """Why passes run as they do: the last change, also one that was taken back; from any thread."""
        ...

    @property
    def in_use(self) -> Mapping[str, int]:
        """Memory that was in use recently, by what it is for; from any thread."""
        ...

    @property
    def hidden(self) -> Floats:
        """The hidden states that chunks of the last step had kept, one chunk's after the other's."""
        ...

    def step(self, step: Step, between: Between | None = None) -> Floats:
        """The logits of the wanted tokens, or their hidden states where the step says so; `between` may run
        steps of other sequences in the middle of it."""
        ...

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Seconds of a step: for each sequence its tokens, and how many come before them; None: unknown."""
        ...

    def fits(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Whether there is memory for these numbers of more tokens of each of these sequences."""
        ...

    def shareable(self, seq: int, n: int) -> int:
        """How many of a sequence's first n tokens a new one could begin with."""
        ...

    @property
    def alike(self) -> int:
        """The most tokens of a step whose rows have the bits that they have one by one; 0: several at once
        are no use."""
        ...

    @property
    def native_seconds(self) -> float:
        """Time spent in calls that leave Python."""
        ...

    def alloc(self) -> int: ...
    def fork(self, seq: int, n: int | None = None) -> int: ...
    def free(self, seq: int) -> None: ...
    def length(self, seq: int) -> int: ...

    def truncate(self, seq: int, n: int) -> int:
        """Cut a sequence to n tokens or, where what it knew then was not kept, to fewer; to how many."""
        ...

    @property
    def checkpoint_every(self) -> int:
        """Tokens after which what a sequence knows is worth keeping; 0: it can be cut anywhere."""
        ...

    def thin(self, over: Collection[int] = ()) -> bool:
        """Give up something that was kept so that a sequence can be cut there; False if there is nothing. The
        last step of some sequences is `over`: nothing of it will be taken back."""
        ...

    def cancel(self) -> None:
        """End the step that is running; from any thread."""
        ...

    def rearm(self) -> None:
        """Let the next step run."""
        ...

    def expect(self, tokens: int, between: Between | None = None) -> None:
        """`tokens` tokens of prompts wait: prepare for them. Where that takes long, `between` is called."""
        ...

    def tend(self, idle: bool = False, between: Between | None = None) -> None:
        """Between two steps: look after the plan, with `between` in the same way."""
        ...

    def rest(self) -> None:
        """Nothing has come for a while: what only costs time to have again is given back."""
        ...

    def close(self) -> None: ...
