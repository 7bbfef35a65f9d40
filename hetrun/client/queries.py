"""What a front may ask the engine's process besides answers of the model: plain data that can cross a pipe.

Each kind of question has a lane, and lanes do not wait for each other: a slow template holds up other
templates, and nothing else. None of them holds up the engine's thread for long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, TypeVar

from hetrun.client.events import Message, Streaming

A = TypeVar("A", covariant=True)

# "now": answered at once from what is known; "texts": cut by the engine's thread, piece by piece;
# "templates": by the process that runs them; "model": behind the step that runs now, one behind the other.
Lane = Literal["now", "texts", "templates", "model"]
LANES: Mapping[Lane, int] = {"now": 1, "texts": 2, "templates": 1, "model": 1}  # so many threads each


class Question(Generic[A]):
    """Its answer is an `A`."""

    lane: ClassVar[Lane]
    repeatable: ClassVar[bool] = True  # may be asked again where a process dies over it


@dataclass(frozen=True)
class LayerPlace:
    """A layer, or what stands before or behind all of them."""

    scope: str  # `blk.3`, `embed`, `output`
    nbytes: int = 0  # of weights as they are stored
    streamed: int = 0  # of these, so many come from disk for every pass
    crossing: int = 0  # of these, so many come over a link to a device for every pass of one token
    decode: Mapping[str, int] = field(default_factory=dict)  # backends by the ops they run, for one token
    prefill: Mapping[str, int] = field(default_factory=dict)  # the same for many


@dataclass(frozen=True)
class Tokenize(Question[list[int]]):
    """The tokens of a text.

    With `add_special` as a prompt has them: one begins the sequence where the model wants that and the text
    does not say it itself. With `parse_special` texts of special tokens are these.
    """

    lane = "texts"
    text: str
    add_special: bool = True
    parse_special: bool = True


@dataclass(frozen=True)
class Detokenize(Question[list[bytes]]):
    """The bytes of each of these tokens; a character may take several."""

    lane = "texts"
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class TokenizerFacts:
    """A vocabulary, and the template that writes in it."""

    n_tokens: int
    bos: int | None
    eos: int | None
    add_bos: bool
    bos_text: str
    eos_text: str
    template: str
    template_origin: str


@dataclass(frozen=True)
class TokenizerInfo(Question[TokenizerFacts]):
    """What there is to know of the tokenizer and the chat template."""

    lane = "texts"


@dataclass(frozen=True)
class Render(Question[str]):
    """Messages as the text that a request with them begins with."""

    lane = "templates"
    messages: tuple[Message, ...]
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanNow(Question[Mapping[str, object]]):
    """What `hetrun plan --json` says, of what runs now."""

    lane = "model"


@dataclass(frozen=True)
class StepSeconds(Question[float | None]):
    """What a step takes of so many tokens of each sequence, each behind so many others; None: unknown yet."""

    lane = "model"
    chunks: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SetRam(Question[Mapping[str, int]]):
    """Take at most so many bytes from now on; what the model takes then, by what it is for.

    An error says why nothing has changed: a BudgetError that what runs needs more. It is not asked again of
    the next process: the last one may have died of it.
    """

    lane = "model"
    repeatable = False
    nbytes: int


@dataclass(frozen=True)
class Slot:
    """A request that the engine has; nothing of what it says."""

    id: int
    state: Literal["waiting", "prompt", "answer", "displaced"]
    seconds: float  # since it came
    prompt_tokens: int = 0  # 0: not known yet
    prompt_computed: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    answer_limit: int = 0


@dataclass(frozen=True)
class Counts:
    """Sums since the process began."""

    requests: Mapping[str, int] = field(default_factory=dict)  # by how they ended
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, so many were not computed
    answer_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    begun: int = 0  # answers whose first token came
    first_token_s: float = 0.0  # of these, from their arrival
    steps: int = 0
    step_s: float = 0.0


@dataclass(frozen=True)
class EngineState:
    """What the engine has to do, and what it has done."""

    counts: Counts
    slots: tuple[Slot, ...]
    places: int  # sequences that run together
    context: int
    budget: int | None  # bytes that everything may take
    streaming: Streaming | None
    memory: Mapping[str, int] = field(default_factory=dict)  # the bill, by what it is for
    used: int = 0  # bytes that the process has by the kernel's count; 0: not known
    reason: str = ""  # of the last change of plan
    threads: Mapping[str, int] = field(default_factory=dict)  # of passes of one token, and of many
    devices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # bills of their own memory
    crossed: Mapping[str, int] = field(default_factory=dict)  # bytes of weights that came over links so far
    in_use: Mapping[str, int] = field(default_factory=dict)  # memory of late, like the bill; empty: unknown
    waited_s: float = 0.0  # of the engine's thread, for devices that work by themselves
    at: float = field(default=0.0, compare=False)  # when this was so, on a clock of the engine's process


@dataclass(frozen=True)
class Layers(Question[tuple[LayerPlace, ...]]):
    """Where each layer's weights lie and what computes with them; nothing of a model that runs as a whole."""

    lane = "now"


@dataclass(frozen=True)
class State(Question[EngineState]):
    """Everything for a look at the engine from outside."""

    lane = "now"


@dataclass(frozen=True)
class Foreseen:
    """What other options would mean for the model that runs."""

    context: int
    decode_tok_s: float | None  # one token at a time, behind a short text; None: nobody knows
    full_tok_s: float | None  # the same with the context full
    prefill_tok_s: float | None
    memory: Mapping[str, int]  # the bill, by what it is for
    devices: Mapping[str, Mapping[str, int]]  # bills of their own memory
    streamed_bytes: int  # of weights that every pass reads from disk
    measured: bool  # speeds come from times that were measured here
    threads: int  # of passes of one token
    kv_type: str
    notes: tuple[str, ...] = ()


KNOBS = ("ctx", "kv_type", "ram", "vram", "threads")  # what can be tried by `WhatIf`


@dataclass(frozen=True)
class WhatIf(Question[Foreseen]):
    """What would be with some of `KNOBS` changed, as users write them; an error says why that cannot be.
    Nothing is changed by it."""

    lane = "model"
    changes: Mapping[str, object] = field(default_factory=dict)
