"""Fields that hold texts: one or several, as strings or as lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as short

from hetrun.client.events import ModelInfo
from hetrun.errors import ContextFull
from hetrun.server.errors import ApiError, api_error, wrong_type
from hetrun.server.fields import Body
from hetrun.system.units import counted

WANTED = "a text, a list of texts, a list of tokens, or a list of lists of tokens"

Text = str | tuple[int, ...]


@dataclass(frozen=True)
class Field:
    """A field with texts, and what they are for."""

    name: str
    one: str  # its name for a text
    empty: str  # what an empty one cannot be used for
    most: int
    blank: bool  # whether a text may have no letters


def texts(body: Body, info: ModelInfo, field: Field) -> list[Text]:
    """One or several."""
    given = body.get(field.name)
    if given is None:
        raise ApiError(f"{field.name} is missing", field.name, "missing_required_parameter")
    if isinstance(given, str):
        return [_string(given, field.name, field)]
    if not isinstance(given, list):
        raise wrong_type(field.name, WANTED, given)
    if not given:
        raise _empty(field.name, field, "empty_array")
    if _is_number(given[0]):
        return [number_list(given, field.name, info, field)]
    if len(given) > field.most:
        message = (
            f"{field.name} may hold {field.most} {field.one}s, not {len(given)}: ask in several requests"
        )
        raise ApiError(message, field.name, "array_above_max_length")
    return [_text(one, f"{field.name}[{i}]", info, field) for i, one in enumerate(given)]


def _text(given: object, where: str, info: ModelInfo, field: Field) -> Text:
    if isinstance(given, str):
        return _string(given, where, field)
    if not isinstance(given, list):
        raise wrong_type(where, "a text or a list of tokens", given)
    if not given:
        raise _empty(where, field, "empty_array")
    return number_list(given, where, info, field)


def _string(given: str, where: str, field: Field) -> str:
    if not given and not field.blank:
        raise _empty(where, field, "invalid_value")
    return given


def number_list(given: Sequence[object], where: str, info: ModelInfo, field: Field) -> tuple[int, ...]:
    """A list of token ids, which the model must have."""
    if len(given) > info.context:
        said = f"the {field.one} has {counted(len(given), 'token')}; shorten it, or ask for more with --ctx"
        raise api_error(ContextFull(said), info.context, where)
    tokens = []
    for i, token in enumerate(given):
        if type(token) is not int or not 0 <= token < info.n_vocab:
            message = f"{where}[{i}] must be a token id from 0 to {info.n_vocab - 1}, not {short(token)}"
            raise ApiError(message, f"{where}[{i}]", "invalid_value")
        tokens.append(token)
    return tuple(tokens)


def _empty(where: str, field: Field, code: str) -> ApiError:
    return ApiError(f"{where} is empty: there is nothing to {field.empty}", where, code)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
