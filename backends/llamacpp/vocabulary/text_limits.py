"""Texts that llama.cpp would not survive, or not finish with.

Most ways of cutting a text into words are expressions for C++'s std::regex, which calls itself for each
character of a match: some 330 bytes of stack for each, and the process is gone where the stack ends. Such a
text gets a thread with a stack that is large enough. The other limits are of time: llama.cpp looks for each
special token in all of the text, and counts its way to each one that it finds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import numpy as np

from hetrun.backends.llamacpp.vocabulary.checks import CheckedVocabulary, special
from hetrun.errors import OptionError
from hetrun.system.threads import with_stack

T = TypeVar("T")

MAX_BYTES = 16 << 20  # of one text: more than the longest contexts there are
SHORT = 1 << 16  # bytes of a text that no special tokens can make slow
MAX_LOOKED_AT = 1 << 29  # places that may begin a special token, times those tokens: some three seconds
MAX_FOUND = 1 << 15  # special tokens in a text: some two seconds

SAFE_RUN = 4096  # characters that every stack has room for
MAX_RUN = 1 << 19  # characters in one match
STACK_PER_CHARACTER = 512
MAX_SQUARES = 1 << 27  # of the lengths of runs, where an expression tries each end of each: a second

# What cuts without std::regex, or with expressions that match single characters.
_BY_HAND = frozenset(
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert jina-v1-en "
    "jina-v2-code roberta-bpe exaone4 mpt olmo jais trillion granite-docling starcoder refact command-r "
    "smollm codeshell exaone minerva-7b mellum2 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral "
    "midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe glm4 glm5 qwen2 deepseek-r1-qwen kormo f2llmv2 "
    "megrez stablelm2 hunyuan solar-open grok-2 qwen35 kimi-k2 laguna gemma4 granite-embed-multi-311m "
    "sarvam-moe".split()
)
_CUTTING = ("gpt2", "hybriddna", "whitespace")  # kinds whose texts are cut by the name of a cutter
# Runs of these are gone through again from each of their characters.
_SPACES, _DIGITS = re.compile(r"\s{64,}"), re.compile("[0-9]{64,}")
_QUADRATIC = {"deepseek-llm": _SPACES, "jais-2": _SPACES, "superbpe": _DIGITS}

# Where every cutter ends a match: before a space behind something, behind line ends, before a wide comma.
_ENDS = re.compile(r"(?<=\S) |(?<=\n)(?=[^\n])|(?<=[一-龥ぁ-ヿ가-힣])[，。、]")  # noqa: RUF001
_ENDS_ACROSS_SPACES = re.compile(r"[0-9]|(?<=\n)(?=[^\n])|(?<=[A-Za-z])[.,!?;:]")


# These end a word before every space between two letters, and cut what follows as if nothing stood before it:
# no expression looks back, and none has letters and spaces in one match.
_APART = frozenset(
    "gpt-2 mpt olmo jais trillion starcoder refact command-r smollm codeshell exaone minerva-7b falcon "
    "llama3 llama-v3 llama-bpe falcon3 pixtral dbrx smaug-bpe chatglm-bpe glm4 qwen2 deepseek-r1-qwen "
    "stablelm2 hunyuan solar-open qwen35 tekken gpt-4o llama4 bailingmoe seed-coder grok-2 kimi-k2 "
    "deepseek-llm deepseek-coder deepseek-v3".split()
)
_BETWEEN_WORDS = re.compile(rb"[A-Za-z] [A-Za-z]")


def cuts_at_spaces(checked: CheckedVocabulary) -> bool:
    """Whether a token ends before each space between two ASCII letters, whatever follows."""
    if checked.kind != "gpt2" or checked.cutter not in _APART:
        return False
    texts = (checked.tokens.array.raw(i) for i in special(checked.types).tolist())
    return not any(map(_BETWEEN_WORDS.search, texts))


class TextLimits:
    """What a text may be, for one vocabulary."""

    def __init__(self, checked: CheckedVocabulary) -> None:
        self._checked = checked
        self._cutter = checked.cutter or "default"
        self._by_expression = checked.kind in _CUTTING and self._cutter not in _BY_HAND
        self._ends = _ENDS_ACROSS_SPACES if self._cutter == "exaone-moe" else _ENDS

    def guarded(self, text: str, raw: bytes, tokenize: Callable[[], T]) -> T:
        """`tokenize`, for a text that may be given to it; OptionError for others."""
        if len(raw) > MAX_BYTES:
            raise OptionError(f"the text has {len(raw)} bytes; hetrun reads up to {MAX_BYTES} at once")
        if len(raw) > SHORT:
            self._check_special(raw)
        run = self._longest_run(text) if self._by_expression and len(raw) > SAFE_RUN else 0
        if run <= SAFE_RUN:
            return tokenize()
        # Another thread may do this: nothing is computed with OpenMP.
        return with_stack(run * STACK_PER_CHARACTER, tokenize)

    @cached_property
    def _special(self) -> list[bytes]:
        array = self._checked.tokens.array
        return [raw for i in special(self._checked.types).tolist() if (raw := array.raw(i))]

    def _check_special(self, raw: bytes) -> None:
        begins = np.bincount([text[0] for text in self._special], minlength=256)
        there = np.bincount(np.frombuffer(raw, np.uint8), minlength=256)
        if int(begins @ there) > MAX_LOOKED_AT:
            letter = chr(int((begins * there).argmax()))
            raise OptionError(
                f"the text has {letter!r} {there[ord(letter)]} times, with which {begins[ord(letter)]} "
                "special tokens begin: searching for them would take too long"
            )
        if int(there[begins > 0].sum()) > MAX_FOUND:
            found = sum(map(raw.count, self._special))
            if found > MAX_FOUND:
                raise OptionError(
                    f"the text has {found} special tokens in it; hetrun reads up to {MAX_FOUND}"
                )

    def _longest_run(self, text: str) -> int:
        """The longest stretch that one match may span."""
        longest = max(map(len, self._ends.split(text))) + 2
        where = f"that its way of cutting words, {self._cutter!r},"
        if longest > MAX_RUN:
            raise OptionError(
                f"the text has {longest} characters in a row {where} takes as one; up to {MAX_RUN} can be"
            )
        if (slow := _QUADRATIC.get(self._cutter)) is not None:
            runs = list(map(len, slow.findall(text)))
            if sum(n * n for n in runs) > MAX_SQUARES:
                raise OptionError(
                    f"the text has {max(runs)} spaces or digits in a row {where} would take too long for"
                )
        return longest
