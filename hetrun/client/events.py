"""What is asked of an engine and what it answers: plain data that can cross a pipe.

One request gives any number of `prompt` and `token` events and then one last event, `done` or `error`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from hetrun.client.sampling_params import SamplingParams, Structure

if TYPE_CHECKING:  # numpy comes with it
    from hetrun.graph.pooling import Pooling

Message = Mapping[str, object]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One text to continue: exactly one of `messages`, `text` and `tokens` is given.

    `messages` go through the chat template; `text` is tokenised as it stands (special tokens
    parsed, the beginning-of-sequence token added where the model wants one); `tokens` are taken as they are.
    """

    params: SamplingParams
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    template_options: Mapping[str, object] = field(default_factory=dict)  # such as enable_thinking
    tools: tuple[Message, ...] = ()  # that the template is to tell of
    parts: str | None = None  # what the answer must look like, put together of parts (`grammar.composed`)
    client: str = ""  # who asks: clients get equal shares, however many requests each has
    priority: int = 0  # lower ones go first
    deadline_s: float | None = None  # seconds from its arrival, behind which nobody wants the answer
    linger_s: float = 0.0  # events behind the first token may wait so long for others, and come together
    whole: bool = False  # nothing is wanted before the end: events may come all at once
    echo: bool = False  # the bytes of the prompt's tokens are wanted, too
    pooling: Pooling | None = None  # not an answer is wanted, but one vector that stands for the text
    forced: tuple[int, ...] = ()  # the answer's first tokens, whatever the model says: to measure by

    def __post_init__(self) -> None:
        given = [x for x in (self.messages, self.text, self.tokens) if x is not None]
        if len(given) != 1:
            raise ValueError("a request has exactly one of messages, text and tokens")

    @property
    def most_tokens(self) -> int | None:
        """Of the answer; None: as many as come."""
        return 0 if self.pooling else self.params.max_tokens

    @property
    def structure(self) -> Structure | None:
        """What the answer must look like, if anything."""
        return Structure("parts", self.parts) if self.parts is not None else self.params.structure


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds and rates of one request; rates are 0 where nothing was measured."""

    load_s: float = 0.0
    ttft_s: float = 0.0
    prompt_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    drafted: int = 0  # tokens that were guessed and tried
    accepted: int = 0  # of these, so many were right


def accepted(t: Timings) -> str:
    """What became of guesses, in words."""
    return f"accepted {100 * t.accepted / t.drafted:.0f} % of {t.drafted} guessed" if t.drafted else ""


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
    """A dataclass in words, without fields that are at their default."""
    shown = [
        f"{f.name}={found!r}"
        for f in fields(value)
        if f.repr and (found := getattr(value, f.name)) != _default(f)
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a request.

    `prompt` events come first, if asked for: the bytes of the prompt's tokens, all at once (`echo`), and
    their log-probabilities from the second on, piece by piece. `token` events carry `token` and the `text`
    that became certain with it (possibly empty: half a character, or what may begin a stop string). The
    `done` event carries the rest of the text, and the log-probability of the token with which the model
    ended, which is no part of the answer; or, of an embedding, the vector: little-endian float32, not yet
    normalised.
    """

    kind: Literal["prompt", "token", "done", "error"]
    text: str = ""
    token: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    usage: Usage = Usage()  # one for all: there is an event for each token
    timings: Timings = Timings()
    error: Exception | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    echo: tuple[bytes, ...] = ()
    embedding: bytes | None = None
    opened: str = ""  # with the first token: the mark of a thought that the prompt has begun

    def __repr__(self) -> str:
        return brief(self)

    @property
    def last(self) -> bool:
        """Whether nothing comes behind it."""
        return self.kind in ("done", "error")


@dataclass(frozen=True, slots=True)
class Doing:
    """What the engine is in the middle of."""

    since: float  # perf_counter of its process
    expected_s: float | None  # None: nobody knows
    what: str  # the segment
    segments: int = 0  # that have begun, ever: where one begins, something gets on


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a front may want to know about the model that runs."""

    name: str
    path: str
    architecture: str
    n_vocab: int
    context: int
    parameters: int
    file_bytes: int
    template_origin: str
    load_s: float
    temperature: float | None = None  # what the file itself recommends
    width: int = 0  # numbers of an embedding; 0: the model gives none
    tool_format: str = "hermes"  # how it writes calls of tools, by its template (`tool_parsers.formats`)
    pooling: Pooling = "mean"  # what its embeddings are made of
    thought_mark: str = ""  # with which it begins to think, if it does

    @property
    def id(self) -> str:
        """What users call it: the file's name; `name` is what its makers wrote into it."""
        name = PurePath(self.path).name
        return name.removesuffix(".gguf")  # a folder's name may have dots, as in Qwen2.5-0.5B


@dataclass(frozen=True, slots=True)
class Streaming:
    """What passes are like that read a part of the weights from disk; plain data that can cross a pipe."""

    passes: int
    bytes_read: int
    disk_bytes_s: float  # of late, as the next two; 0 before the first pass
    waiting: float  # the share of a pass's time that is spent waiting for the disk
    bytes_per_token: float
    locked_bytes: int  # of weights that stay in memory
    streamed_bytes: int  # of weights that every pass reads
    budget: int  # bytes that everything may take
    least: int  # the smallest budget that would do
    experts: int = 0  # of mixtures; 0: weights are read whole
    slots: int = 0  # so many of them have a place in memory
    found: float = 0.0  # the share of the chosen ones that was there, in the last passes
    guessed: float = 0.0  # of those that were read before a router had chosen them, the share that it chose


OnEvent = Callable[[Event], None]
