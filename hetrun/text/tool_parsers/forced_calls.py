"""How calls would have to be written, for a request that wants some: what a grammar is made of.

The result is JSON that `hetrun.sampling.grammar` spells: a text stands for itself, a list is a sequence,
and objects are marks, values of JSON, free texts, choices and repetitions.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetrun.text.tool_parsers import gemma4, gemma4_schema, harmony, muse, python_calls
from hetrun.text.tool_parsers.dialect import MESSAGE
from hetrun.text.tool_parsers.dialects import BY_THOUGHT
from hetrun.text.tool_parsers.formats import CALLS_BEGIN, CALLS_END
from hetrun.text.tool_parsers.named_calls import (
    CALL_END,
    KIMI_ARGUMENTS,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_CALLS,
    KIMI_CALLS_END,
    KIMI_FUNCTIONS,
    SEPARATOR,
)
from hetrun.text.tool_parsers.parts import end_of
from hetrun.text.tool_parsers.tagged_calls import kinds
from hetrun.text.tool_parsers.tags import (
    CLOSE,
    FUNCTION,
    FUNCTION_END,
    KEY,
    KEY_END,
    MINIMAX_CALLS,
    MINIMAX_CALLS_END,
    MINIMAX_TAGS,
    PARAMETER,
    PARAMETER_END,
    SEED_CALL,
    SEED_CLOSE,
    VALUE,
    VALUE_END,
    Tags,
)

Part = Any  # a text, or a list or an object of parts
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class CallFrame:
    """What stands around calls; `{}` is the name of a tool."""

    begin: tuple[str, ...]  # before the arguments; of the marks, which may be tokens, each is one of these
    end: tuple[str, ...]
    between: str = ""
    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    several: bool = True  # whether the family writes more than one call
    lazy: bool = True  # whether the first text can be nothing but a call


_JSON = '{{"name": "{}", "arguments": '
FRAMES: Mapping[str, CallFrame] = {
    "hermes": CallFrame(("<tool_call>", "\n" + _JSON), ("}\n", CLOSE), "\n"),
    "generic": CallFrame(("<tool_call>", "\n" + _JSON), ("}\n", CLOSE), "\n", lazy=False),
    "qwen3_coder": CallFrame(("<tool_call>", "\n" + FUNCTION + "{}>\n"), (FUNCTION_END + "\n", CLOSE), "\n"),
    "glm": CallFrame(("<tool_call>", "{}\n"), (CLOSE,), "\n"),
    "llama3": CallFrame(('{{"name": "{}", "parameters": ',), ("}",), several=False, lazy=False),
    "mistral": CallFrame((_JSON,), ("}",), ", ", ("[TOOL_CALLS]", "["), ("]",)),
    "mistral_named": CallFrame(("[TOOL_CALLS]", "{}", "[ARGS]"), ()),
    "deepseek": CallFrame(
        ("<｜tool▁call▁begin｜>", "function", SEPARATOR, "{}\n```json\n"),
        ("\n```", CALL_END),
        "\n",
        (CALLS_BEGIN,),
        (CALLS_END,),
    ),
    "deepseek_v31": CallFrame(
        ("<｜tool▁call▁begin｜>", "{}", SEPARATOR), (CALL_END,), "", (CALLS_BEGIN,), (CALLS_END,)
    ),
    "phi": CallFrame((_JSON,), ("}",), ", ", ("<|tool_call|>", "["), ("]", "<|/tool_call|>")),
    gemma4.NAME: CallFrame((gemma4.CALL, gemma4.CALLED + "{}"), (gemma4.CALL_END,)),
    # What ends a call ends the answer.
    harmony.NAME: CallFrame(
        (harmony.CHANNEL, "commentary to=functions.{} ", harmony.CONSTRAIN, "json", MESSAGE),
        (),
        several=False,
        lazy=False,
    ),
    "kimi_k2": CallFrame(
        (KIMI_CALL, KIMI_FUNCTIONS + "{}:"), (KIMI_CALL_END,), "", (KIMI_CALLS,), (KIMI_CALLS_END,)
    ),
    python_calls.NAME: CallFrame(("{}(",), (")",), ", ", (python_calls.BEGIN, "["), ("]", python_calls.END)),
    "minimax_m2": CallFrame(
        (MINIMAX_TAGS.begin + "{}" + MINIMAX_TAGS.close + "\n",),
        (MINIMAX_TAGS.end + "\n",),
        "",
        (MINIMAX_CALLS, "\n"),
        (MINIMAX_CALLS_END,),
    ),
    "seed_oss": CallFrame((SEED_CALL, "\n" + FUNCTION + "{}>\n"), (FUNCTION_END + "\n", SEED_CLOSE), "\n"),
    muse.NAME: CallFrame(
        (" to={}", MESSAGE, muse.CALLS + "\n" + muse.TAGS.begin + "{}" + muse.TAGS.close + "\n"),
        (muse.TAGS.end + "\n" + muse.CALLS_END,),
        several=False,
        lazy=False,
    ),
}

ONE_BY_ONE = (
    *("qwen3_coder", "seed_oss", "minimax_m2", "glm"),
    *(muse.NAME, gemma4.NAME, python_calls.NAME),
)  # arguments by themselves


def calls(family: str, tools: Mapping[str, Schema], several: bool = True, thought: str = "") -> str:
    """An answer that is calls of these tools and nothing else, but for a thought, which may come first."""
    frame = FRAMES[family]
    call = {"any": [_call(family, frame, name, schema) for name, schema in tools.items()]}
    inner = {"many": call, "between": frame.between} if several and frame.several else call
    parts: list[Part] = [*_marks(frame.open), inner, *_marks(frame.close)]
    return json.dumps([*_thought(thought), *parts], ensure_ascii=False)


def final(schema: Schema, mark: str, thinks: bool) -> str:
    """The last message of an answer in messages, with a value by this schema; `mark`: that of thoughts."""
    thought = _thought(mark) if thinks else []
    return json.dumps([*thought, *BY_THOUGHT[mark].final({"json": schema})], ensure_ascii=False)


def when_begun(family: str, tools: Mapping[str, Schema], several: bool = True) -> str | None:
    """An answer of any kind, but a call that it begins is one of these; None where that cannot be said."""
    frame = FRAMES[family]
    options = [_call(family, frame, name, schema) for name, schema in tools.items()]
    if family == harmony.NAME:
        return json.dumps(harmony.any_answer(options), ensure_ascii=False)
    if not frame.lazy:
        return None
    if frame.open:
        mark, *rest = frame.open
        call: Part = {"any": options}
        after = [*_marks(rest), {"many": call, "between": frame.between} if several else call]
        block = [{"until": mark}, *after, *_marks(frame.close)]
    else:
        block = [{"until": frame.begin[0]}, {"any": [option[1:] for option in options]}]
    parts = [{"any_times": block} if several else {"maybe": block}, {"free": True}]
    return json.dumps(parts, ensure_ascii=False)


def in_order(family: str) -> bool:
    """Whether a grammar of calls holds one schema for each tool, in their order."""
    return family not in ONE_BY_ONE


def _call(family: str, frame: CallFrame, name: str, schema: Schema) -> list[Part]:
    begin = _marks(part.format(name) for part in frame.begin)
    match family:
        case "qwen3_coder":
            arguments = _arguments(schema, (PARAMETER, ">\n"), "\n" + PARAMETER_END + "\n")
        case "seed_oss":
            arguments = _arguments(schema, (PARAMETER, ">"), PARAMETER_END + "\n")
        case "minimax_m2":
            arguments = _tagged(schema, MINIMAX_TAGS)
        case python_calls.NAME:
            arguments = _keywords(schema)
        case muse.NAME:
            arguments = _tagged(schema, muse.TAGS)
        case "kimi_k2":
            numbers = {"any": [str(i) for i in range(10)]}
            arguments = [numbers, {"mark": KIMI_ARGUMENTS}, {"json": closed(schema)}]
        case "glm":
            arguments = _arguments(schema, (KEY, KEY_END + "\n" + VALUE), VALUE_END + "\n")
        case gemma4.NAME:
            arguments = [gemma4_schema.arguments(name, schema)]
        case _:
            arguments = [{"json": closed(schema)}]
    return [*begin, *arguments, *_marks(frame.end)]


def _thought(mark: str) -> list[Part]:
    """A thought, or none."""
    if not mark:
        return []
    if dialect := BY_THOUGHT.get(mark):
        return [{"maybe": dialect.thought_message}]
    if mark == gemma4.THOUGHT:
        return [{"maybe": gemma4.thought()}]
    return [{"maybe": [{"mark": mark}, {"until": end_of(mark)}, {"space": True}]}]


def _tagged(schema: Schema, tags: Tags) -> list[Part]:
    return _arguments(schema, (tags.key, tags.close), tags.value_end + "\n")


def _arguments(schema: Schema, around: tuple[str, str], end: str, quoted: bool = False) -> list[Part]:
    """Arguments one by one, in the order of the schema; `quoted`: texts as JSON has them, too."""
    properties = schema.get("properties")
    required = schema.get("required")
    parts: list[Part] = []
    for key, inner in properties.items() if isinstance(properties, dict) else ():
        inner = inner if isinstance(inner, dict) else {}
        value = [around[0] + key + around[1], *_value(inner, end, schema, quoted)]
        always = isinstance(required, list) and key in required
        parts.append(value if always else {"maybe": value})
    return parts


def _keywords(schema: Schema) -> list[Part]:
    """Arguments as Python names them, with JSON's values; a comma may follow the last one."""
    properties = schema.get("properties")
    names = properties if isinstance(properties, dict) else {}
    if not names or not all(name.isidentifier() and not keyword.iskeyword(name) for name in names):
        return ["**", {"json": closed(schema)}]
    return _arguments(schema, ("", "="), ", ", quoted=True)


def _value(inner: Schema, end: str, whole: Schema, quoted: bool) -> list[Part]:
    values = inner.get("enum")
    if not quoted and isinstance(values, list) and values and all(isinstance(v, str) for v in values):
        return [{"any": values}, end]
    if not quoted and kinds(inner) == {"string"}:
        return [{"until": end}]
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return [{"json": {**shared, **inner}}, end]


def closed(schema: Schema) -> Schema:
    """A schema of arguments as a grammar takes it: an object, with no arguments but those that it names."""
    if "$ref" in schema or any(key in schema for key in ("anyOf", "oneOf", "allOf")):
        return schema
    return {"additionalProperties": "patternProperties" in schema, **schema, "type": "object"}


def _marks(parts: Iterable[str]) -> list[Part]:
    return [{"mark": part} if part[:1] in ("<", "[") and part[-1:] in (">", "]") else part for part in parts]
