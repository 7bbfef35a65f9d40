"""Which tokens may come next: what the engine uses of grammars."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hetrun.client.sampling_params import Structure
from hetrun.errors import OptionError
from hetrun.sampling.grammar.compiler import compile_spelled, make_tokenizer
from hetrun.sampling.grammar.error_messages import fault_of
from hetrun.sampling.grammar.sandbox import STACK, try_out
from hetrun.sampling.grammar.to_lark import spell
from hetrun.sampling.interface import Constraint
from hetrun.system.threads import with_stack
from hetrun.system.units import counted

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = npt.NDArray[np.bool_]

MOST_KEPT = 16  # compiled structures
MOST_KEPT_TEXT = 1 << 18  # characters of them: compiled, each takes up to some 100 bytes
DEAR = 500e-6  # seconds of a mask from which on the next one is worth another thread


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: LLMatcher
    first: bytes  # the mask at the beginning


class Grammars:
    """What grammars need of a model, and the last ones that were compiled. Any thread may call it.

    `pieces` are the bytes of every token; `control` those that stand for no text, though a grammar may name
    them; `ends` those with which a model says that it has finished: each of them may come where the grammar
    may end, as it could without one, and none of them is a part of the text.
    """

    def __init__(self, pieces: Sequence[bytes], control: Collection[int], ends: Collection[int]) -> None:
        self._pieces = pieces
        self._control = frozenset(control).union(ends)
        self.ends = frozenset(ends)
        self.end_ids = np.array(sorted(ends), np.intp)
        self._kept: OrderedDict[Structure, _Compiled] = OrderedDict()
        self._lock = Lock()

    @property
    def n_tokens(self) -> int:
        """Tokens in the vocabulary."""
        return len(self._pieces)

    def constraint(self, structure: Structure, begun: str = "") -> Constraint:
        """A constraint at its beginning, or after a text with which what it binds has begun; OptionError for
        a structure that cannot be, or that cannot begin so.

        This may take seconds, and once it takes as long as llguidance needs to sort the vocabulary.
        """
        with self._lock:
            if compiled := self._kept.get(structure):
                self._kept.move_to_end(structure)
        if compiled is None:
            compiled = self._compile(structure)
            with self._lock:
                self._keep(structure, compiled)
        matcher = compiled.matcher.deep_copy()
        if not begun:
            return TokenMasks(self, structure, matcher, compiled.first)
        tokens = self._ready().greedy_tokenize(begun)  # in any way: a grammar sees their bytes
        if matcher.validate_tokens(tokens) < len(tokens) or not matcher.consume_tokens(tokens):
            kind = structure.kind
            raise OptionError(f"{kind}: the message that is continued is not the beginning of such an answer")
        return TokenMasks(self, structure, matcher, None)

    def forget(self, structure: Structure) -> None:
        """Compile it again the next time: its copies share a lexer, and one has spoilt it."""
        with self._lock:
            self._kept.pop(structure, None)

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """Where dear masks are worked out. One: the others belong to the model's step."""
        return ThreadPoolExecutor(1, "hetrun-mask")

    def _compile(self, structure: Structure) -> _Compiled:
        spelled = spell(structure, (self._marks if structure.kind == "parts" else self._named).get)
        if spelled.risky:
            names = {t: self._pieces[t].decode("utf-8", "replace") for t in self._control}
            try_out(spelled, self.n_tokens, names)
        tokenizer = self._ready()
        return _Compiled(*with_stack(STACK, lambda: compile_spelled(tokenizer, spelled)))

    def _keep(self, structure: Structure, compiled: _Compiled) -> None:
        self._kept[structure] = compiled
        while len(self._kept) > MOST_KEPT or sum(len(s.text) for s in self._kept) > MOST_KEPT_TEXT:
            self._kept.popitem(last=False)

    def _ready(self) -> LLTokenizer:
        with self._lock:
            return self._tokenizer

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return make_tokenizer(self._pieces, self._control)

    @cached_property
    def _marks(self) -> dict[bytes, int]:
        """Control tokens by their texts: no text of a grammar can match one."""
        return {self._pieces[token]: token for token in self._control if self._pieces[token]}

    @cached_property
    def _named(self) -> dict[bytes, int]:
        """Tokens by their texts, for grammars that name them."""
        return {piece: token for token, piece in enumerate(self._pieces) if piece.startswith(b"<")}


class TokenMasks:
    """One sequence's place in a structure. It is used by one thread at a time."""

    def __init__(
        self, grammars: Grammars, structure: Structure, matcher: LLMatcher, mask: bytes | None
    ) -> None:
        self._grammars = grammars
        self._structure = structure
        self._matcher = matcher
        # A bit for each token, and the last for the one that llguidance has for the end; in whole words.
        self._bits = np.zeros((grammars.n_tokens + 32) // 32 * 4, np.uint8)
        self._address = self._bits.ctypes.data
        self._known = mask is not None  # whether `_bits` is the next token's mask
        if mask is not None:
            self._bits[:] = np.frombuffer(mask, np.uint8)
        self._working: Future[None] | None = None
        self._took = 0.0  # seconds of the last mask
        self._ended = 0  # end tokens that came last
        self._taken = 0  # other tokens
        self._stopped = self._has_stopped()  # read while the other thread has the matcher

    def begin(self) -> None:
        # Most masks take less than it costs to wake a thread, which then also takes a core from the step.
        if self._known or self._working or self.finished:
            return
        if self._took < DEAR:
            self._work_out()
        else:
            self._working = self._grammars.threads.submit(self._work_out)

    def allowed(self) -> Mask:
        n, ends = self._grammars.n_tokens, self._grammars.end_ids
        if self.finished:
            mask = np.zeros(n, np.bool_)
            mask[ends] = True
            return mask
        self.begin()
        self._settle()
        self._check()
        bits = np.unpackbits(self._bits, count=n + 1, bitorder="little").view(np.bool_)
        mask = bits[:n]
        if bits[n]:
            mask[ends] = True
        return mask

    @property
    def finished(self) -> bool:
        return self._ended > 0 or self._stopped

    def accept(self, token: int) -> None:
        self._settle()
        if token in self._grammars.ends:
            self._ended += 1
            return
        self._known = False
        self._taken += 1
        if not self._matcher.consume_token(token):
            self._check()
        self._stopped = self._has_stopped()

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self._ended + self._taken:
            raise ValueError(f"cannot take back {n} tokens, {self._ended + self._taken} were accepted")
        self._settle()
        ends = min(n, self._ended)
        self._ended -= ends
        if n == ends:
            return
        self._known = False
        self._taken -= n - ends
        if not self._matcher.rollback(n - ends):
            self._check()
        self._stopped = self._has_stopped()

    def clone(self) -> Constraint:
        self._settle()
        mask = self._bits.tobytes() if self._known else None
        copy = TokenMasks(self._grammars, self._structure, self._matcher.deep_copy(), mask)
        copy._took, copy._ended, copy._taken = self._took, self._ended, self._taken
        return copy

    def _work_out(self) -> None:
        began = perf_counter()
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bits.nbytes)
        self._stopped = self._has_stopped()
        self._took = perf_counter() - began
        self._known = True

    def _has_stopped(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _settle(self) -> None:
        """Wait for the other thread: a matcher takes one call at a time."""
        if self._working:
            self._working.result()
            self._working = None

    def _check(self) -> None:
        if self._matcher.is_error():
            self._grammars.forget(self._structure)
            reason = fault_of(self._matcher.get_error()).reason
            raise OptionError(
                f"{self._structure.kind}, after {counted(self._taken, 'token')} of the answer: {reason}"
            )
