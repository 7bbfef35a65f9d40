"""What a request may say about sampling and about where its text ends.

Apart from `hetrun.sampling`, so that a front can make one without numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from reprlib import repr as short
from typing import Any, TypeVar

from hetrun.errors import OptionError

T = TypeVar("T")

LEAST_TEMPERATURE = 1e-6  # far below it a quotient of two logits overflows; whoever wants less wants 0
MOST_LOGPROBS = 128  # each is sorted out on the engine thread and sent with every token
MOST_BIAS = 1e9  # far beyond any logit, and far from overflow when added to one


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop; names as in vLLM and llama.cpp, defaults as in llama.cpp."""

    max_tokens: int | None = None  # None: until the model ends or the context is full
    temperature: float | None = None  # None: the model's own, else 0.8; 0: greedy
    top_k: int = 40  # 0 or -1: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    seed: int | None = None  # None or -1: random
    # A str is a sequence of str for the type checker too: one string or several are taken, a tuple is kept.
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # n: the chosen token's log-probability and those of the n best
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        kept = {
            "max_tokens": _optional(_integer, "max_tokens", self.max_tokens, 1),
            "temperature": _optional(temperature_of, "temperature", self.temperature),
            "top_k": _integer("top_k", self.top_k, -1, None, "0 or -1 switches it off"),
            "top_p": _fraction("top_p", self.top_p, "1 switches it off"),
            "min_p": _fraction("min_p", self.min_p, "0 switches it off"),
            "seed": _seed(self.seed),
            "stop": _stop(self.stop),
            "ignore_eos": _boolean("ignore_eos", self.ignore_eos),
            "logprobs": _optional(_integer, "logprobs", self.logprobs, 0, MOST_LOGPROBS),
            "logit_bias": _logit_bias(self.logit_bias),
        }
        for name, value in kept.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From a JSON object; null means "not given", as OpenAI's clients send it."""
        known = [f.name for f in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise OptionError(_unknown(unknown, known))
        return cls(**{name: value for name, value in values.items() if value is not None})

    def check_vocabulary(self, n_vocab: int) -> None:
        """Refuse a bias on a token the model does not have (called where the model is known)."""
        beyond = [token for token in self.logit_bias if token >= n_vocab]
        if beyond:
            raise OptionError(f"logit_bias: token {beyond[0]} does not exist, the model has {n_vocab} tokens")


def _unknown(names: Sequence[object], known: Sequence[str]) -> str:
    from difflib import get_close_matches  # on use: 4 ms

    close = [match for name in names for match in get_close_matches(str(name), known, n=1)]
    hint = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(known)}"
    what = "parameter" if len(names) == 1 else "parameters"
    return f"unknown sampling {what} {', '.join(map(repr, names))}: {hint}"


def _optional(check: Callable[..., T], name: str, value: object, *limits: object) -> T | None:
    return None if value is None else check(name, value, *limits)


def _integer(name: str, value: object, least: int, most: int | None = None, hint: str = "") -> int:
    allowed = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"
    said = f"{allowed} ({hint})" if hint else allowed
    # numpy's integers are Integral too. So is bool, but nobody means 1 by True here.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise OptionError(f"{name} must be {said}, not {short(value)}")
    number = int(value)
    if number < least or (most is not None and number > most):
        raise OptionError(f"{name} must be {said}, not {short(number)}")
    return number


def _number(name: str, value: object, said: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name} must be {said}, not {short(value)}")
    try:
        return float(value)
    except OverflowError:
        raise OptionError(f"{name} must be {said}, not {short(value)}") from None


def temperature_of(name: str, value: object) -> float:
    """A temperature that can be used, or an OptionError that calls it `name`."""
    said = f"0 (greedy) or a finite number of {LEAST_TEMPERATURE:g} or more"
    number = _number(name, value, said)
    if number == 0 or LEAST_TEMPERATURE <= number < math.inf:  # NaN fails every comparison
        return number
    raise OptionError(f"{name} must be {said}, not {number!r}")


def _fraction(name: str, value: object, hint: str) -> float:
    said = f"a number from 0 to 1 ({hint})"
    number = _number(name, value, said)
    if 0 <= number <= 1:
        return number
    raise OptionError(f"{name} must be {said}, not {number!r}")


def _boolean(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return bool(value)
    raise OptionError(f"{name} must be true or false, not {short(value)}")


def _seed(value: object) -> int | None:
    if value is None:
        return None
    seed = _integer("seed", value, -1, 2**64 - 1, "-1 for a random one")
    return None if seed == -1 else seed


def _stop(value: object) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(text, str) for text in found):
        raise OptionError(f"stop must be a string or a list of strings, not {short(value)}")
    if "" in found:
        raise OptionError("stop holds an empty string, which every text contains: leave it out")
    return tuple(dict.fromkeys(found))


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise OptionError(f"logit_bias must map token ids to numbers, not {short(value)}")
    return dict(_bias(key, number) for key, number in value.items())


def _bias(key: object, value: object) -> tuple[int, float]:
    # JSON has only string keys; ten digits hold every token id.
    token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10 else key
    token = _integer("a token id in logit_bias", token, 0, 2**31 - 1)
    said = f"a number from {-MOST_BIAS:g} to {MOST_BIAS:g}, or -inf to forbid the token"
    number = _number(f"logit_bias of token {token}", value, said)
    if abs(number) <= MOST_BIAS or number == -math.inf:
        return token, number
    raise OptionError(f"logit_bias of token {token} must be {said}, not {number!r}")
