"""The chain of rules, built as llama.cpp builds it. A rule that is switched off is not in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hetrun.client.sampling_params import SamplingParams
from hetrun.sampling import filters
from hetrun.sampling.candidates import Rule
from hetrun.sampling.dry import DryRule, Encode, find_breakers
from hetrun.sampling.penalties import penalties
from hetrun.sampling.plugin_rules import brought

Pieces = Callable[[], Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class Setting:
    """All that a rule is made of."""

    params: SamplingParams
    temperature: float
    context: int  # what a look back of -1 tokens means
    pieces: Pieces | None
    encode: Encode | None

    def back(self, last_n: int) -> int:
        return self.context if last_n == -1 else last_n


def build(setting: Setting) -> tuple[Rule, ...]:
    """The chain in the order that was asked for."""
    chain = [rule for name in setting.params.samplers for rule in _rules(name, setting)]
    greedy = next((i for i, rule in enumerate(chain) if is_greedy(rule)), None)
    if greedy is None:
        return tuple(chain)
    # Behind it there is nothing to choose from, and what always keeps the best need not run right before it.
    before = chain[:greedy]
    while before and isinstance(before[-1], partial) and before[-1].func in KEEP_THE_BEST:
        before.pop()
    return (*before, chain[greedy])


def _rules(name: str, setting: Setting) -> Sequence[Rule]:
    """Those of a link: our own, or one that a package brought."""
    return RULES[name](setting) if name in RULES else brought(name, setting)


def is_greedy(rule: Rule) -> bool:
    """Whether it leaves nothing but the best."""
    return isinstance(rule, partial) and rule.func is filters.temperature and rule.keywords["value"] == 0


KEEP_THE_BEST = {filters.top_k, filters.top_p, filters.min_p, filters.top_n_sigma}


def _penalties(s: Setting) -> list[Rule]:
    p = s.params
    last_n = s.back(p.repeat_last_n)
    if last_n == 0 or (p.repeat_penalty, p.frequency_penalty, p.presence_penalty) == (1, 0, 0):
        return []
    return [
        partial(
            penalties,
            last_n=last_n,
            repeat=p.repeat_penalty,
            frequency=p.frequency_penalty,
            presence=p.presence_penalty,
        )
    ]


def _dry(s: Setting) -> list[Rule]:
    p = s.params
    last_n = s.back(p.dry_penalty_last_n)
    if last_n == 0 or p.dry_multiplier == 0 or p.dry_base < 1:
        return []
    breakers = find_breakers(p.dry_sequence_breakers, s.pieces(), s.encode) if s.pieces else {}
    return [DryRule(last_n, p.dry_multiplier, p.dry_base, p.dry_allowed_length, breakers)]


def _top_n_sigma(s: Setting) -> list[Rule]:
    return [partial(filters.top_n_sigma, n=s.params.top_n_sigma)] if s.params.top_n_sigma > 0 else []


def _top_k(s: Setting) -> list[Rule]:
    return [partial(filters.top_k, k=s.params.top_k)] if s.params.top_k > 0 else []


def _typ_p(s: Setting) -> list[Rule]:
    p = s.params
    return [partial(filters.typical_p, p=p.typical_p, min_keep=p.min_keep)] if p.typical_p < 1 else []


def _top_p(s: Setting) -> list[Rule]:
    p = s.params
    return [partial(filters.top_p, p=p.top_p, min_keep=p.min_keep)] if p.top_p < 1 else []


def _min_p(s: Setting) -> list[Rule]:
    p = s.params
    return [partial(filters.min_p, p=p.min_p, min_keep=p.min_keep)] if p.min_p > 0 else []


def _xtc(s: Setting) -> list[Rule]:
    p = s.params
    if p.xtc_probability == 0 or p.xtc_threshold > 0.5:
        return []
    chance, bar = p.xtc_probability, p.xtc_threshold
    return [partial(filters.xtc, probability=chance, threshold=bar, min_keep=p.min_keep)]


def _temperature(s: Setting) -> list[Rule]:
    around, exponent = s.params.dynatemp_range, s.params.dynatemp_exponent
    if around == 0:
        return one_temperature(s.temperature)
    least, most = max(s.temperature - around, 0.0), s.temperature + around
    return [partial(filters.dynamic_temperature, least=least, most=most, exponent=exponent)]


def one_temperature(value: float) -> list[Rule]:
    return [] if value == 1 else [partial(filters.temperature, value=value)]


# By llama.cpp's names.
RULES: Mapping[str, Callable[[Setting], list[Rule]]] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": _top_n_sigma,
    "top_k": _top_k,
    "typ_p": _typ_p,
    "top_p": _top_p,
    "min_p": _min_p,
    "xtc": _xtc,
    "temperature": _temperature,
}
