"""The sampler: folds the chain of rules over the candidates, and draws from those that are left.

This runs on the engine thread between two decode steps, so the vocabulary is looked at in a few vectorised
passes; the rules then see only the few candidates that can still win.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hetrun.client.sampling_params import DEFAULT_TEMPERATURE, SamplingParams, temperature_of
from hetrun.errors import BackendError, OptionError
from hetrun.graph.top_logits import TopCandidates
from hetrun.sampling.candidates import Candidates, Past, Rule
from hetrun.sampling.chain import Pieces, Setting, build, is_greedy, one_temperature
from hetrun.sampling.dry import Encode
from hetrun.sampling.fast_path import FastPath, usual
from hetrun.sampling.interface import Constraint, SampledToken, Sampler
from hetrun.sampling.logprobs import of_sampled, of_token
from hetrun.sampling.mirostat import Mirostat, make_mirostat
from hetrun.sampling.native import greatest
from hetrun.sampling.rng import Floats
from hetrun.sampling.top_k import check_peak, leaders


def random_seed() -> int:
    """A random seed; `secrets` would do, but it loads OpenSSL."""
    return int.from_bytes(os.urandom(4), "little")


def make_sampler(
    params: SamplingParams,
    default_temperature: float = DEFAULT_TEMPERATURE,
    *,
    prompt: Sequence[int] = (),
    context: int = 0,
    pieces: Pieces | None = None,
    encode: Encode | None = None,
    constraint: Constraint | None = None,
    sampled_logprobs: bool = False,
) -> Sampler:
    """A sampler at its first token; `default_temperature` is what counts when `params` names none.

    Penalties and DRY look back into `prompt`. `pieces`, the bytes of every token, and `encode`, the tokens of
    a plain text, are for DRY's sequence breakers only. `sampled_logprobs`: a choice
    comes with the log-probabilities with which it was drawn, not with the model's own.
    """
    chosen = default_temperature if params.temperature is None else params.temperature
    temperature = temperature_of("default_temperature", chosen)
    setting = Setting(params, temperature, context, pieces, encode)
    back = max(setting.back(params.repeat_last_n), setting.back(params.dry_penalty_last_n))
    past = Past(
        random_seed() if params.seed is None else params.seed,
        array("i", prompt[max(len(prompt) - back, 0) :]),
    )
    mirostat = make_mirostat(params)
    chain = tuple(one_temperature(temperature)) if mirostat else build(setting)
    return ChainSampler(params, chain, params.logit_bias, past, constraint, mirostat, sampled_logprobs)


class ChainSampler:
    def __init__(
        self,
        params: SamplingParams,
        chain: tuple[Rule, ...],
        bias: Mapping[int, float],
        past: Past,
        constraint: Constraint | None,
        mirostat: Mirostat | None,
        sampled_logprobs: bool = False,
    ) -> None:
        self._params = params
        self._sampled_logprobs = sampled_logprobs
        self._chain = chain
        self._usual = None if mirostat else usual(chain)
        self._greedy = len(chain) == 1 and is_greedy(chain[0])
        self.greedy = self._greedy and not (bias or constraint or mirostat) and params.logprobs is None
        looks_at = 1 if self.greedy else self._usual.k if self._usual else 0
        self.enough = 0 if bias or constraint or params.logprobs is not None else looks_at
        self._bias = bias
        self._bias_ids = np.fromiter(bias.keys(), np.intp)
        self._biases = np.fromiter(bias.values(), np.float32)
        self._past = past
        self._constraint = constraint
        self._mirostat = mirostat
        if constraint:
            constraint.begin()

    @property
    def seed(self) -> int:
        return self._past.seed

    @property
    def finished(self) -> bool:
        return self._constraint is not None and self._constraint.finished

    @property
    def mu(self) -> float | None:
        """Mirostat's state, where it is on."""
        return self._mirostat.mu if self._mirostat else None

    def sample(self, logits: Floats | TopCandidates) -> SampledToken:
        if isinstance(logits, TopCandidates):
            return SampledToken(self._among(logits))
        row = self.permitted(logits) if self._bias or self._constraint else logits
        try:
            token = self._choose(row)
        except BackendError:
            self._explain(logits)
            raise
        if self._params.logprobs is None:
            return SampledToken(token)
        if self._sampled_logprobs:
            left = self.left(Candidates(None, row))
            return SampledToken(token, *of_sampled(left, token, self._params.logprobs))
        return SampledToken(token, *of_token(logits, token, self._params.logprobs))

    def _among(self, best: TopCandidates) -> int:
        """The same of the greatest, where these are `enough`."""
        check_peak(best.logits[0])
        if self._usual is None:
            return int(best.ids[0])
        possible = best.logits[: self._usual.k]
        logits = possible[possible > -np.inf].tolist()
        return int(best.ids[self._usual.draw(logits, self._past.chance(0))])

    def _choose(self, row: Floats) -> int:
        if self._usual and self._usual.k < len(row):
            return self._draw(row, self._usual, self._past.chance(0))
        peak = row.argmax()  # the first NaN, if there is one, and the lowest id of equals
        check_peak(row[peak])
        if self._greedy:
            return int(peak)
        return self.left(Candidates(None, row)).draw(self._past.chance(0))

    @staticmethod
    def _draw(row: Floats, usual: FastPath, u: float) -> int:
        if (lib := greatest()) and (token := lib.draw(row, usual, u)) is not None:
            return token
        ids, logits = leaders(row, usual.k)
        return ids[usual.draw(logits, u)]

    def left(self, c: Candidates) -> Candidates:
        """What the chain leaves to draw from."""
        for rule in self._chain:
            c = rule(c, self._past)
        return self._mirostat(c) if self._mirostat else c

    def accept(self, token: int) -> None:
        self._past.accept(token)
        if self._mirostat:
            self._mirostat.accept(token)
        if self._constraint:
            self._constraint.accept(token)
            self._constraint.begin()

    def rollback(self, n: int) -> None:
        self._past.rollback(n)
        if self._mirostat:
            self._mirostat.rollback(n)
        if self._constraint:
            self._constraint.rollback(n)

    def clone(self) -> Sampler:
        constraint = self._constraint.clone() if self._constraint else None
        mirostat = self._mirostat.clone() if self._mirostat else None
        return ChainSampler(
            params=self._params,
            chain=self._chain,
            bias=self._bias,
            past=self._past.clone(),
            constraint=constraint,
            mirostat=mirostat,
            sampled_logprobs=self._sampled_logprobs,
        )

    def permitted(self, logits: Floats) -> npt.NDArray[np.float32]:
        """With the biases added, and -inf wherever the constraint says no."""
        self._params.check_vocabulary(len(logits))
        row = logits.astype(np.float32)
        known = self._bias_ids < len(row)  # a vocabulary may have more tokens than its model
        row[self._bias_ids[known]] += self._biases[known]
        if self._constraint:
            allowed = self._constraint.allowed()
            row[: len(allowed)][~allowed[: len(row)]] = -np.inf
            row[len(allowed) :] = -np.inf
        return row

    def _explain(self, logits: Floats) -> None:
        """Whose fault it is that nothing can be chosen: the step's, or that of what was asked for."""
        if np.isfinite(logits.max()):
            what = "the grammar" if self._constraint else "logit_bias"
            also = " with logit_bias" if self._constraint and self._bias else ""
            raise OptionError(f"{what}{also} forbids every token, so the answer cannot continue")
