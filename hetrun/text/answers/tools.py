"""The tools of a chat, checked: types, sizes, names, and whether they must be called."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any, Literal

from hetrun.errors import FieldError, OptionError
from hetrun.text.chat.messages import plain

MOST_TOOLS = 128
MOST_TEXT = 1 << 19  # characters of all tools as JSON
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    given: Mapping[str, object]  # as the request says it, for the template
    place: str  # in the request


@dataclass(frozen=True)
class Tools:
    """What a request says of tools; none of them where they may not be called."""

    all: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required"] = "none"
    named: str | None = None  # the one that has to be called
    parallel: bool = True
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the arguments, by name

    @property
    def wanted(self) -> tuple[Tool, ...]:
        """Those that may be called."""
        return tuple(tool for tool in self.all if self.named in (None, tool.name))


def read_tools(tools: object, choice: object = None, *, parallel: bool = True) -> Tools:
    """Tools and `tool_choice` in OpenAI's form; FieldError says which field is wrong."""
    found = _tools(tools)
    chosen, named = _choice(choice, found)
    if chosen == "none":
        return Tools()
    schemas = {tool.name: tool.parameters for tool in found}
    return Tools(found, chosen, named, parallel, schemas)


def _tools(given: object) -> tuple[Tool, ...]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise wrong_type("tools", "a list", given)
    if len(given) > MOST_TOOLS:
        raise FieldError(
            f"tools may hold {MOST_TOOLS} tools, not {len(given)}", "tools", "array_above_max_length"
        )
    if _size(given) > MOST_TEXT:
        message = f"tools may have {MOST_TEXT} characters of JSON"
        raise FieldError(message, "tools", "string_above_max_length")
    found = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given))
    seen: set[str] = set()
    for tool in found:
        if tool.name in seen:
            where = f"{tool.place}.function.name"
            raise FieldError(f"{where}: there is another tool named {tool.name}", where, "invalid_value")
        seen.add(tool.name)
    return found


def _size(tools: Sequence[object]) -> int:
    try:
        return len(json.dumps(tools, ensure_ascii=False))
    except RecursionError:
        raise FieldError("tools is nested too deeply", "tools", "invalid_value") from None


def _tool(given: object, where: str) -> Tool:
    if not isinstance(given, dict):
        raise wrong_type(where, "an object", given)
    kind = given.get("type", "function")
    if kind != "function":
        message = f"{where}.type must be function, not {short(kind)}: this server has no tools of its own"
        raise FieldError(message, f"{where}.type", "invalid_value")
    function = _object(given, "function", where)
    inner = f"{where}.function"
    name = _name(function, inner)
    if not isinstance(function.get("description") or "", str):
        raise wrong_type(f"{inner}.description", "a string", function["description"])
    parameters = function.get("parameters")
    strict = function.get("strict") or False
    if not isinstance(strict, bool):
        raise wrong_type(f"{inner}.strict", "true or false", strict)
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    elif not isinstance(parameters, dict):
        raise wrong_type(f"{inner}.parameters", "a JSON schema, which is an object", parameters)
    if (kind := parameters.get("type", "object")) != "object":
        message = f"{inner}.parameters.type must be object, not {short(kind)}"
        raise FieldError(message, f"{inner}.parameters", "invalid_function_parameters")
    try:
        plain(where, given)
    except OptionError as error:
        raise FieldError(str(error), where, "invalid_value") from None
    return Tool(name, parameters, strict, {"type": "function", **given}, where)


def _object(values: Mapping[str, object], name: str, where: str) -> Mapping[str, object]:
    found = values.get(name)
    if found is None:
        raise FieldError(f"{where}.{name} is missing", f"{where}.{name}", "missing_required_parameter")
    if not isinstance(found, dict):
        raise wrong_type(f"{where}.{name}", "an object", found)
    return found


def _name(function: Mapping[str, object], where: str) -> str:
    name = function.get("name")
    if name is None:
        raise FieldError(f"{where}.name is missing", f"{where}.name", "missing_required_parameter")
    if not isinstance(name, str):
        raise wrong_type(f"{where}.name", "a string", name)
    if not NAME.fullmatch(name):
        message = f"{where}.name must be 1 to 64 letters, digits, _ or -, not {short(name)}"
        raise FieldError(message, f"{where}.name", "invalid_value")
    return name


def _choice(given: object, tools: Sequence[Tool]) -> tuple[Literal["none", "auto", "required"], str | None]:
    if isinstance(given, dict):
        return "required", _named(given, tools)
    if given is not None and given not in CHOICES:
        said = ", ".join(CHOICES)
        message = f"tool_choice must be {said}, or an object that names a function, not {short(given)}"
        raise FieldError(message, "tool_choice", "invalid_value")
    if given == "required" and not tools:
        raise FieldError("tool_choice needs tools, and there are none", "tool_choice", "invalid_value")
    if given == "none" or not tools:
        return "none", None
    return ("required" if given == "required" else "auto"), None


def _named(given: Mapping[str, object], tools: Sequence[Tool]) -> str:
    kind = given.get("type", "function")
    if kind != "function":
        message = f"tool_choice.type must be function, not {short(kind)}"
        raise FieldError(message, "tool_choice.type", "invalid_value")
    name = _name(_object(given, "function", "tool_choice"), "tool_choice.function")
    if all(tool.name != name for tool in tools):
        message = f"tool_choice names {name}, which is none of the tools"
        raise FieldError(message, "tool_choice", "invalid_value")
    return name


def wrong_type(field: str, wanted: str, value: object) -> FieldError:
    """The error for a field of another type."""
    return FieldError(f"{field} must be {wanted}, not {type(value).__name__}", field, "invalid_type")
