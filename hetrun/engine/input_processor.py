"""What a request needs before the model can take it: its messages as text, its grammar compiled, its pictures
read.

Templates, grammars and pictures are third-party and may take long, so this runs on threads of its own, and
running answers go on meanwhile. Nothing here calls ggml or torch: only the engine's thread may do that, and
is asked to lay out each picture that was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hetrun.client.events import GenerateRequest, Message
from hetrun.engine.pictures.marks import LaidPicture, marked, new_mark
from hetrun.errors import OptionError
from hetrun.pictures.picture import Picture
from hetrun.sampling.interface import Constraint
from hetrun.text.chat import continuation
from hetrun.text.chat.reasoning import opened_in, within_thought

if TYPE_CHECKING:
    from hetrun.sampling.grammar.token_mask import Grammars
    from hetrun.text.tokenizer import Tokenizer

R = TypeVar("R")

GRAMMARS = 2  # threads that compile: one hostile grammar then does not hold up the others


class Renderer(Protocol):
    """Messages to text; `options` are further variables of the template, such as `tools`."""

    def __call__(self, messages: tuple[Message, ...], options: Mapping[str, object]) -> str: ...


class PictureReader(Protocol):
    """What makes of a picture's file what stands for it in a prompt."""

    def known(self, file: bytes) -> LaidPicture | None:
        """The same, if it was read before; from any thread."""
        ...

    def decode(self, file: bytes) -> Picture:
        """The pixels of a file; from any thread."""
        ...

    def reserve(self) -> None:
        """Have room for what encodes pictures; on the engine's thread."""
        ...

    def try_out(self) -> None:
        """Try what encodes pictures in a process of its own, where that was not done; from any thread."""
        ...

    def open(self) -> None:
        """Load what lays pictures out; on the engine's thread."""
        ...

    def lay_out(self, file: bytes, picture: Picture) -> LaidPicture:
        """What stands for it in a prompt; on the engine's thread."""
        ...


# Calls a function on the engine's thread and waits for it.
OnEngine = Callable[[Callable[[], R]], R]


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """A request's input, ready for the engine: the text of its messages, and the form of its answer."""

    text: str | None = None
    constraint: Constraint | None = None
    opened: str = ""  # the mark of a thought that the text has begun
    mark: str = ""  # stands for each picture in the text; empty: the usual one does
    seen: tuple[LaidPicture, ...] = ()  # the pictures, in their order


class Preparer:
    """Prepares requests beside the engine."""

    def __init__(
        self,
        render: Renderer | None,
        tokenizer: Tokenizer | None,
        grammars: Grammars | None = None,
        pictures: PictureReader | None = None,
        on_engine: OnEngine[Any] = lambda work: work(),
    ) -> None:
        """`grammars`: where some were compiled already."""
        self._render = render
        self._pictures, self._on_engine = pictures, on_engine
        self._tokenizer = tokenizer
        if grammars:
            self._grammars = grammars
        # Apart, so that no message waits for grammars. One text is rendered at a time anyway.
        self._rendering = ThreadPoolExecutor(1, "hetrun-render")
        self._compiling = ThreadPoolExecutor(GRAMMARS, "hetrun-compile")
        # One, so that there are the pixels of one picture at a time.
        self._reading = ThreadPoolExecutor(1, "hetrun-pictures")

    def begin(
        self, request: GenerateRequest, then: Callable[[PreparedInput | Exception], None]
    ) -> Future[None] | None:
        """Prepare a request and call `then`, here if there is nothing to do, else on another thread.

        While it waits for one, the future can be cancelled. Called on the engine thread: what each token is,
        only native calls say.
        """
        structure = request.structure
        if request.messages is None and structure is None and not request.pictures:
            then(PreparedInput())
            return None
        try:
            grammars = self._grammars if structure else None
        except Exception as error:
            then(error)
            return None
        if request.pictures:
            pool = self._reading
        else:
            pool = self._compiling if grammars else self._rendering
        return pool.submit(self._finish, request, grammars, then)

    def close(self) -> None:
        """Nothing more is asked for; what runs ends by its own limits."""
        for pool in (self._rendering, self._compiling, self._reading):
            pool.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _grammars(self) -> Grammars:
        return grammars_of(self._tokenizer)

    def _finish(
        self,
        request: GenerateRequest,
        grammars: Grammars | None,
        then: Callable[[PreparedInput | Exception], None],
    ) -> None:
        try:
            seen = tuple(self._seen(file) for file in request.pictures)
            mark = new_mark() if seen and request.messages is not None else ""
            then(replace(prepared(request, self._render, grammars, mark=mark), mark=mark, seen=seen))
        except Exception as error:
            then(error)

    def _seen(self, file: bytes) -> LaidPicture:
        return seen_of(file, self._pictures, self._on_engine)


def seen_of(file: bytes, pictures: PictureReader | None, on_engine: OnEngine[Any]) -> LaidPicture:
    """What stands for a picture."""
    if pictures is None:
        raise OptionError("this model reads no pictures")
    if seen := pictures.known(file):
        return seen
    on_engine(pictures.reserve)
    pictures.try_out()
    on_engine(pictures.open)  # so that what is wrong with that is told before anything is decoded
    picture = pictures.decode(file)
    laid_out: LaidPicture = on_engine(lambda: pictures.lay_out(file, picture))
    return laid_out


def grammars_of(tokenizer: Tokenizer | None) -> Grammars:
    """What compiles grammars for a vocabulary. On the engine thread: what each token is, only native calls
    say."""
    from hetrun.sampling.grammar.token_mask import Grammars  # on use: most requests have no grammar

    if tokenizer is None:
        raise OptionError("structured output needs a tokenizer, and this model has none")
    return Grammars(tokenizer.pieces(), tokenizer.control, tokenizer.ends)


def prepared(
    request: GenerateRequest,
    render: Renderer | None,
    grammars: Grammars | None,
    rendered: bool = True,
    mark: str = "",
) -> PreparedInput:
    """The input of a request; not `rendered`: its grammar only. `mark`: what stands for its pictures."""
    text = _text(request, render, mark) if rendered else None
    opened, before = _end_of(request, text or "")
    structure = request.structure
    if structure and structure.kind == "parts" and opened:
        structure = replace(structure, text=within_thought(opened, structure.text))
    constraint = None
    if grammars and structure:
        constraint = grammars.constraint(structure, "" if structure.kind == "parts" else before)
    return PreparedInput(text, constraint, opened)


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


def _text(request: GenerateRequest, render: Renderer | None, mark: str) -> str | None:
    if request.messages is None:
        return None
    if render is None:
        raise OptionError("this model does not accept messages; give it a text or tokens")
    tools = {"tools": request.tools} if request.tools else {}
    messages = marked(request.messages, mark) if mark else request.messages
    return render(messages, {**request.template_options, **tools})
