"""What a request needs before the model can take it: its messages as text, its grammar compiled.

Templates and grammars come from strangers and may take long, so this runs on threads of its own and nobody's
answer stops meanwhile. Nothing here calls ggml or torch: that is the engine thread's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from hetrun.errors import OptionError
from hetrun.events import GenerateRequest, Message
from hetrun.params import Structure
from hetrun.sampling import Constraint

if TYPE_CHECKING:
    from hetrun.grammar.masks import Grammars
    from hetrun.tokenizer import Tokenizer

THREADS = 4  # one hostile grammar then holds up nobody else


class Renderer(Protocol):
    """Messages to text; `options` are further variables of the template."""

    def __call__(self, messages: tuple[Message, ...], options: Mapping[str, object]) -> str: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a request became: the text of its messages, and what its answer must look like."""

    text: str | None = None
    constraint: Constraint | None = None


class Preparer:
    """Prepares requests beside the engine."""

    def __init__(self, render: Renderer | None, tokenizer: Tokenizer | None) -> None:
        self._render = render
        self._tokenizer = tokenizer
        self._lock = Lock()

    def begin(self, request: GenerateRequest, then: Callable[[Prepared | Exception], None]) -> None:
        """Prepare a request and call `then`, here if there is nothing to do, else on another thread.

        Called on the engine thread: the bytes of all tokens are native calls.
        """
        if request.messages is None and request.params.structure is None:
            then(Prepared())
            return
        if request.params.structure and self._tokenizer:
            self._tokenizer.pieces()
        self._pool.submit(self._finish, request, then)

    def close(self) -> None:
        """Nothing more is asked for; what runs ends by its own limits."""
        if "_pool" in self.__dict__:
            self._pool.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, "hetrun-prepare")

    def _finish(self, request: GenerateRequest, then: Callable[[Prepared | Exception], None]) -> None:
        try:
            then(Prepared(self._text(request), self._constraint(request.params.structure)))
        except Exception as error:
            then(error)

    def _text(self, request: GenerateRequest) -> str | None:
        if request.messages is None:
            return None
        if self._render is None:
            raise OptionError("this model takes no messages; give it a text or tokens")
        return self._render(request.messages, request.template_options)

    def _constraint(self, structure: Structure | None) -> Constraint | None:
        if structure is None:
            return None
        if self._tokenizer is None:
            raise OptionError(f"{structure.kind} needs a tokenizer, and this model has none")
        return self._grammars.constraint(structure)

    @property
    def _grammars(self) -> Grammars:
        with self._lock:  # it is built once; the first requests may come together
            return self._built

    @cached_property
    def _built(self) -> Grammars:
        from hetrun.grammar.masks import Grammars  # on use: most requests have no grammar

        t = self._tokenizer
        assert t is not None
        return Grammars(t.pieces(), t.control, t.ends)
