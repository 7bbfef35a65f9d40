"""What the engine runs: a model with its texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hetrun.client.events import ContextShift, GenerateRequest
from hetrun.engine.input_processor import PreparedInput, Renderer
from hetrun.engine.pictures.marks import PicturePrompt, parts_of, with_pictures
from hetrun.engine.pictures.store import PictureStore
from hetrun.engine.prefix_store import EngineSlots, PrefixStore
from hetrun.engine.speculation.interface import Speculation
from hetrun.engine.step_time import StepTimes
from hetrun.errors import ContextFull, OptionError, TemplateError
from hetrun.executor.interface import Model, ModelLimits
from hetrun.memory.kv.prefix_cache import Prefixes
from hetrun.system.units import counted
from hetrun.text.reranking import Reranker
from hetrun.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hetrun.sampling.grammar.token_mask import Grammars

NO_RERANKER = (
    "this model is not a reranker: use one that judges documents with yes or no, such as Qwen3-Reranker (a "
    "folder, or a GGUF file of it); encoders such as bge-reranker do not run here"
)
NOT_SAVED = "this model runs through libllama, and its keys and values cannot be read"
MOST_LETTERS = 128  # of a token: tokenising a text that is longer than a context of such would only take time


@dataclass(slots=True)
class LoadedModel:
    """What the engine runs."""

    model: Model
    tokenizer: Tokenizer | None
    render: Renderer | None
    temperature: float | None  # the model's own default
    load_s: float = 0.0
    most_waiting: int | None = None  # requests beyond those that run; None: as many as come
    prefixes: Prefixes | None = None  # None: nothing is kept, and every prompt is computed
    prompts: PrefixStore | None = None  # None: they cannot be saved
    ending: Callable[[], None] = lambda: None  # what is to be done before the model goes
    speculation: Speculation | None = None  # None: a step gives each sequence one token
    grammars: Grammars | None = None  # with what was compiled before the model was loaded
    shift: bool = False  # a text that fills the context goes on, unless its request says otherwise
    reranker: Reranker | None = None  # None: the model does not judge documents
    pictures: PictureStore | None = None  # None: the model reads none, and `no_pictures` says why
    no_pictures: str = "this model reads no pictures"
    slots: EngineSlots = field(
        default_factory=EngineSlots
    )  # numbers of places, and what was last computed in each
    # Looks for what is wrong with the weights, when their results are no numbers.
    diagnose: Callable[[], Exception | None] = lambda: None
    times: StepTimes = field(init=False)  # what its steps take

    def __post_init__(self) -> None:
        self.times = StepTimes(self.model)

    @property
    def limits(self) -> ModelLimits:
        """What the model takes."""
        return ModelLimits(self.model.context, self.model.n_vocab)


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    """The tokenizer, which must be there."""
    return present(loaded.tokenizer)


def present(tokenizer: Tokenizer | None) -> Tokenizer:
    """The same where the model is not loaded yet."""
    if tokenizer is None:
        raise OptionError(
            "there is no tokenizer for this model (a folder needs tokenizer.json), so it takes only token ids"
        )
    return tokenizer


def prompts_of(loaded: LoadedModel) -> PrefixStore:
    """What is kept of prompts, for files."""
    if loaded.prompts is None:
        raise OptionError(f"prompts cannot be saved: {NOT_SAVED}")
    return loaded.prompts


def reranker_of(loaded: LoadedModel) -> Reranker:
    """What judges documents, which must be there."""
    if loaded.reranker is None:
        raise OptionError(NO_RERANKER)
    return loaded.reranker


def prompt_tokens(
    limits: ModelLimits, tokenizer: Tokenizer | None, request: GenerateRequest, messages: str | None
) -> list[int]:
    """The tokens of a request's prompt; `messages` is the text of its messages."""
    if request.tokens is not None:
        tokens = list(request.tokens)
        for i, token in enumerate(tokens):
            if not 0 <= token < limits.n_vocab:
                last = limits.n_vocab - 1
                raise OptionError(f"token {i} of the prompt is {token}; the vocabulary goes from 0 to {last}")
    else:
        text = messages or request.text or ""
        _check_letters(limits, text)
        tokens = present(tokenizer).encode(text)
    if not tokens and messages is not None:
        raise TemplateError("the chat template produces no text for these messages; use --chat-template FILE")
    if not tokens:
        raise OptionError("the prompt is empty; give at least one token")
    return tokens


def _check_letters(limits: ModelLimits, text: str) -> None:
    if len(text) > MOST_LETTERS * limits.context:
        room = counted(limits.context, "token")
        raise ContextFull(f"the prompt has {len(text)} characters, far more than {room} can hold; shorten it")


def prompt_of(loaded: LoadedModel, request: GenerateRequest, prepared: PreparedInput) -> PicturePrompt:
    """The tokens of a request's prompt, with its pictures."""
    if not prepared.seen:
        return PicturePrompt(prompt_tokens(loaded.limits, loaded.tokenizer, request, prepared.text))
    if request.pooling or request.params.prompt_logprobs is not None:
        what = "embeddings" if request.pooling else "log-probabilities of a prompt"
        raise OptionError(f"{what} are not available for texts with pictures")
    text = (request.text or "") if prepared.text is None else prepared.text
    _check_letters(loaded.limits, text)
    first, *others = parts_of(text, prepared.mark, len(prepared.seen))
    tokenizer = present(loaded.tokenizer)
    # As llama.cpp does it: what is between two pictures is a text of its own.
    texts = [tokenizer.encode(first), *(tokenizer.encode_as(other, False, True) for other in others)]
    return with_pictures(texts, prepared.seen)


def shift_of(loaded: LoadedModel, request: GenerateRequest) -> ContextShift | None:
    """How a request's text goes on where the context is full; None: it ends there."""
    shift = request.shift or ContextShift()
    if request.pooling or not (loaded.shift if shift.on is None else shift.on):
        return None
    if request.pictures:  # what is left of one without the text before it would be another
        if shift.on:
            raise OptionError("a text with pictures cannot go on beyond its context (context shift)")
        return None
    begins = loaded.tokenizer is not None and loaded.tokenizer.add_bos
    return replace(shift, keep=shift.keep + begins) if shift.keep >= 0 else shift


def check_length(limits: ModelLimits, request: GenerateRequest, n_tokens: int) -> None:
    """Refuse a prompt that leaves no room for its answer."""
    if limits.context - n_tokens < (request.most_tokens != 0):
        what, beside = ("text", "") if request.pooling else ("prompt", " with the answer")
        raise ContextFull(
            f"the {what} has {counted(n_tokens, 'token')}, but the context holds {limits.context}{beside}; "
            "shorten it, or ask for more with --ctx"
        )
