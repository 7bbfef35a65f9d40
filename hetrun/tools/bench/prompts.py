"""Conversations of a wanted length: random words in the model's own template, counted by its tokenizer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType

from hetrun.api.model_path import model_path
from hetrun.config import Settings
from hetrun.engine.factory import open_tokenizer, renderer, template_of
from hetrun.errors import OptionError, UserError
from hetrun.loader.open_model import open_model
from hetrun.text.chat.renderer import TemplateWorker

WORD = re.compile(rb" [a-z]{2,9}")
FEW = 64  # with fewer words than this a vocabulary has none to speak of, and texts are made of letters
LETTERS = tuple(" " + chr(c) for c in range(ord("a"), ord("z") + 1))
TRIES = 12
# What llama.cpp's users have unless they say otherwise; said to both sides, so that both do the same.
SAMPLING: Mapping[str, object] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}

Count = Callable[[str], int]


class BenchPrompts:
    """Texts for the model of these settings. It makes native calls: only where no engine runs."""

    def __init__(self, settings: Settings) -> None:
        source = open_model(model_path(settings))
        with ExitStack() as stack:
            tokenizer = open_tokenizer(source)
            if tokenizer is None:
                raise UserError(f"{source.path} has no tokenizer, so it cannot be served")
            stack.callback(tokenizer.close)
            templates = TemplateWorker(template_of(source, settings))
            stack.callback(templates.close)
            render = renderer(templates, tokenizer)
            self._count: Count = lambda text: len(
                tokenizer.encode(render(({"role": "user", "content": text},), {}))
            )
            words = [p.decode() for p in tokenizer.pieces() if WORD.fullmatch(p)]
            self._words = tuple(words) if len(words) >= FEW else LETTERS
            self._stack = stack.pop_all()

    def text(self, tokens: int, seed: object) -> str:
        """A message that makes a prompt of this many tokens, the template's own included.

        The same seed gives the same text. Where words merge with each other it may miss by a few tokens.
        """
        return of_length(self._count, self._words, tokens, random.Random(repr(seed)))

    def more(self, words: int, seed: object) -> str:
        """Some words to go on with."""
        return "".join(random.Random(repr(seed)).choices(self._words, k=words))

    def __enter__(self) -> BenchPrompts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def of_length(count: Count, words: tuple[str, ...], tokens: int, rng: random.Random) -> str:
    """Random words that make `tokens` tokens, or as close to that as some tries come."""
    least = count("a")
    if least > tokens:
        raise OptionError(f"a prompt of {tokens} tokens is too short: the chat template alone takes {least}")
    text = rng.choices(words, k=tokens)
    size, best, miss = max(tokens - least, 1), "a", tokens
    for _ in range(TRIES):
        text += rng.choices(words, k=max(0, size - len(text)))
        said = "".join(text[:size]).lstrip()
        found = count(said)
        if abs(tokens - found) < miss:
            best, miss = said, abs(tokens - found)
        if found == tokens:
            break
        step = int((tokens - found) / max((found - least) / size, 1))  # a word may have several tokens
        size = max(1, size + (step or (1 if found < tokens else -1)))
    return best


def body(text: str, max_tokens: int, seed: int) -> bytes:
    """A streamed chat request whose answer has exactly `max_tokens` tokens."""
    request = {
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": seed,
        **SAMPLING,
    }
    return json.dumps(request).encode()
