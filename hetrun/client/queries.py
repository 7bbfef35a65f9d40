"""Queries to the engine's process that are not generations: plain data that can cross a pipe.

Each kind of query has a lane, and lanes don't wait for each other: a slow template delays other templates and
nothing else. None of them occupies the engine's thread for long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, TypeVar

from hetrun.client.events import Message, Streaming

A = TypeVar("A", covariant=True)

# "now": answered at once; "texts": tokenised by the engine's thread, piece by piece; "templates": answered by
# the template process; "model": one after the other, after the current step.
Lane = Literal["now", "texts", "templates", "model"]
LANES: Mapping[Lane, int] = {"now": 1, "texts": 2, "templates": 1, "model": 1}  # threads of each


class Question(Generic[A]):
    """A query whose answer is an `A`."""

    lane: ClassVar[Lane]
    repeatable: ClassVar[bool] = True  # may be repeated if the process dies


@dataclass(frozen=True)
class LayerPlace:
    """A layer, or a part before or after all layers."""

    scope: str  # `blk.3`, `embed`, `output`
    nbytes: int = 0  # of weights as they are stored
    streamed: int = 0  # how many of these are read from disk for every pass
    crossing: int = 0  # how many of these cross a link to a device for every pass of one token
    decode: Mapping[str, int] = field(default_factory=dict)  # backends by the ops they run, for one token
    prefill: Mapping[str, int] = field(default_factory=dict)  # the same for many tokens


@dataclass(frozen=True)
class Tokenize(Question[list[int]]):
    """The tokens of a text.

    `add_special` adds the special tokens of a prompt: one begins the sequence if the model uses it and the
    text doesn't contain it. `parse_special` turns the texts of special tokens into these tokens.
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


# A text, or texts and tokens in turn; the texts are taken literally, whatever special tokens they spell.
Literally = str | tuple[str | int, ...]


@dataclass(frozen=True)
class Snippet:
    """A file, or a part of one, that belongs to the text with the gap."""

    text: str
    filename: str = "tmp"


@dataclass(frozen=True)
class FillPrompt(Question[list[int]]):
    """The prompt with which the model writes what stands between two texts, by its own tokens for that
    (`text.infill`); an error says which of these it lacks."""

    lane = "texts"
    prefix: Literally
    suffix: Literally
    extra: tuple[Snippet, ...] = ()
    prompt: str = ""  # the beginning of what is to be written, with special tokens
    repository: bool = False  # the text is one of the files of a repository, and `extra` are others
    max_tokens: int | None = None  # for which the prompt leaves room


@dataclass(frozen=True)
class RankPrompts(Question[list[list[int]]]):
    """The prompts with which a reranker judges each of these documents; an error if the model is none."""

    lane = "texts"
    query: str
    documents: tuple[str, ...]


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
    """The tokenizer and the chat template."""

    lane = "texts"


@dataclass(frozen=True)
class Render(Question[str]):
    """The text of a request's messages, rendered by the template."""

    lane = "templates"
    messages: tuple[Message, ...]
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptLength(Question[int]):
    """How many tokens a prompt with pictures has, as an answer's usage counts them: of messages, or of a text
    with marks. Pictures are decoded for this, and not encoded."""

    lane = "texts"
    pictures: tuple[bytes, ...] = field(repr=False)
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanNow(Question[Mapping[str, object]]):
    """The current plan, as `hetrun plan --json` prints it."""

    lane = "model"


@dataclass(frozen=True)
class StepSeconds(Question[float | None]):
    """The predicted time of a step; each sequence is (new tokens, earlier tokens). None: not known yet."""

    lane = "model"
    chunks: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SetRam(Question[Mapping[str, int]]):
    """Set the memory limit in bytes; returns the model's memory by kind.

    After an error nothing has changed; a BudgetError means that running requests need more. The query is not
    repeated in the next process, because the last one may have died of it.
    """

    lane = "model"
    repeatable = False
    nbytes: int


@dataclass(frozen=True)
class SlotDone:
    """What was done with a slot: its tokens, and the bytes of its file."""

    tokens: int
    nbytes: int = 0


@dataclass(frozen=True)
class SlotAction(Question[SlotDone]):
    """Write what was computed last in a slot to a file, read it from one, or forget it.

    UserError says why nothing was done. The file is not opened if its name is a symbolic link.
    """

    lane = "model"
    repeatable = False
    action: Literal["save", "restore", "erase"]
    slot: int
    path: str = ""


@dataclass(frozen=True)
class Slot:
    """A request in the engine, without any text."""

    id: int
    state: Literal["waiting", "prompt", "answer", "displaced"]
    seconds: float  # since its arrival
    prompt_tokens: int = 0  # 0: not known yet
    prompt_computed: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    answer_limit: int = 0
    place: int = -1  # the number of its place; -1: it waits for one


@dataclass(frozen=True)
class Counts:
    """Totals since the process started."""

    requests: Mapping[str, int] = field(default_factory=dict)  # by how they ended
    prompt_tokens: int = 0
    cached_tokens: int = 0  # how many of these came from the prefix cache
    answer_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    begun: int = 0  # answers that have a first token
    first_token_s: float = 0.0  # of these, from their arrival
    steps: int = 0
    step_s: float = 0.0
    pictures: int = 0  # that were encoded, or parts of some
    pictures_cached: int = 0  # that need not be, because they had been
    picture_s: float = 0.0  # of encoding


@dataclass(frozen=True)
class EngineState:
    """The engine's current load, and totals so far."""

    counts: Counts
    slots: tuple[Slot, ...]
    places: int  # sequences that run together
    context: int
    budget: int | None  # the memory limit in bytes
    streaming: Streaming | None
    memory: Mapping[str, int] = field(default_factory=dict)  # the bill, by what it is for
    used: int = 0  # the process's memory in bytes, by the kernel's count; 0: not known
    reason: str = ""  # of the last change of plan
    threads: Mapping[str, int] = field(default_factory=dict)  # of passes of one token, and of many
    devices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # bills of their own memory
    crossed: Mapping[str, int] = field(default_factory=dict)  # bytes of weights that came over links so far
    in_use: Mapping[str, int] = field(default_factory=dict)  # recent memory by kind; empty: unknown
    waited_s: float = 0.0  # of the engine's thread, for asynchronous devices
    at: float = field(default=0.0, compare=False)  # when, on a clock of the engine's process


@dataclass(frozen=True)
class Layers(Question[tuple[LayerPlace, ...]]):
    """Where each layer's weights are and which backends compute it; empty if the model runs as a whole."""

    lane = "now"


@dataclass(frozen=True)
class StateQuery(Question[EngineState]):
    """Everything that a panel shows of the engine."""

    lane = "now"


@dataclass(frozen=True)
class PlanForecast:
    """What other options would mean for the model that runs."""

    context: int
    decode_tok_s: float | None  # one token at a time, after a short text; None: unknown
    full_tok_s: float | None  # the same with the context full
    prefill_tok_s: float | None
    memory: Mapping[str, int]  # the bill, by what it is for
    devices: Mapping[str, Mapping[str, int]]  # bills of their own memory
    streamed_bytes: int  # of weights that every pass reads from disk
    measured: bool  # speeds come from times measured on this machine
    threads: int  # of passes of one token
    kv_type: str
    notes: tuple[str, ...] = ()


KNOBS = ("ctx", "kv_type", "ram", "vram", "threads")  # options that `WhatIf` can change


@dataclass(frozen=True)
class WhatIf(Question[PlanForecast]):
    """Predicts the effect of changing some of `KNOBS`, given as users write them; an error says why that is
    impossible. Changes nothing."""

    lane = "model"
    changes: Mapping[str, object] = field(default_factory=dict)
