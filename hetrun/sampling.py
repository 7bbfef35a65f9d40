"""From a row of logits to a token.

`SamplingParams` says how, `make_sampler` turns it into a `Sampler`, one for each sequence. The rules are a
list of small functions folded over the candidates in llama.cpp's default order: top-k, top-p, min-p,
temperature, draw.

This runs on the engine thread between two decode steps, so the vocabulary is looked at in two or three
vectorised passes; the rules then see only the few candidates that can still win. The pruning is exact
(see `_top`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hetrun.errors import BackendError
from hetrun.params import SamplingParams as SamplingParams
from hetrun.params import temperature_of

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Ints: TypeAlias = npt.NDArray[np.intp]

DEFAULT_TEMPERATURE = 0.8  # llama.cpp's


@dataclass(frozen=True, slots=True)
class Choice:
    """The token chosen; log-probabilities are the model's own, before any rule, and only when asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler(Protocol):
    """Chooses the tokens of one sequence.

    `sample` changes nothing; `accept` says that a token was taken, `rollback` takes the last n of them back.
    """

    @property
    def seed(self) -> int: ...

    def sample(self, logits: Floats) -> Choice: ...

    def accept(self, token: int) -> None: ...

    def rollback(self, n: int) -> None: ...

    def clone(self) -> Sampler: ...

    @property
    def finished(self) -> bool:
        """Whether nothing can follow: the grammar is at its end."""
        ...


class Constraint(Protocol):
    """Which tokens may come next, by a grammar. One for each sequence."""

    def begin(self) -> None:
        """Begin to work out the next token's mask beside what else is done, such as the model's step."""
        ...

    def allowed(self) -> npt.NDArray[np.bool_]:
        """The mask of the next token, one for each token of the vocabulary; waits until it is there."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing can follow."""
        ...

    def accept(self, token: int) -> None: ...

    def rollback(self, n: int) -> None: ...

    def clone(self) -> Constraint: ...


def random_seed() -> int:
    """A seed nobody chose; `secrets` would do, but it loads OpenSSL."""
    return int.from_bytes(os.urandom(4), "little")


def make_sampler(
    params: SamplingParams,
    default_temperature: float = DEFAULT_TEMPERATURE,
    *,
    prompt: Sequence[int] = (),
    context: int = 0,
    pieces: Callable[[], Sequence[bytes]] | None = None,
    ends: Collection[int] = (),
    constraint: Constraint | None = None,
) -> Sampler:
    """A sampler at its first token; `default_temperature` is what counts when `params` names none."""
    temperature = default_temperature if params.temperature is None else params.temperature
    seed = random_seed() if params.seed is None else params.seed
    sampler = _ChainSampler(params, temperature_of("default_temperature", temperature), seed)
    return sampler if constraint is None else _Constrained(sampler, constraint)


class _Constrained:
    def __init__(self, inner: Sampler, constraint: Constraint) -> None:
        self._inner, self._constraint = inner, constraint
        constraint.begin()

    @property
    def seed(self) -> int:
        return self._inner.seed

    @property
    def finished(self) -> bool:
        return self._constraint.finished

    def sample(self, logits: Floats) -> Choice:
        return self._inner.sample(np.where(self._constraint.allowed(), logits, -np.inf))

    def accept(self, token: int) -> None:
        self._inner.accept(token)
        self._constraint.accept(token)
        self._constraint.begin()

    def rollback(self, n: int) -> None:
        self._inner.rollback(n)
        self._constraint.rollback(n)

    def clone(self) -> Sampler:
        return _Constrained(self._inner.clone(), self._constraint.clone())


def of_prompt(
    rows: Floats, tokens: Sequence[int], n: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """The log-probabilities of the tokens that really followed, and the n best of each row."""
    choices = [_with_logprobs(row, token, n) for row, token in zip(rows, tokens, strict=True)]
    return [(c.logprob or 0.0, c.top) for c in choices]


class _ChainSampler:
    def __init__(self, params: SamplingParams, temperature: float, seed: int, position: int = 0) -> None:
        self._params = params
        self._temperature = temperature
        self._chain = rules(params, temperature)
        self._seed = seed
        self._position = position  # how many tokens were accepted
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.intp)
        self._bias = np.fromiter(params.logit_bias.values(), np.float32)

    @property
    def seed(self) -> int:
        return self._seed

    def sample(self, logits: Floats) -> Choice:
        biased = self._with_bias(logits) if self._bias_ids.size else logits
        if self._temperature == 0:
            token = int(biased.argmax())  # the lowest id of equals, and the first NaN if there is one
            _check_peak(biased[token])
        else:
            token = self._draw(biased, uniform(self._seed, self._position))
        if self._params.logprobs is None:
            return Choice(token)
        return _with_logprobs(logits, token, self._params.logprobs)

    def _draw(self, logits: Floats, u: float) -> int:
        if len(self._chain) == 1:  # temperature alone: a list of candidates would be the whole vocabulary
            return draw_from_all(logits, self._temperature, u)
        return draw(reduce(lambda kept, rule: rule(kept), self._chain, shortlist(logits, self._params)), u)

    def accept(self, token: int) -> None:
        self._position += 1

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self._position:
            raise ValueError(f"cannot take back {n} tokens, {self._position} were accepted")
        self._position -= n

    @property
    def finished(self) -> bool:
        return False

    def clone(self) -> Sampler:
        return _ChainSampler(self._params, self._temperature, self._seed, self._position)

    def _with_bias(self, logits: Floats) -> Floats:
        self._params.check_vocabulary(len(logits))
        biased = logits.copy()
        biased[self._bias_ids] += self._bias
        return biased


# --- the rules: each takes candidates and gives fewer, or other logits; at least one is always left


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may still be chosen.

    In descending order of logits, equals by ascending id, where top-k or top-p is asked for, else by id.
    `beyond` is the mass, in units of the best token's, of tokens that the rules so far have kept but that are
    not listed, because a later rule removes each of them.
    """

    ids: Ints
    logits: npt.NDArray[np.float64]
    beyond: float = 0.0


Rule: TypeAlias = Callable[[Candidates], Candidates]


def rules(params: SamplingParams, temperature: float) -> list[Rule]:
    """The chain in llama.cpp's default order; a rule that is switched off is not in it."""
    chain: list[Rule] = []
    if params.top_k > 0:
        chain.append(partial(top_k, k=params.top_k))
    if params.top_p < 1:
        chain.append(partial(top_p, p=params.top_p))
    if params.min_p > 0:
        chain.append(partial(min_p, p=params.min_p))
    chain.append(partial(temper, temperature=temperature))
    return chain


def top_k(c: Candidates, k: int) -> Candidates:
    """The k best."""
    return Candidates(c.ids[:k], c.logits[:k], c.beyond if len(c.ids) < k else 0.0)


def top_p(c: Candidates, p: float) -> Candidates:
    """The fewest best whose probabilities add up to p."""
    mass = np.exp(c.logits - c.logits[0]).cumsum()
    kept = int(mass.searchsorted(p * (mass[-1] + c.beyond))) + 1
    return Candidates(c.ids[:kept], c.logits[:kept], c.beyond if kept > len(mass) else 0.0)


def min_p(c: Candidates, p: float) -> Candidates:
    """Those at least p times as probable as the best."""
    kept = c.logits >= c.logits.max() + math.log(p)
    return Candidates(c.ids[kept], c.logits[kept])


def temper(c: Candidates, temperature: float) -> Candidates:
    """A low temperature sharpens, a high one flattens."""
    return Candidates(c.ids, c.logits / temperature)


def draw(c: Candidates, u: float) -> int:
    """The candidate on which u, in [0, 1), falls when they lie side by side, as wide as they are probable."""
    if len(c.ids) == 1:
        return int(c.ids[0])
    ends = np.exp(c.logits - c.logits.max()).cumsum()
    return int(c.ids[_falls_on(ends, u * ends[-1])])


def draw_from_all(logits: Floats, temperature: float, u: float) -> int:
    """What `temper` and `draw` do, for the whole vocabulary: first find the block, then the token in it."""
    peak = logits.max()
    _check_peak(peak)
    ends = _masses(logits, float(peak), temperature).cumsum()
    point = u * ends[-1]
    block = _falls_on(ends, point)
    before = ends[block - 1] if block else 0.0
    start = block * BLOCK
    inner = _weights(logits[start : start + BLOCK], float(peak), temperature).cumsum()
    return start + _falls_on(inner, point - before)


def _falls_on(ends: npt.NDArray[np.float64], point: float) -> int:
    found = int(ends.searchsorted(point, side="right"))
    # Rounding may put the point on the very end: then it is the last one that has a width.
    return found if found < len(ends) else int(ends.searchsorted(ends[-1]))


UNIFORMS = 64


def uniform(seed: int, position: int) -> float:
    """The random number for the token at `position`, in [0, 1).

    It depends on nothing else, so a sampler has no generator state to save: taking tokens back or forking a
    sequence is a change of one integer, and a text is the same whether or not its tokens were speculated.
    """
    return _uniforms(seed, position // UNIFORMS)[position % UNIFORMS]


@lru_cache(maxsize=256)  # building a generator takes 10 microseconds, more than a whole draw
def _uniforms(seed: int, block: int) -> list[float]:
    # Philox is counter-based: key and counter name a block (it counts in the lowest word). Its raw bits are
    # taken because numpy promises that they stay the same, which it does not for a Generator's floats.
    bits = np.random.Philox(key=seed, counter=block << 64).random_raw(UNIFORMS)
    return [float(number) for number in (bits >> np.uint64(11)) * 2.0**-53]


# --- pruning


def shortlist(logits: Floats, params: SamplingParams) -> Candidates:
    """The candidates that the rules can leave over, found without sorting the vocabulary."""
    if 0 < params.top_k < len(logits):
        ids = _top(logits, params.top_k)
        return Candidates(ids, logits[ids].astype(np.float64))
    peak = logits.max()
    _check_peak(peak)
    if params.top_p < 1:
        return _shortlist_top_p(logits, float(peak), params)
    return _at_least(logits, _least_for_min_p(float(peak), params.min_p))


def _shortlist_top_p(logits: Floats, peak: float, params: SamplingParams) -> Candidates:
    total = _mass(logits, peak)
    if params.min_p > 0:  # what min-p will remove need not be listed, only weighed
        return _weighed(_sorted(_at_least(logits, _least_for_min_p(peak, params.min_p))), total)
    n = 256
    while n < len(logits) // 4:
        ids = _top(logits, n)
        listed = _weighed(Candidates(ids, logits[ids].astype(np.float64)), total)
        if listed.beyond < (1 - params.top_p) * total:
            return listed
        n *= 4
    return _sorted(_at_least(logits, -math.inf))


BLOCK = 8192  # in float64 it stays in the second-level cache: ten times faster at 128k tokens than one piece


def _weights(logits: Floats, peak: float, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    """Probabilities in units of the best token's."""
    return np.exp(np.subtract(logits, peak, dtype=np.float64) / temperature)


def _masses(logits: Floats, peak: float, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    starts = range(0, len(logits), BLOCK)
    return np.array([_weights(logits[i : i + BLOCK], peak, temperature).sum() for i in starts])


def _mass(logits: Floats, peak: float) -> float:
    return float(_masses(logits, peak).sum())


def _weighed(c: Candidates, total: float) -> Candidates:
    return Candidates(c.ids, c.logits, max(total - _mass(c.logits, float(c.logits[0])), 0.0))


def _least_for_min_p(peak: float, p: float) -> float:
    # One step below, because the comparison is in float32: the rule itself then decides in float64.
    return float(np.nextafter(np.float32(peak + math.log(p)), np.float32(-np.inf))) if p > 0 else -math.inf


def _at_least(logits: Floats, least: float) -> Candidates:
    ids = np.flatnonzero(logits >= least if least > -math.inf else logits > least)
    return Candidates(ids, logits[ids].astype(np.float64))


def _sorted(c: Candidates) -> Candidates:
    order = np.argsort(-c.logits, kind="stable")
    return Candidates(c.ids[order], c.logits[order], c.beyond)


COLUMNS = 1024


def _top(logits: Floats, k: int) -> Ints:
    """The ids of the k best in descending order, equals by ascending id, without those at -inf.

    Cut the row into columns of several tokens and take each column's maximum: the k-th best maximum is no
    greater than the k-th best logit, because k columns each hold one logit of at least that. So every one of
    the k best is at or above it, and usually little else.
    """
    columns = max(COLUMNS, 4 * k)
    rows = len(logits) // columns
    maxima = logits
    if rows > 1:
        cut = rows * columns
        maxima = np.concatenate((logits[:cut].reshape(rows, columns).max(axis=0), logits[cut:]))
    _check_peak(maxima.max())
    threshold = np.partition(maxima, -k)[-k] if k < len(maxima) else -np.inf
    ids = np.flatnonzero(logits >= threshold if threshold > -np.inf else logits > threshold)
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order[:k]]


def _check_peak(peak: np.floating[Any] | float) -> None:
    """The greatest logit must be a number; NaN anywhere in the row makes it NaN."""
    if math.isfinite(peak):
        return
    what = "NaN"
    if math.isinf(peak):
        what = "an infinite value" if peak > 0 else "only -inf, which leaves no token to choose"
    raise BackendError(f"the logits hold {what}: the step that computed them went wrong")


# --- log-probabilities


def _with_logprobs(logits: Floats, token: int, n: int) -> Choice:
    peak = float(logits.max())
    norm = peak + math.log(_mass(logits, peak))
    best = _top(logits, n) if n else ()
    return Choice(token, float(logits[token]) - norm, tuple((int(i), float(logits[i]) - norm) for i in best))
