"""Requests to an engine and its events: plain data that can cross a pipe.

One request gives any number of `prompt` and `token` events and then one last event, `done` or `error`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from hetrun.client.sampling_params import SamplingParams, Structure
from hetrun.system.units import counted, format_bytes

if TYPE_CHECKING:  # numpy comes with it
    from hetrun.graph.pooling import Pooling

Message = Mapping[str, object]
FinishReason = Literal["stop", "length", "cancelled"]

MOST_PICTURES = 64  # in a request
MOST_PICTURE_BYTES = 32 << 20  # of a picture's file
PICTURE = "image"  # the type of a content part that stands for the next picture
PICTURE_MARK = "<__media__>"  # stands for the next picture in a text, as in llama.cpp


@dataclass(frozen=True, slots=True)
class ContextShift:
    """What becomes of a text that fills the context: its oldest tokens are dropped, and it goes on.

    The first `keep` tokens stay (-1: the whole prompt), and of the rest `discard` are dropped at a time (0:
    half of them). What is left is computed again, at its new place.
    """

    on: bool | None = None  # None: as the engine was opened
    keep: int = 0
    discard: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One text to continue: exactly one of `messages`, `text` and `tokens` is given.

    `messages` go through the chat template. `text` is tokenised without it (special tokens are parsed, and
    the beginning-of-sequence token is added if the model uses one). `tokens` are used unchanged.

    `pictures` are files as they were sent. Each has its place in the messages, a content part
    `{"type": "image"}`, or in the text, `PICTURE_MARK`, in the same order.
    """

    params: SamplingParams
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    template_options: Mapping[str, object] = field(default_factory=dict)  # such as enable_thinking
    tools: tuple[Message, ...] = ()  # for the template
    parts: str | None = None  # a grammar for the answer, composed of parts (`grammar.composed`)
    client: str = ""  # the client: clients get equal shares, however many requests each has
    priority: int = 0  # lower ones go first
    deadline_s: float | None = None  # seconds from its arrival after which the answer is useless
    linger_s: float = 0.0  # how long events after the first token may be held back, to be sent together
    whole: bool = False  # the receiver needs nothing before the end: events may arrive all at once
    echo: bool = False  # also return the bytes of the prompt's tokens
    pooling: Pooling | Literal["rank"] | None = None  # return an embedding, or a score, and no answer
    forced: tuple[int, ...] = ()  # forced first tokens of the answer, for measurements
    progress: bool = False  # also report how much of the prompt is computed
    slot: int | None = None  # the number of the place that it must have; None: any
    shift: ContextShift | None = None
    fresh: bool = False  # compute the whole prompt, whatever is cached of it
    prompt_only: bool = False  # compute the prompt, for the prefix cache, and nothing else
    line_limit_s: float | None = (
        None  # the answer ends so long after its first token, once it has a line break
    )
    sampled_logprobs: bool = False  # log-probabilities of what the samplers leave, not of the model's own
    pictures: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        given = [x for x in (self.messages, self.text, self.tokens) if x is not None]
        if len(given) != 1:
            raise ValueError("a request has exactly one of messages, text and tokens")
        self._check_pictures()

    def _check_pictures(self) -> None:
        places = picture_parts(self.messages or ())
        if self.pictures and self.messages is None:  # without pictures the mark is a text like any other
            places = (self.text or "").count(PICTURE_MARK)
        if places != len(self.pictures):
            raise ValueError(
                f"a request with {counted(len(self.pictures), 'picture')} has places for {places}"
            )
        if len(self.pictures) > MOST_PICTURES:
            raise ValueError(f"a request may have {MOST_PICTURES} pictures, not {len(self.pictures)}")
        if max(map(len, self.pictures), default=0) > MOST_PICTURE_BYTES:
            raise ValueError(f"a picture may have {format_bytes(MOST_PICTURE_BYTES)}")

    @property
    def most_tokens(self) -> int | None:
        """The length limit of the answer; None: no limit."""
        return 0 if self.pooling or self.prompt_only else self.params.max_tokens

    @property
    def structure(self) -> Structure | None:
        """The required format of the answer, if any."""
        return Structure("parts", self.parts) if self.parts is not None else self.params.structure


def picture_parts(messages: Iterable[object]) -> int:
    """How many pictures these messages, not checked yet, have places for."""
    found = 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            found += sum(isinstance(part, Mapping) and part.get("type") == PICTURE for part in content)
    return found


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of a prompt is computed."""

    total: int
    cached: int
    computed: int  # including those that were cached
    seconds: float  # since it began


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds and rates of one request; a rate that was not measured is 0."""

    load_s: float = 0.0
    ttft_s: float = 0.0
    prompt_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    drafted: int = 0  # tokens that were guessed and verified
    accepted: int = 0  # how many of these were right
    picture_s: float = 0.0  # encoding pictures; part of ttft_s


def accepted(t: Timings) -> str:
    """How many of the drafted tokens were right, in words."""
    return f"{t.accepted} of {counted(t.drafted, 'drafted token')} accepted" if t.drafted else ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability and the best alternatives.

    The pieces are the bytes each token stands for; a front cannot look them up.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    piece: bytes | None = None
    top_pieces: tuple[bytes, ...] = ()  # of `top`, in its order


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def brief(value: Any) -> str:  # noqa: ANN401 - any dataclass
    """The repr of a dataclass, without fields that have their default."""
    shown = [
        f"{f.name}={found!r}"
        for f in fields(value)
        if f.repr and (found := getattr(value, f.name)) != _default(f)
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a request.

    `prompt` events come first, if requested: the bytes of the prompt's tokens, all at once (`echo`), their
    log-probabilities from the second token on, in parts, and how far it is computed (`progress`). `token`
    events carry `token` and the `text` that became certain with it; it may be empty, for half a character or
    the possible beginning of a stop string. The `done` event carries the rest of the text, and the
    log-probability of the token that ended the answer, which is not part of it. For an embedding it carries
    the vector: little-endian float32, not yet normalised; for a document that is ranked its log-odds.
    """

    kind: Literal["prompt", "token", "done", "error"]
    text: str = ""
    token: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    usage: Usage = Usage()  # one shared object: there is an event for each token
    timings: Timings = Timings()
    error: Exception | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    echo: tuple[bytes, ...] = ()
    embedding: bytes | None = None
    opened: str = ""  # with the first token: the opening mark of reasoning that the prompt has begun
    stopped: str = ""  # with `done`: the stop string that ended the answer
    slot: int = -1  # with the echo and `done`: the number of the request's place
    progress: PromptProgress | None = None
    dropped: int = 0  # with `done`: tokens of prompt and answer that context shifts dropped

    def __repr__(self) -> str:
        return brief(self)

    @property
    def last(self) -> bool:
        """Whether this is the request's last event."""
        return self.kind in ("done", "error")


@dataclass(frozen=True, slots=True)
class CurrentStep:
    """The step that the engine is computing."""

    since: float  # perf_counter of its process
    expected_s: float | None  # None: unknown
    what: str  # the segment
    segments: int = 0  # segments begun so far: a new one is progress


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The running model, as front ends describe it."""

    name: str
    path: str
    architecture: str
    n_vocab: int
    context: int
    parameters: int
    file_bytes: int
    template_origin: str
    load_s: float
    temperature: float | None = None  # the file's recommendation
    width: int = 0  # the width of an embedding; 0: not supported
    tool_format: str = "hermes"  # the format of its tool calls, by its template (`tool_parsers.formats`)
    pooling: Pooling = "mean"  # how its embeddings are pooled
    reranks: bool = False  # it judges how well documents answer a query (`text.reranking`)
    fills: bool = False  # it has the tokens to fill in the middle of a text (`text.infill`)
    thought_mark: str = ""  # the opening mark of its reasoning, if it reasons
    aliases: tuple[str, ...] = ()  # its names for clients of a server, if it was given some (--alias)
    listed_as: str = ""  # its name in a list of models
    pictures: bool = False  # it reads pictures: its encoder was found

    @property
    def id(self) -> str:
        """Its first alias, its name in a list, or the file's name, which users know; `name` comes from the
        file's metadata."""
        return self.aliases[0] if self.aliases else self.listed_as or self.file_id

    @property
    def file_id(self) -> str:
        """The file's name."""
        name = PurePath(self.path).name
        return name.removesuffix(".gguf")  # a folder's name may have dots, as in Qwen2.5-0.5B


@dataclass(frozen=True, slots=True)
class Streaming:
    """Statistics of passes that read some weights from disk; plain data that can cross a pipe."""

    passes: int
    bytes_read: int
    disk_bytes_s: float  # recent, like the next two; 0 before the first pass
    waiting: float  # the share of a pass's time that is spent waiting for the disk
    bytes_per_token: float
    locked_bytes: int  # of weights that stay in memory
    streamed_bytes: int  # of weights that every pass reads
    budget: int  # the memory limit in bytes
    least: int  # the smallest possible budget
    experts: int = 0  # of mixtures; 0: weights are read whole
    slots: int = 0  # how many of them fit into memory
    found: float = 0.0  # the share of chosen experts that were in memory, in recent passes
    guessed: float = 0.0  # the share of experts read ahead that the router then chose


@dataclass(frozen=True, slots=True)
class DeviceSlots:
    """Experts of the host that lie in slots of a device; plain data that can cross a pipe."""

    slots: int
    experts: int  # of mixtures that have slots
    chosen: int  # experts that small passes chose
    found: int  # how many of these were in a slot
    came: int  # experts that came into the slot of another one


OnEvent = Callable[[Event], None]
