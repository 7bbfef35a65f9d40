"""What is wrong with a request, as far as that shows before any weights are read: a model may take minutes to
load and to measure, and a wrong regular expression is found in none.

It comes once the model's architecture and context are known, so what is wrong with the model is told first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetrun.client.events import GenerateRequest
from hetrun.engine.input_processor import PreparedInput, Renderer, grammars_of, prepared
from hetrun.engine.loaded_model import check_length, prompt_tokens
from hetrun.engine.pictures.marks import new_mark
from hetrun.errors import OptionError
from hetrun.executor.interface import ModelLimits
from hetrun.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hetrun.sampling.grammar.token_mask import Grammars

TEXTS = ("content", "text")  # of a message, of a part of one


class FirstLook:
    """Looks at the request that is going to come first. Called on the engine thread."""

    def __init__(
        self,
        request: GenerateRequest | None,
        tokenizer: Tokenizer | None,
        render: Renderer | None,
        no_pictures: str = "",
    ) -> None:
        """`no_pictures`: why the model reads none."""
        self._request, self._tokenizer, self._render = request, tokenizer, render
        self._no_pictures = no_pictures
        self.grammars: Grammars | None = None  # with what was compiled, so that it is not compiled twice

    def __call__(self, limits: ModelLimits) -> None:
        """Raise what is wrong."""
        request = self._request
        if request is None:
            return
        if request.pictures and self._no_pictures:
            raise OptionError(self._no_pictures)
        request.params.check_vocabulary(limits.n_vocab)
        if request.structure:
            self.grammars = grammars_of(self._tokenizer)
        # How many tokens pictures take is known when the encoder has seen them.
        long = not request.pictures and self._may_be_too_long(request, limits.context)
        if self.grammars or long:
            found = self._prepared(request, long)
            if long:
                tokens = prompt_tokens(limits, self._tokenizer, request, found.text)
                check_length(limits, request, len(tokens))

    def _prepared(self, request: GenerateRequest, long: bool) -> PreparedInput:
        """Messages are rendered only if they may be too long: the renderer starts while weights are read."""
        mark = new_mark() if request.pictures else ""
        rendered = long or request.parts is not None
        return prepared(request, self._render, self.grammars, rendered, mark)

    @staticmethod
    def _may_be_too_long(request: GenerateRequest, context: int) -> bool:
        """Whether the text has more bytes than the context has tokens: no tokenizer makes more of them."""
        texts = [request.text or "", *(text for m in request.messages or () for text in _texts(m))]
        return sum(len(text.encode(errors="replace")) for text in texts) > context


def _texts(value: object) -> list[str]:
    """The texts of a message, whose content may be in parts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _texts(part)]
    if isinstance(value, Mapping):
        return [text for name in TEXTS for text in _texts(value.get(name))]
    return []
