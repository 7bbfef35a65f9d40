"""What a request may say about sampling and about where its text ends.

Apart from `hetrun.sampling`, so that a front can make one without numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from reprlib import repr as short
from typing import Any, Literal

from hetrun.client import sampler_plugins
from hetrun.errors import OptionError

DEFAULT_TEMPERATURE = 0.8  # llama.cpp's
LEAST_TEMPERATURE = 1e-6  # far below it, a quotient of two logits overflows; a smaller temperature means 0
MOST_LOGPROBS = 128  # each is sorted out on the engine thread and sent with every token
MOST = 1e6  # of numbers with no natural end; far from overflow in any formula they stand in
MOST_BIAS = 1e9  # far beyond any logit, and far from overflow when added to one
MOST_STRUCTURE = 1 << 20  # characters of a grammar or a schema; the largest in use have some 100,000
MOST_BREAKERS = 64
MOST_STOPS = 1024
LEAST_BEGUN = 3  # letters of a name of which another is the beginning
# What other programs and the command line call it.
OTHERS = {
    "temp": "temperature",
    **dict.fromkeys(("n", "n_predict", "num_predict", "max_new_tokens"), "max_tokens"),
    **dict.fromkeys(("repetition_penalty", "repeat"), "repeat_penalty"),
    "schema": "json_schema",
}
MOST_STRINGS = 1 << 14  # characters of all stops or breakers; each becomes a state of an automaton

# llama.cpp's names and order. Logit bias and grammar come before them all; the draw comes last.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")


@dataclass(frozen=True, slots=True)
class Structure:
    """The required format of an answer."""

    kind: Literal["json_schema", "regex", "grammar", "parts"]
    text: str  # JSON, a regular expression, a grammar in GBNF or Lark, or JSON as `grammar.composed` has it


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop; names, meanings and defaults are llama.cpp's.

    max_tokens: most tokens of the answer; None: until the model ends or the context is full. 0 with
        prompt_logprobs: only the log-probabilities of the prompt.
    temperature: 0 always takes the most likely token, more draws more freely; None: what the model's file
        says, else 0.8.
    top_k: draw from the N most likely tokens; 0 or -1: off.
    top_p: draw from the most likely tokens that together have this probability; 1: off.
    min_p: leave out tokens less likely than this share of the most likely one; 0: off.
    typical_p: draw from the tokens closest to the expected surprise, up to this probability; 1: off.
    top_n_sigma: leave out logits further than this many standard deviations below the best; 0 or less: off.
    xtc_probability: how often to leave out the most likely tokens where several are likely; 0: off.
    xtc_threshold: the probability from which xtc counts a token as likely; above 0.5: off.
    min_keep: tokens that top_p, min_p, typical_p and xtc leave at least.
    dynatemp_range: how far the temperature moves with the entropy of the distribution; 0: off.
    dynatemp_exponent: how the entropy becomes a temperature within that range.
    repeat_penalty: divides the logits of tokens that were used; 1: off.
    frequency_penalty: lowers a token's logit each time that it was used; 0: off.
    presence_penalty: lowers a token's logit once it was used; 0: off.
    repeat_last_n: tokens that the three penalties look back; 0: off; -1: the whole context.
    dry_multiplier: strength of the penalty for repeated sequences; 0: off.
    dry_base: by how much that penalty grows with each repeated token; below 1: off.
    dry_allowed_length: the longest repetition without that penalty.
    dry_penalty_last_n: tokens that it looks back; 0: off; -1: the whole context.
    dry_sequence_breakers: texts at which a repetition ends.
    mirostat: 1 or 2: that version of Mirostat instead of all samplers but the temperature; 0: off.
    mirostat_tau: the surprise that Mirostat aims at.
    mirostat_eta: how fast Mirostat learns.
    samplers: the order in which samplers run; one that is not named is off.
    seed: seed of the random draws; None or -1: a random one.
    stop: a text or several that end the answer, and are no part of it.
    ignore_eos: go on when the model would end.
    logprobs: n: the log-probability of each token, and of the n most likely ones there.
    prompt_logprobs: the same for every token of the prompt but the first.
    logit_bias: numbers to be added to logits, by token id; -inf forbids a token.
    json_schema: a JSON schema that the answer follows, as a dictionary or JSON.
    regex: a regular expression that the answer matches.
    grammar: a grammar that the answer follows: GBNF as llama.cpp has it, or Lark.
    more: parameters of samplers that packages brought, by name.

    At most one of json_schema, regex and grammar can be given.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: Sequence[str] = SAMPLERS
    seed: int | None = None
    # A str is a sequence of str for the type checker too: one string or several are taken, a tuple is kept.
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    # A schema is kept as JSON text.
    json_schema: Mapping[str, Any] | bool | str | None = field(default=None, hash=False)
    regex: str | None = None
    grammar: str | None = None
    more: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        object.__setattr__(self, "more", _more("more", self.more))
        if self.more and self.samplers == SAMPLERS:
            object.__setattr__(self, "samplers", sampler_plugins.order(SAMPLERS, self.more))
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise OptionError("max_tokens must be an integer of 1 or more, not 0")
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} are both given: an answer can follow only one")

    @property
    def structure(self) -> Structure | None:
        """The required format of the answer, if any."""
        for kind in STRUCTURES:
            if (text := getattr(self, kind)) is not None:
                return Structure(kind, text)
        return None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From a JSON object; null means "not given", as OpenAI's clients send it."""
        given = {name: value for name, value in values.items() if value is not None}
        return cls(**_with_brought(given, [name for name in values if name not in _names()]))

    def changed(self, values: Mapping[str, object]) -> SamplingParams:
        """A copy with other values; OptionError names what is unknown."""
        given = _with_brought(dict(values), [name for name in values if name not in _names()])
        if "more" in given:
            given["more"] = {**self.more, **given["more"]}
        return replace(self, **given)

    def check_vocabulary(self, n_vocab: int) -> None:
        """Refuse a bias on a token the model does not have (called where the model is known)."""
        beyond = [token for token in self.logit_bias if token >= n_vocab]
        if beyond:
            raise OptionError(f"logit_bias: token {beyond[0]} does not exist, the model has {n_vocab} tokens")


def _names() -> list[str]:
    return [f.name for f in fields(SamplingParams)]


def _with_brought(given: dict[str, Any], others: Sequence[str]) -> dict[str, Any]:
    """The values; those of plugins' samplers are under `more`."""
    if not others:
        return given
    brought = sampler_plugins.parameters()
    if unknown := [name for name in others if name not in brought]:
        raise OptionError(_unknown(unknown, [*_names(), *brought]))
    more = {name: given.pop(name) for name in others if name in given}
    return {**given, "more": {**given.get("more", {}), **more}}


def _unknown(names: Sequence[object], known: Sequence[str]) -> str:
    from difflib import get_close_matches  # on use: 4 ms

    close = [match for name in names for match in _meant(str(name), known, get_close_matches)]
    hint = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(known)}"
    if "system" in names:
        hint = 'a system message is one of the messages: {"role": "system", "content": "..."}'
    what = "parameter" if len(names) == 1 else "parameters"
    return f"unknown sampling {what} {', '.join(map(repr, names))}: {hint}"


def _meant(name: str, known: Sequence[str], close: Callable[..., list[str]]) -> list[str]:
    """What other programs call otherwise, what a name begins, or is a slip in."""
    if (meant := OTHERS.get(name)) in known:
        return [str(meant)]
    begun = [other for other in known if other.startswith(name)] if len(name) >= LEAST_BEGUN else []
    return begun[:1] or close(name, known, n=1)


Check = Callable[[str, object], Any]


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _integer(least: int, most: int | None = None, hint: str = "") -> Check:
    return lambda name, value: _integer_of(name, value, least, most, hint)


def _integer_of(name: str, value: object, least: int, most: int | None = None, hint: str = "") -> int:
    allowed = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"
    said = f"{allowed} ({hint})" if hint else allowed
    # numpy's integers are Integral too. So is bool, but True is no sensible number here.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise OptionError(f"{name} must be {said}, not {short(value)}")
    number = int(value)
    if number < least or (most is not None and number > most):
        raise OptionError(f"{name} must be {said}, not {short(number)}")
    return number


def _between(least: float, most: float, hint: str = "") -> Check:
    said = f"a number from {least:g} to {most:g}" + (f" ({hint})" if hint else "")

    def check(name: str, value: object) -> float:
        number = _number(name, value, said)
        if least <= number <= most:  # NaN fails every comparison
            return number
        raise OptionError(f"{name} must be {said}, not {number!r}")

    return check


def _number(name: str, value: object, said: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name} must be {said}, not {short(value)}")
    try:
        return float(value)
    except OverflowError:
        raise OptionError(f"{name} must be {said}, not {short(value)}") from None


def temperature_of(name: str, value: object) -> float:
    """A valid temperature; raises an OptionError that calls it `name`."""
    said = f"0 (greedy) or a finite number of {LEAST_TEMPERATURE:g} or more"
    number = _number(name, value, said)
    if number == 0 or LEAST_TEMPERATURE <= number < math.inf:  # NaN fails every comparison
        return number
    raise OptionError(f"{name} must be {said}, not {number!r}")


def _boolean(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return bool(value)
    raise OptionError(f"{name} must be true or false, not {short(value)}")


def _seed(name: str, value: object) -> int | None:
    if value is None:
        return None
    seed = _integer_of(name, value, -1, 2**64 - 1, "-1 for a random one")
    return None if seed == -1 else seed


def _strings(what: str, most: int) -> Check:
    def check(name: str, value: object) -> tuple[str, ...]:
        found = (value,) if isinstance(value, str) else value
        if not isinstance(found, Sequence) or not all(isinstance(text, str) for text in found):
            raise OptionError(f"{name} must be a string or a list of strings, not {short(value)}")
        if "" in found:
            raise OptionError(f"{name} holds an empty string, {what}: leave it out")
        if len(found) > most:
            raise OptionError(f"{name} may hold {most} strings, not {len(found)}")
        if (characters := sum(map(len, found))) > MOST_STRINGS:
            raise OptionError(f"{name} may hold {MOST_STRINGS} characters, not {characters}")
        return tuple(dict.fromkeys(found))

    return check


def _samplers(name: str, value: object) -> tuple[str, ...]:
    # llama.cpp's command line separates them with semicolons.
    found = value.split(";") if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(n, str) for n in found):
        raise OptionError(f"{name} must be a list of names, not {short(value)}")
    if len(found) > len(SAMPLERS) + 1 and len(found) > len(SAMPLERS) + len(sampler_plugins.usable()) + 1:
        raise OptionError(f"{name} holds {len(found)} names; there are {', '.join(SAMPLERS)}, each once")
    names = tuple(SPELLINGS.get(n.strip().replace("-", "_"), n.strip().replace("-", "_")) for n in found if n)
    for n in names:
        if n not in SAMPLERS and sampler_plugins.link(n) is None:
            raise OptionError(
                f"{name} holds {short(n)}; there are {', '.join((*SAMPLERS, *sampler_plugins.usable()))}"
            )
    if len(set(names)) < len(names):
        raise OptionError(f"{name} holds {max(names, key=names.count)} twice")
    return names


SPELLINGS = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature", "nucleus": "top_p"}


def _schema(name: str, value: object) -> str | None:
    """A JSON schema as text; it is compiled later, when the vocabulary is known."""
    import json  # on use: few answers have a schema

    from hetrun.system.strict_json import fault_in_json

    if value is None:
        return None
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise OptionError(f"{name} is not JSON: {fault_in_json(error)}") from None
    if not isinstance(schema, dict | bool):
        raise OptionError(f"{name} must be a JSON object (or true, or false), not {short(schema)}")
    return _structure(name, text)


def _structure(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name} must be a text, not {short(value)}")
    if not value.strip() or len(value) > MOST_STRUCTURE:
        raise OptionError(f"{name} must have 1 to {MOST_STRUCTURE} characters, not {len(value)}")
    return value


def _more(name: str, value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} must map names of parameters to numbers, not {short(value)}")
    if not value:
        return {}
    brought = sampler_plugins.parameters()
    if unknown := [key for key in value if key not in brought]:
        raise OptionError(_unknown(unknown, list(brought)))
    return {key: brought[key].check(key, number) for key, number in value.items()}


def _logit_bias(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} must map token ids to numbers, not {short(value)}")
    return dict(_bias(key, number) for key, number in value.items())


def _bias(key: object, value: object) -> tuple[int, float]:
    # JSON has only string keys; ten digits hold every token id.
    token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10 else key
    token = _integer_of("a token id in logit_bias", token, 0, 2**31 - 1)
    said = f"a number from {-MOST_BIAS:g} to {MOST_BIAS:g}, or -inf to forbid the token"
    number = _number(f"logit_bias of token {token}", value, said)
    if abs(number) <= MOST_BIAS or number == -math.inf:
        return token, number
    raise OptionError(f"logit_bias of token {token} must be {said}, not {number!r}")


STRUCTURES: tuple[Literal["json_schema", "regex", "grammar"], ...] = ("json_schema", "regex", "grammar")

CHECKS: Mapping[str, Check] = {
    "max_tokens": _optional(_integer(0)),
    "temperature": _optional(temperature_of),
    "top_k": _integer(-1, None, "0 or -1 switches it off"),
    "top_p": _between(0, 1, "1 switches it off"),
    "min_p": _between(0, 1, "0 switches it off"),
    "typical_p": _between(0, 1, "1 switches it off"),
    "top_n_sigma": _between(-MOST, MOST, "0 or less switches it off"),
    "xtc_probability": _between(0, 1, "0 switches it off"),
    "xtc_threshold": _between(0, 1, "above 0.5 switches it off"),
    "min_keep": _integer(0),
    "dynatemp_range": _between(0, MOST, "0 switches it off"),
    "dynatemp_exponent": _between(0, MOST),
    "repeat_penalty": _between(LEAST_TEMPERATURE, MOST, "1 switches it off"),
    "frequency_penalty": _between(-MOST, MOST, "0 switches it off"),
    "presence_penalty": _between(-MOST, MOST, "0 switches it off"),
    "repeat_last_n": _integer(-1, None, "0 switches it off, -1 is the whole context"),
    "dry_multiplier": _between(0, MOST, "0 switches it off"),
    "dry_base": _between(0, MOST, "below 1 switches it off"),
    "dry_allowed_length": _integer(0),
    "dry_penalty_last_n": _integer(-1, None, "0 switches it off, -1 is the whole context"),
    "dry_sequence_breakers": _strings("which breaks every sequence", MOST_BREAKERS),
    "mirostat": _integer(0, 2, "0 switches it off"),
    "mirostat_tau": _between(0, MOST),
    "mirostat_eta": _between(0, MOST),
    "samplers": _samplers,
    "seed": _seed,
    "stop": _strings("which every text contains", MOST_STOPS),
    "ignore_eos": _boolean,
    "logprobs": _optional(_integer(0, MOST_LOGPROBS)),
    "prompt_logprobs": _optional(_integer(0, MOST_LOGPROBS)),
    "logit_bias": _logit_bias,
    "json_schema": _schema,
    "regex": _optional(_structure),
    "grammar": _optional(_structure),
}
