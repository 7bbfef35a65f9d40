"""The prompts of the older endpoint: texts, or lists of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr as short

from hetrun.errors import ContextFull
from hetrun.events import ModelInfo
from hetrun.server.errors import ApiError, api_error, wrong_type
from hetrun.server.fields import Body
from hetrun.server.orders import MOST_TOGETHER

NAME = "prompt"
WANTED = "a text, a list of texts, a list of tokens, or a list of lists of tokens"

Prompt = str | tuple[int, ...]


def prompts(body: Body, info: ModelInfo) -> list[Prompt]:
    """One or several."""
    given = body.get(NAME)
    if given is None:
        raise ApiError("prompt is missing", NAME, "missing_required_parameter")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise wrong_type(NAME, WANTED, given)
    if not given:
        raise ApiError("prompt is empty: there is nothing to continue", NAME, "empty_array")
    if _is_number(given[0]):
        return [_tokens(given, NAME, info)]
    if len(given) > MOST_TOGETHER:
        message = f"prompt may hold {MOST_TOGETHER} prompts, not {len(given)}"
        raise ApiError(message, NAME, "array_above_max_length")
    return [_prompt(one, f"{NAME}[{i}]", info) for i, one in enumerate(given)]


def _prompt(given: object, where: str, info: ModelInfo) -> Prompt:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise wrong_type(where, "a text or a list of tokens", given)
    if not given:
        raise ApiError(f"{where} is empty: there is nothing to continue", where, "empty_array")
    return _tokens(given, where, info)


def _tokens(given: Sequence[object], where: str, info: ModelInfo) -> tuple[int, ...]:
    if len(given) > info.context:
        full = ContextFull(f"the prompt has {len(given)} tokens; shorten it, or ask for more with --ctx")
        raise api_error(full, info.context, where)
    tokens = []
    for i, token in enumerate(given):
        if type(token) is not int or not 0 <= token < info.n_vocab:
            message = f"{where}[{i}] must be a token id from 0 to {info.n_vocab - 1}, not {short(token)}"
            raise ApiError(message, f"{where}[{i}]", "invalid_value")
        tokens.append(token)
    return tuple(tokens)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
