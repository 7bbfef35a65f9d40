"""What a request needs before the model can take it: its messages as text, its grammar compiled.

Templates and grammars are third-party and may take long, so this runs on threads of its own, and running
answers go on meanwhile. Nothing here calls ggml or torch: only the engine's thread may do that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from hetrun.client.events import GenerateRequest, Message
from hetrun.errors import OptionError
from hetrun.sampling.interface import Constraint
from hetrun.text.chat import continuation
from hetrun.text.chat.reasoning import opened_in, within_thought

if TYPE_CHECKING:
    from hetrun.sampling.grammar.token_mask import Grammars
    from hetrun.text.tokenizer import Tokenizer

GRAMMARS = 2  # threads that compile: one hostile grammar then does not hold up the others


class Renderer(Protocol):
    """Messages to text; `options` are further variables of the template, such as `tools`."""

    def __call__(self, messages: tuple[Message, ...], options: Mapping[str, object]) -> str: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a request became: the text of its messages, and what its answer must look like."""

    text: str | None = None
    constraint: Constraint | None = None
    opened: str = ""  # the mark of a thought that the text has begun


class Preparer:
    """Prepares requests beside the engine."""

    def __init__(
        self, render: Renderer | None, tokenizer: Tokenizer | None, grammars: Grammars | None = None
    ) -> None:
        """`grammars`: where some were compiled already."""
        self._render = render
        self._tokenizer = tokenizer
        if grammars:
            self._grammars = grammars
        # Apart, so that no message waits for grammars. One text is rendered at a time anyway.
        self._rendering = ThreadPoolExecutor(1, "hetrun-render")
        self._compiling = ThreadPoolExecutor(GRAMMARS, "hetrun-compile")

    def begin(
        self, request: GenerateRequest, then: Callable[[Prepared | Exception], None]
    ) -> Future[None] | None:
        """Prepare a request and call `then`, here if there is nothing to do, else on another thread.

        While it waits for one, the future can be cancelled. Called on the engine thread: what each token is,
        only native calls say.
        """
        structure = request.structure
        if request.messages is None and structure is None:
            then(Prepared())
            return None
        try:
            grammars = self._grammars if structure else None
        except Exception as error:
            then(error)
            return None
        pool = self._compiling if grammars else self._rendering
        return pool.submit(self._finish, request, grammars, then)

    def close(self) -> None:
        """Nothing more is asked for; what runs ends by its own limits."""
        for pool in (self._rendering, self._compiling):
            pool.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _grammars(self) -> Grammars:
        return grammars_of(self._tokenizer)

    def _finish(
        self,
        request: GenerateRequest,
        grammars: Grammars | None,
        then: Callable[[Prepared | Exception], None],
    ) -> None:
        try:
            then(prepared(request, self._render, grammars))
        except Exception as error:
            then(error)


def grammars_of(tokenizer: Tokenizer | None) -> Grammars:
    """What compiles grammars for a vocabulary. On the engine thread: what each token is, only native calls
    say."""
    from hetrun.sampling.grammar.token_mask import Grammars  # on use: most requests have no grammar

    if tokenizer is None:
        raise OptionError("structured output needs a tokenizer, and this model has none")
    return Grammars(tokenizer.pieces(), tokenizer.control, tokenizer.ends)


def prepared(
    request: GenerateRequest, render: Renderer | None, grammars: Grammars | None, rendered: bool = True
) -> Prepared:
    """What a request becomes; not `rendered`: its grammar only."""
    text = _text(request, render) if rendered else None
    opened, before = _end_of(request, text or "")
    structure = request.structure
    if structure and structure.kind == "parts" and opened:
        structure = replace(structure, text=within_thought(opened, structure.text))
    constraint = None
    if grammars and structure:
        constraint = grammars.constraint(structure, "" if structure.kind == "parts" else before)
    return Prepared(text, constraint, opened)


def _end_of(request: GenerateRequest, text: str) -> tuple[str, str]:
    """The mark of a thought that is open at a prompt's end, and the beginning of the answer that is already
    there."""
    if not request.messages:
        return "", ""
    wanted, last = request.template_options.get(continuation.OPTION), request.messages[-1]
    if not wanted:
        return opened_in(text), ""
    opened = continuation.thought_within(text, last, wanted)
    return opened, "" if opened else continuation.written(text, last, wanted)


def _text(request: GenerateRequest, render: Renderer | None) -> str | None:
    if request.messages is None:
        return None
    if render is None:
        raise OptionError("this model does not accept messages; give it a text or tokens")
    tools = {"tools": request.tools} if request.tools else {}
    return render(request.messages, {**request.template_options, **tools})
