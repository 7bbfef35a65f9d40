"""A request's fields for sampling and for the answer's format; names are OpenAI's and llama.cpp's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any, cast

from hetrun.client import sampler_plugins
from hetrun.client.events import ModelInfo
from hetrun.client.sampling_params import CHECKS, STRUCTURES, SamplingParams
from hetrun.errors import OptionError
from hetrun.server.errors import ApiError, wrong_type
from hetrun.server.fields import Body, LogprobCount, flag

DEFAULT_TEMPERATURE = 1.0  # OpenAI's
ANY_OBJECT: Mapping[str, object] = {"type": "object"}

LIMITS = ("n_predict", "max_tokens", "max_completion_tokens")  # the last one given counts
UNLIMITED = (-1, -2)  # llama.cpp's n_predict without a limit
FORMS = ("response_format", *STRUCTURES)  # at most one of these
# Passed to SamplingParams under the same names.
SAMPLING = tuple(name for name in CHECKS if name not in (*LIMITS, "logprobs", "prompt_logprobs", *FORMS))
NAMES = (*SAMPLING, *LIMITS, *FORMS)

STRICT_RANGES: Mapping[str, tuple[float, float]] = {  # OpenAI's
    "temperature": (0, 2),
    "top_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
STRICT_SEEDS = range(-(2**63), 2**63)
STRICT_STOPS = 4
STRICT_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)


def sampling_params(
    body: Body,
    info: ModelInfo,
    defaults: Mapping[str, object],
    wanted: LogprobCount,
    most_tokens: int | None = None,
    own_temperature: float = DEFAULT_TEMPERATURE,
) -> SamplingParams:
    """The request's parameters. `defaults` are the server's, for parameters that it doesn't set;
    `most_tokens` is the length limit if it sets none, and `own_temperature` the endpoint's if neither the
    server nor the model's file has one."""
    own = own_temperature if info.temperature is None else info.temperature
    values: dict[str, object] = {"temperature": own, **defaults}
    values |= {name: body[name] for name in SAMPLING if body.get(name) is not None}
    for name, value in values.items():
        if name in CHECKS:
            _check(name, name, value)
    brought = sampler_plugins.parameters()
    values |= {name: _brought(brought[name], body[name]) for name in brought if body.get(name) is not None}
    values["logprobs"], values["prompt_logprobs"] = wanted.answer, wanted.prompt
    usual = cast("int | None", defaults.get("max_tokens"))  # of the server
    most_tokens = most_tokens if usual is None else usual
    values["max_tokens"] = _max_tokens(body, most_tokens, usual, scored=wanted.prompt is not None)
    form = form_field(body)
    if form is not None:
        name, value = _structure(form, body[form])
        _check(form, name, value)
        values[name] = value
    params = SamplingParams.from_mapping(values)
    try:
        params.check_vocabulary(info.n_vocab)
    except OptionError as error:
        raise ApiError(str(error), "logit_bias", "invalid_value") from None
    return params


def _brought(parameter: sampler_plugins.Parameter, value: object) -> float:
    """The value of a parameter of a plugin's sampler."""
    try:
        return parameter.check(parameter.name, value)
    except OptionError as error:
        raise ApiError(str(error), parameter.name, "invalid_value") from None


def check_strictly(body: Body) -> None:
    """OpenAI's own limits."""
    for name, (least, most) in STRICT_RANGES.items():
        value = body.get(name)
        if isinstance(value, int | float) and value > most:
            raise ApiError(f"{name} must be {most:g} or less", name, "decimal_above_max_value")
        if isinstance(value, int | float) and value < least:
            raise ApiError(f"{name} must be {least:g} or more", name, "decimal_below_min_value")
    seed = body.get("seed")
    if isinstance(seed, int) and seed not in STRICT_SEEDS:
        code = "integer_above_max_value" if seed > 0 else "integer_below_min_value"
        raise ApiError(f"seed must be from {-(2**63)} to {2**63 - 1}", "seed", code)
    stop = body.get("stop")
    if isinstance(stop, list) and len(stop) > STRICT_STOPS:
        message = f"stop may hold {STRICT_STOPS} strings, not {len(stop)}"
        raise ApiError(message, "stop", "array_above_max_length")
    _check_schema_name(body.get("response_format"))


def _check_schema_name(form: object) -> None:
    described = form.get("json_schema") if isinstance(form, dict) else None
    if not isinstance(described, dict):
        return
    name, where = described.get("name"), "response_format.json_schema.name"
    if name is None:
        raise ApiError(f"{where} is missing", where, "missing_required_parameter")
    if not (isinstance(name, str) and STRICT_NAME.fullmatch(name)):
        raise ApiError(f"{where} must be 1 to 64 letters, digits, _ or -", where, "invalid_value")


def form_field(body: Body) -> str | None:
    """The field with the answer's format."""
    given = [name for name in FORMS if body.get(name) is not None and not _asks_nothing(name, body[name])]
    if len(given) > 1:
        message = f"{' and '.join(given)} are both given: an answer can follow only one"
        raise ApiError(message, given[1], "invalid_value")
    return given[0] if given else None


def _asks_nothing(name: str, value: object) -> bool:
    if name == "response_format":
        return isinstance(value, dict) and value.get("type") == "text"
    return name == "grammar" and value == ""


def _structure(form: str, value: object) -> tuple[str, object]:
    """A parameter's name and value."""
    if form == "response_format":
        return "json_schema", _response_schema(value)
    if form == "json_schema":
        return form, _or_any_object(value)
    return form, value


def _response_schema(form: object) -> object:
    """The schema in OpenAI's response_format."""
    where = "response_format"
    if not isinstance(form, dict):
        raise wrong_type(where, "an object", form)
    match form.get("type"):
        case "json_object":
            return _or_any_object(form.get("schema", {}))
        case "json_schema":
            described = _required(form, "json_schema", where)
            where = f"{where}.json_schema"
            if not isinstance(described, dict):
                raise wrong_type(where, "an object", described)
            flag(described, "strict", f"{where}.")  # schemas are always followed strictly
            schema = _required(described, "schema", where)
            if not isinstance(schema, dict):
                raise wrong_type(f"{where}.schema", "an object", schema)
            return _or_any_object(schema)
        case None:
            raise ApiError(f"{where}.type is missing", f"{where}.type", "missing_required_parameter")
        case other:
            message = f"{where}.type must be text, json_object or json_schema, not {short(other)}"
            raise ApiError(message, f"{where}.type", "invalid_value")


def _or_any_object(schema: object) -> object:
    # In the standard, an empty schema allows every value; llama.cpp and its clients mean an object.
    return ANY_OBJECT if schema == {} else schema


def _required(values: Mapping[str, object], name: str, where: str) -> object:
    if values.get(name) is None:
        raise ApiError(f"{where}.{name} is missing", f"{where}.{name}", "missing_required_parameter")
    return values[name]


def limit_field(body: Body) -> str | None:
    """The field with the length limit."""
    given = [name for name in LIMITS if body.get(name) is not None]
    return given[-1] if given else None


def _max_tokens(body: Body, most: int | None, usual: int | None, scored: bool) -> int | None:
    """The limit of a request, else `most`; as in llama-server, a request without any limit of its own has the
    server's (`usual`)."""
    name = limit_field(body)
    if name is None:
        return most
    if name == "n_predict" and type(body[name]) is int and body[name] in UNLIMITED:
        return usual
    limit: int = _check(name, "max_tokens", body[name])
    if limit == 0 and not scored:
        raise ApiError(f"{name} must be 1 or more, not 0", name, "invalid_value")
    return limit


def _check(field: str, name: str, value: object) -> Any:  # noqa: ANN401 - each has its own type
    """The value of a parameter; the error names the field as the client called it."""
    try:
        return CHECKS[name](field, value)
    except OptionError as error:
        raise ApiError(str(error), field, "invalid_value") from None
