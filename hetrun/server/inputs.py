"""The `input` of a request for embeddings: one text or several, as strings or as lists of token ids."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short

from hetrun.errors import ContextFull
from hetrun.events import ModelInfo
from hetrun.server.errors import ApiError, api_error, wrong_type

MOST_INPUTS = 2048  # OpenAI's
EMPTY = "is empty: there is nothing that a vector could stand for"

Text = str | tuple[int, ...]


def inputs(body: Mapping[str, object], info: ModelInfo) -> list[Text]:
    """The texts, each a string or the ids of its tokens."""
    value = body.get("input")
    if value is None:
        raise ApiError("input is missing", "input", "missing_required_parameter")
    if isinstance(value, str):
        return [_string(value, "input")]
    if not isinstance(value, list):
        raise wrong_type("input", "a string, or a list of strings or of token ids", value)
    if not value:
        raise ApiError(f"input {EMPTY}", "input", "empty_array")
    if type(value[0]) is int:
        return [_tokens(value, "input", info)]
    if len(value) > MOST_INPUTS:
        message = f"input may hold {MOST_INPUTS} texts, not {len(value)}: ask in several requests"
        raise ApiError(message, "input", "array_above_max_length")
    return [_text(text, f"input[{i}]", info) for i, text in enumerate(value)]


def _text(value: object, where: str, info: ModelInfo) -> Text:
    if isinstance(value, str):
        return _string(value, where)
    if isinstance(value, list):
        return _tokens(value, where, info)
    raise wrong_type(where, "a string or a list of token ids", value)


def _string(value: str, where: str) -> str:
    if not value:
        raise ApiError(f"{where} {EMPTY}", where, "invalid_value")
    return value


def _tokens(value: list[object], where: str, info: ModelInfo) -> tuple[int, ...]:
    if not value:
        raise ApiError(f"{where} {EMPTY}", where, "empty_array")
    if len(value) > info.context:
        full = ContextFull(f"the text has {len(value)} tokens; shorten it, or ask for more with --ctx")
        raise api_error(full, info.context, where)
    found = []
    for i, token in enumerate(value):
        if type(token) is not int:
            raise wrong_type(f"{where}[{i}]", "a token id", token)
        if not 0 <= token < info.n_vocab:
            message = f"{where}[{i}] must be a token id from 0 to {info.n_vocab - 1}, not {short(token)}"
            raise ApiError(message, f"{where}[{i}]", "invalid_value")
        found.append(token)
    return tuple(found)
