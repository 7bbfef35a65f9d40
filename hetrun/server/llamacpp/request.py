"""A request for a completion in llama.cpp's own shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short

from hetrun.client.events import GenerateRequest, ModelInfo
from hetrun.client.queries import Tokenize
from hetrun.client.sampling_params import DEFAULT_TEMPERATURE, MOST_LOGPROBS, SPELLINGS
from hetrun.errors import OptionError
from hetrun.server import request as orders
from hetrun.server.errors import ApiError, wrong_type
from hetrun.server.fields import Body, LogprobCount, count, flag
from hetrun.server.inputs import Field, Text, number_list
from hetrun.server.pictures.parts import marked
from hetrun.server.query import asked
from hetrun.server.request import MOST_CHOICES, MOST_TOGETHER, Order
from hetrun.server.sampling import LIMITS, sampling_params
from hetrun.server.service import Service

PROMPT = Field("prompt", "prompt", "continue", MOST_TOGETHER, blank=True)
MOST_PARTS = 1024  # texts and lists of tokens that make up one prompt
MOST_TEXT = 1 << 20  # characters of those texts, and of the texts in logit_bias
MOST_BIASES = 1 << 16
MOST_FIELDS, MOST_FIELD = 64, 256  # of response_fields, and characters of each
# Fields that only this endpoint has.
OWN = (
    *("n_probs", "n_cmpl", "n_indent", "post_sampling_probs", "return_tokens", "timings_per_token"),
    *("response_fields", "grammar_lazy", "grammar_triggers", "adaptive_target", "adaptive_decay"),
)
KNOWN = (*orders.COMMON, *OWN, PROMPT.name)
# Fields that are not supported, each with what has no effect. Anything else would change the answer.
UNBUILT: Mapping[str, object] = {"n_indent": 0, "grammar_lazy": False, "grammar_triggers": []}
# llama.cpp's letters for samplers, and names of samplers that it has or had and that are not here: they are
# skipped, because clients send complete lists, with parameters that switch most of them off.
LETTERS: Mapping[str, str] = {
    **{"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p"},
    **{"p": "top_p", "m": "min_p", "x": "xtc", "t": "temperature"},
}
SKIPPED = ("tfs_z", "infill", "adaptive_p", "a", "i", "f")


@dataclass(frozen=True)
class MarkedPrompt:
    """A prompt with pictures: a text that has a mark for each."""

    text: str
    pictures: tuple[bytes, ...]


@dataclass(frozen=True)
class NativeRequest:
    """A parsed request: what is asked of the engine, and what the answer shows."""

    order: Order
    return_tokens: bool
    timings_per_token: bool
    progress: bool
    fields: tuple[str, ...]  # those of the answer; empty: all
    settings: Mapping[str, object]  # the answer's generation_settings


async def native_request(body: Body, info: ModelInfo, service: Service, client: str) -> NativeRequest:
    """Read a request of this client; ApiError names the field that is wrong."""
    body = await normalised(body, service)
    orders.check(body, info, service, KNOWN)
    return native_order(body, info, service, client, await prompts_of(body, info, service))


def native_order(
    body: Body,
    info: ModelInfo,
    service: Service,
    client: str,
    prompts: Sequence[Text | MarkedPrompt],
    field: str = "prompt",
) -> NativeRequest:
    """The same for prompts that were read from `field`, or made of other fields."""
    n_probs = count(body, "n_probs", 0, MOST_LOGPROBS) or 0
    sampled = flag(body, "post_sampling_probs")
    body, prompt_only = _limited({**body, "n": body.get("n_cmpl", body.get("n"))})
    count(body, "n", 1, MOST_CHOICES)
    wanted = LogprobCount(n_probs or None)
    params = sampling_params(body, info, service.sampling, wanted, own_temperature=DEFAULT_TEMPERATURE)
    requests = [
        GenerateRequest(
            params,
            text=prompt.text
            if isinstance(prompt, MarkedPrompt)
            else prompt
            if isinstance(prompt, str)
            else None,
            tokens=prompt if isinstance(prompt, tuple) else None,
            pictures=prompt.pictures if isinstance(prompt, MarkedPrompt) else (),
            echo=True,
            prompt_only=prompt_only,
            sampled_logprobs=sampled,
        )
        for prompt in prompts
    ]
    order = orders.bounded(orders.order(body, info, client, requests, wanted=wanted, field=field))
    per_token, progress = flag(body, "timings_per_token"), flag(body, "return_progress")
    if order.stream and per_token:  # the counts that these times need
        order = replace(order, prompts=tuple(replace(p, progress=True) for p in order.prompts))
    return NativeRequest(
        order,
        flag(body, "return_tokens"),
        per_token,
        progress,
        _fields(body),
        _settings(body, order, n_probs),
    )


def _refuse(body: Body) -> None:
    for name, neutral in UNBUILT.items():
        if body.get(name) not in (None, neutral):
            raise ApiError(f"{name} is not supported by this server", name, "unsupported_parameter")
    target = body.get("adaptive_target")
    if isinstance(target, int | float) and target >= 0:
        message = "adaptive_target: this server has no sampler adaptive_p"
        raise ApiError(message, "adaptive_target", "unsupported_parameter")


# --- prompts


async def prompts_of(body: Body, info: ModelInfo, service: Service) -> list[Text | MarkedPrompt]:
    """One prompt or several: texts, lists of tokens, or lists of both, whose texts are tokenised here."""
    name = PROMPT.name
    given = body.get(name)
    if given is None:
        raise ApiError(f"{name} is missing", name, "missing_required_parameter")
    if isinstance(given, list) and not given:
        raise ApiError(f"{name} is empty: there is nothing to continue", name, "empty_array")
    # A list of texts only, or with lists or objects in it, holds several prompts.
    if not isinstance(given, list) or (any(map(_is_number, given)) and not any(map(_is_one, given))):
        return [await _prompt(given, name, info, service)]
    if len(given) > PROMPT.most:
        message = f"{name} may hold {PROMPT.most} prompts, not {len(given)}: ask in several requests"
        raise ApiError(message, name, "array_above_max_length")
    return [await _prompt(one, f"{name}[{i}]", info, service) for i, one in enumerate(given)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_one(value: object) -> bool:
    """Whether this is a prompt of its own within a list."""
    return isinstance(value, list | dict)


async def _prompt(given: object, where: str, info: ModelInfo, service: Service) -> Text | MarkedPrompt:
    match given:
        case str():
            return given
        case {"prompt_string": str(text), **others}:
            if pictures := marked(text, others.get("multimodal_data") or [], where, info):
                return MarkedPrompt(text, pictures)
            return text
        case list() if given:
            if any(isinstance(part, str) for part in given):
                return await _mixed(given, where, info, service)
            return number_list(given, where, info, PROMPT)
        case list():
            raise ApiError(f"{where} is empty: there is nothing to continue", where, "empty_array")
    raise wrong_type(where, "a text, a list of tokens and texts, or an object with prompt_string", given)


async def _mixed(given: Sequence[object], where: str, info: ModelInfo, service: Service) -> tuple[int, ...]:
    """A prompt of tokens and texts. Only a text at its beginning gets the tokens that begin a prompt."""
    texts = [part for part in given if isinstance(part, str)]
    if len(texts) > MOST_PARTS or sum(map(len, texts)) > MOST_TEXT:
        message = f"{where} may hold {MOST_PARTS} texts with {MOST_TEXT} characters"
        raise ApiError(message, where, "array_above_max_length")
    tokens: list[object] = []
    for i, part in enumerate(given):
        if isinstance(part, str):
            tokens += await tokens_of(part, f"{where}[{i}]", service, add_special=not i)
        else:
            tokens.append(part)
    return number_list(tokens, where, info, PROMPT)


async def tokens_of(
    text: str, where: str, service: Service, *, add_special: bool = False, parse_special: bool = True
) -> list[int]:
    """The tokens of a text that is part of a prompt."""
    try:
        return await asked(service, Tokenize(text, add_special, parse_special))
    except OptionError as error:  # a text that takes too long to tokenise
        raise ApiError(str(error), where, "invalid_value") from error


# --- parameters, with llama.cpp's own spellings


async def normalised(body: Body, service: Service) -> Body:
    """The request with fields as the endpoints have them that follow OpenAI's, which spell some of them in
    another way."""
    _refuse(body)
    found: dict[str, object] = {}
    if isinstance(stops := body.get("stop"), str | list):
        stops = [stops] if isinstance(stops, str) else stops
        found["stop"] = [stop for stop in stops if stop != ""] or None
    if (samplers := body.get("samplers")) is not None:
        found["samplers"] = _samplers(samplers)
    if (bias := body.get("logit_bias")) is not None:
        found["logit_bias"] = await _biases(bias, service)
    if isinstance(grammar := body.get("grammar"), str) and grammar:
        found["json_schema"] = None  # the grammar counts if both are given
    return {**body, **found}


def _samplers(given: object) -> object:
    """A list of names, or one text with a letter for each."""
    if isinstance(given, str) and given and set(given) <= {*LETTERS, *SKIPPED}:
        given = [LETTERS.get(letter, letter) for letter in given]
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        return given
    names = [SPELLINGS.get(name, name) for name in given if name not in SKIPPED]
    return list(dict.fromkeys(names))


async def _biases(given: object, service: Service) -> dict[object, object]:
    """Biases by token id: from an object, or a list of pairs. `false` forbids a token, and a text stands for
    its tokens."""
    name = "logit_bias"
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, list):
        pairs = [_pair(pair, f"{name}[{i}]") for i, pair in enumerate(given)]
    else:
        raise wrong_type(name, "a list of pairs, or an object", given)
    texts = [key for key, _ in pairs if isinstance(key, str)]
    if len(pairs) > MOST_BIASES or sum(map(len, texts)) > MOST_TEXT:
        message = f"{name} may hold {MOST_BIASES} pairs with {MOST_TEXT} characters"
        raise ApiError(message, name, "array_above_max_length")
    found: dict[object, object] = {}
    for key, value in pairs:
        bias = -math.inf if value is False else value
        if isinstance(key, str) and not (key.isascii() and key.isdecimal()):
            for token in await tokens_of(key, name, service, parse_special=False):
                found[token] = bias
        else:
            found[key] = bias
    return found


def _pair(given: object, where: str) -> tuple[object, object]:
    match given:
        case [(str() | int()) as key, value] if not isinstance(key, bool):
            return key, value
        # As generation_settings shows them.
        case {"token": (str() | int()) as key, "bias": value} if not isinstance(key, bool):
            return key, value
    raise ApiError(
        f"{where} must be a pair of a token and a number, not {short(given)}", where, "invalid_value"
    )


def _limited(body: Body) -> tuple[Body, bool]:
    """The request with one limit, n_predict if it is given; and whether that is 0: only the prompt is
    computed."""
    for name in LIMITS:
        if body.get(name) is not None:
            body = {key: value for key, value in body.items() if key not in LIMITS or key == name}
            if type(body[name]) is int and body[name] == 0:
                return {key: value for key, value in body.items() if key != name}, True
            break
    return body, False


def _fields(body: Body) -> tuple[str, ...]:
    given, name = body.get("response_fields"), "response_fields"
    if given is None:
        return ()
    if not isinstance(given, list):
        raise wrong_type(name, "a list of names", given)
    if len(given) > MOST_FIELDS:
        raise ApiError(f"{name} may hold {MOST_FIELDS} names", name, "array_above_max_length")
    for i, field in enumerate(given):
        if not isinstance(field, str) or len(field) > MOST_FIELD:
            message = f"{name}[{i}] must be a text of at most {MOST_FIELD} characters"
            raise ApiError(message, f"{name}[{i}]", "invalid_value")
    return tuple(given)


def _settings(body: Body, order: Order, n_probs: int) -> dict[str, object]:
    """What the answer's generation_settings say: all parameters that were in force."""
    params, prompt, info = order.params, order.prompts[0], order.info
    limit = 0 if prompt.prompt_only else -1 if params.max_tokens is None else params.max_tokens
    shift = prompt.shift
    usual = DEFAULT_TEMPERATURE if info.temperature is None else info.temperature
    form = params.structure
    return {
        "n_ctx": info.context,
        "model": info.id,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": usual if params.temperature is None else params.temperature,
        **{name: getattr(params, name) for name in SHOWN},
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "stop": list(params.stop),
        "max_tokens": limit,
        "n_predict": limit,
        "n_keep": shift.keep if shift else 0,
        "n_discard": shift.discard if shift else 0,
        "stream": order.stream,
        "logit_bias": [
            {"token": token, "bias": bias if math.isfinite(bias) else None}
            for token, bias in params.logit_bias.items()
        ],
        "n_probs": n_probs,
        "grammar": form.text if form and form.kind == "grammar" else "",
        "json_schema": form.text if form and form.kind == "json_schema" else None,
        "samplers": list(params.samplers),
        "timings_per_token": flag(body, "timings_per_token"),
        "post_sampling_probs": flag(body, "post_sampling_probs"),
        "cache_prompt": not prompt.fresh,
        "lora": [],
    }


# Parameters that are shown under their names.
SHOWN = (
    *("dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability"),
    *("xtc_threshold", "typical_p", "repeat_last_n", "repeat_penalty", "presence_penalty"),
    *("frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("mirostat", "mirostat_tau", "mirostat_eta", "ignore_eos", "min_keep"),
)
