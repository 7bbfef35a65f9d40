"""How each family of models writes calls, and which family a chat template is of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hetrun.text.tool_parsers import gemma4, harmony, muse, python_calls
from hetrun.text.tool_parsers.dialect import MESSAGE
from hetrun.text.tool_parsers.gemma4_calls import gemma4_call, gemma4_thought, opened_thought
from hetrun.text.tool_parsers.json_calls import json_calls
from hetrun.text.tool_parsers.named_calls import (
    KIMI_CALL,
    KIMI_CALLS,
    KIMI_CALLS_END,
    deepseek_call,
    kimi_call,
    mistral_calls,
)
from hetrun.text.tool_parsers.scanner import Calls, Reading
from hetrun.text.tool_parsers.tagged_calls import Types, call_in, tagged_calls
from hetrun.text.tool_parsers.tags import (
    FUNCTION,
    FUNCTION_TAGS,
    MINIMAX_CALLS,
    MINIMAX_CALLS_END,
    MINIMAX_TAGS,
    SEED_CALL,
    SEED_CLOSE,
)

Body = Callable[[Calls, Types], Reading[str]]  # what follows a mark

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


@dataclass(frozen=True)
class Format:
    """How a family writes calls."""

    name: str
    bodies: Mapping[str, Body]  # by the marks that calls begin with
    noise: tuple[str, ...] = ()  # marks around calls that say nothing more
    bare: bool = False  # an answer may be a call, with no mark before it
    opened: Body | None = None  # what goes on where a prompt has begun a thought, if thoughts are looked for
    short_ids: bool = False  # its templates take nine characters as the id of a call, and no others


def _json(close: str = "", first: str = "") -> Body:
    return lambda calls, types: json_calls(calls, close, first=first)


_FUNCTION: Mapping[str, Body] = {FUNCTION: call_in(FUNCTION_TAGS)}
_TAGGED: Mapping[str, Body] = {"<tool_call>": tagged_calls, **_FUNCTION}
_MINIMAX: Mapping[str, Body] = {MINIMAX_TAGS.begin: call_in(MINIMAX_TAGS)}
_MUSE: Mapping[str, Body] = {muse.TAGS.begin: call_in(muse.TAGS)}
_PYTHON: Mapping[str, Body] = {"<|python_tag|>": _json()}
_MISTRAL: Mapping[str, Body] = {"[TOOL_CALLS]": lambda calls, types: mistral_calls(calls)}
_DEEPSEEK: Mapping[str, Body] = {"<｜tool▁call▁begin｜>": lambda calls, types: deepseek_call(calls)}
_KIMI: Mapping[str, Body] = {KIMI_CALL: lambda calls, types: kimi_call(calls)}
_LFM2: Mapping[str, Body] = {python_calls.BEGIN: lambda calls, types: python_calls.python_calls(calls)}
_GEMMA4: Mapping[str, Body] = {gemma4.CALL: gemma4_call}
_PHI: Mapping[str, Body] = {"functools[": _json(first="["), "<|tool_call|>": _json("<|/tool_call|>")}

FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format("hermes", _TAGGED),
        Format("qwen3_coder", _TAGGED),
        Format("glm", _TAGGED),
        Format("llama3", _PYTHON, bare=True),
        Format("mistral", _MISTRAL, short_ids=True),
        Format("mistral_named", _MISTRAL, short_ids=True),
        Format("deepseek", _DEEPSEEK, (CALLS_BEGIN, CALLS_END)),
        Format("deepseek_v31", _DEEPSEEK, (CALLS_BEGIN, CALLS_END)),
        Format("phi", _PHI),
        Format("kimi_k2", _KIMI, (KIMI_CALLS, KIMI_CALLS_END)),
        Format(python_calls.NAME, _LFM2),
        Format("minimax_m2", _MINIMAX, (MINIMAX_CALLS, MINIMAX_CALLS_END)),
        Format("seed_oss", _FUNCTION, (SEED_CALL, SEED_CLOSE)),
        Format(muse.NAME, _MUSE, (muse.CALLS, muse.CALLS_END)),
        Format(gemma4.NAME, _GEMMA4, (gemma4.CALL_END,)),
        Format(harmony.NAME, {}),  # whose calls are messages, which `chat.channels` reads
        Format(
            "generic",
            {
                **_TAGGED,
                **_MINIMAX,
                **_MUSE,
                **_PYTHON,
                **_MISTRAL,
                **_DEEPSEEK,
                **_KIMI,
                **_LFM2,
                **_GEMMA4,
                **_PHI,
            },
            (
                *(CALLS_BEGIN, CALLS_END, KIMI_CALLS, KIMI_CALLS_END, SEED_CALL, SEED_CLOSE),
                *(MINIMAX_CALLS, MINIMAX_CALLS_END, muse.CALLS, muse.CALLS_END),
            ),
            bare=True,
        ),
    )
}
AUTO, NONE = "auto", "none"
OTHERS = "generic"  # for a template that takes tools and is of no family that is known
UNTOLD = "hermes"  # for one that takes none: then we tell the model of its tools, and how to call them

# What only the templates of one family hold; the first that fits.
MARKS = (
    (harmony.NAME, harmony.CHANNEL, MESSAGE),
    (muse.NAME, muse.CALLS),
    (gemma4.NAME, gemma4.CALL + gemma4.CALLED),
    ("kimi_k2", KIMI_CALL),
    (python_calls.NAME, python_calls.BEGIN),
    (python_calls.NAME, "<|tool_list_start|>"),
    ("minimax_m2", MINIMAX_CALLS),
    ("seed_oss", SEED_CALL),
    ("deepseek", "<｜tool▁call▁begin｜>", "```json"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>"),
    ("mistral_named", "[TOOL_CALLS]", "[ARGS]"),
    ("mistral", "[TOOL_CALLS]"),
    ("glm", "<arg_key>"),
    ("qwen3_coder", "<parameter="),
    ("hermes", "<tool_call>"),
    ("phi", "<|tool_call|>"),
    ("phi", "functools["),
    ("llama3", "<|python_tag|>"),
    ("llama3", '"parameters": '),
)

TEXT_ONLY = Format("", {})  # of an answer in which no calls are looked for


def with_thoughts(format: Format) -> Format:
    """The same where Gemma 4's thoughts are looked for, which stand anywhere among texts and calls."""
    bodies = {**format.bodies, gemma4.CHANNEL: gemma4_thought}
    return replace(format, bodies=bodies, noise=(*format.noise, gemma4.CHANNEL_END), opened=opened_thought)


_TOOLS = re.compile(r"\btools\b")
_BEFORE = re.compile(r"(?:\b(?:in|if|elif|and|or|not)\s+|\(\s*|\{[%{]-?\s*)\Z")
NEAR = 500  # characters of a template before a name, in which the block begins that it stands in


# Firefunction's template has them as a text of this name, which it puts together with others.
_FUNCTIONS = re.compile(r"(?:\+|\{\{-?)\s*functions\b(?!\s*[.\[(])")
_FUNCTIONS_TESTED = re.compile(r"\bfunctions\s+is\b")


def takes_functions(template: str) -> bool:
    """Whether a template writes tools from a text that is called functions."""
    return bool(_FUNCTIONS.search(template)) and not _FUNCTIONS_TESTED.search(template)


def takes_tools(template: str) -> bool:
    """Whether a template writes what tools there are."""
    if takes_functions(template):
        return True
    for found in _TOOLS.finditer(template):
        before = template[max(0, found.start() - NEAR) : found.start()]
        begun = max(before.rfind("{%"), before.rfind("{{"))
        if begun > max(before.rfind("%}"), before.rfind("}}")) and _BEFORE.search(before[-20:]):
            return True
    return False


def family(template: str) -> str:
    """The name of the format in which a model with this template writes calls."""
    if not takes_tools(template):
        return UNTOLD
    return next((name for name, *marks in MARKS if all(mark in template for mark in marks)), OTHERS)
