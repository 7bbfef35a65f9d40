"""From messages to the text the model was trained on, by the model's own chat template.

A template is a Jinja program that came with a file from a stranger, written against the conventions of
Hugging Face's transformers. It runs in Jinja's immutable sandbox: no attribute with an underscore, no change
to what it is given, bounded ranges, products, sums and output. What this cannot bound is time, and memory by
roundabout ways: nested loops that write nothing may still run for hours. Until templates are rendered in a
process that can be killed, open models from sources you trust.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from hetrun.errors import OptionError, TemplateError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

Json = dict[str, Any]

OF_THE_MODEL = "the model's tokenizer.chat_template"
NO_TEMPLATE = "chatml: the model has none"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MOST_SOURCE = 1 << 20  # the longest templates in use have some 20,000 characters
MOST_OUTPUT = 1 << 20  # characters, and
OUTPUT_PER_INPUT = 16  # as many more for each character of the messages
MOST_RESULT = 1 << 25  # characters or items that one operation inside a template may make
MOST_DIGITS = 5000  # of an integer
MOST_DEPTH = 64  # of lists and objects in messages and tools


@dataclass(frozen=True)
class ChatTemplate:
    """A template and where it comes from."""

    source: str
    origin: str

    @classmethod
    def of_model(cls, source: str | None) -> ChatTemplate:
        """The model's own; a model that has none gets ChatML, and `origin` says so."""
        return cls(source, OF_THE_MODEL) if source else cls(CHATML, NO_TEMPLATE)

    @classmethod
    def from_file(cls, path: str | Path) -> ChatTemplate:
        """The file named by --chat-template."""
        try:
            with open(path, encoding="utf-8") as file:
                source = file.read(MOST_SOURCE + 1)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
            raise TemplateError(
                f"--chat-template {path}: {reason}; give a file with a Jinja template"
            ) from None
        return cls(source, f"--chat-template {path}")

    def prepare(self) -> None:
        """Compile now what can be compiled; a mistake is reported to whoever sends messages."""
        with suppress(TemplateError):
            self.check()

    def check(self) -> None:
        """Compile now, so that a template with a mistake is reported before the first message."""
        self._compiled()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        bos_token: str = "",
        eos_token: str = "",
    ) -> str:
        """The text for the model. It holds the special tokens, perhaps the one for the beginning too."""
        chat = checked_messages(messages)
        functions = None if tools is None else _checked_tools(tools)
        limit = MOST_OUTPUT + OUTPUT_PER_INPUT * len(json.dumps([chat, functions], ensure_ascii=False))
        template = self._compiled()
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(
                messages=chat,
                tools=functions,
                add_generation_prompt=add_generation_prompt,
                bos_token=bos_token,
                eos_token=eos_token,
            ):
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise OverflowError(f"it writes more than {limit} characters")
        # Whatever goes wrong in there is the template's doing, be it a KeyError or a RecursionError.
        except Exception as error:
            self._fail(error, _line_in_template(error.__traceback__))
        return "".join(pieces)

    def _compiled(self) -> Template:
        from jinja2 import TemplateSyntaxError

        if len(self.source) > MOST_SOURCE:
            raise TemplateError(f"{self.origin}: longer than {MOST_SOURCE} characters, which no template is")
        try:
            return _compile(self.source)
        except TemplateSyntaxError as error:
            self._fail(error, error.lineno)
        # Nested too deeply for Jinja or for Python's compiler, or a constant that cannot be computed.
        except Exception as error:
            self._fail(error, None)

    def _fail(self, error: Exception, line: int | None) -> NoReturn:
        where = f"{self.origin}, line {line}" if line else self.origin
        raise TemplateError(f"{where}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    from jinja2 import TemplateError as JinjaError
    from jinja2.exceptions import SecurityError

    text = (error.msg if isinstance(error, SyntaxError) else str(error)).strip()[:500]
    if isinstance(error, SecurityError):
        return f"forbidden in a template: {text}"
    if isinstance(error, RecursionError):
        return "it calls itself without an end, or is nested too deeply"
    if isinstance(error, JinjaError | OverflowError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}"


def _line_in_template(traceback: TracebackType | None) -> int | None:
    line = None
    while traceback is not None:  # Jinja puts the template's own lines into the traceback
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


# --- what goes in


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """A plain copy: `role` and `content` are texts; what else a message holds (tool calls, name) is kept."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise OptionError('messages must be a list like [{"role": "user", "content": "Hi"}]')
    if not messages:
        raise OptionError("messages is empty: give at least one message")
    return [_checked_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _checked_message(where: str, message: object) -> Json:
    if not isinstance(message, Mapping):
        raise OptionError(f"{where} must be an object with role and content, not {type(message).__name__}")
    plain: Json = _plain(where, message)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise OptionError(f"{where}.role must be a text such as system, user or assistant")
    if plain.get("content") is None and not (role == "assistant" and plain.get("tool_calls")):
        raise OptionError(f"{where}.content is missing")
    plain["content"] = _checked_content(f"{where}.content", plain.get("content"))
    for call in _calls(where, plain):
        _parse_arguments(call)
    return plain


def _checked_content(where: str, content: object) -> str:
    if content is None:  # an assistant that only calls tools; templates add texts and would fail on None
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise OptionError(f"{where} must be a text or a list of parts, not {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise OptionError(
                f'{where}[{i}] must be {{"type": "text", "text": "..."}}: only text can be read'
                + (f", not {kind}" if isinstance(kind, str) and kind != "text" else "")
            )
        texts.append(text)
    return "\n".join(texts)  # as llama.cpp and vLLM join them


def _calls(where: str, message: Json) -> list[Json]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise OptionError(f"{where}.tool_calls must be a list of objects")
    return calls


def _parse_arguments(call: Json) -> None:
    """OpenAI's clients send a call's arguments as JSON in a text; templates want the object."""
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            return  # what the model once wrote need not be JSON: it is shown as it was
        if isinstance(arguments, dict):
            function["arguments"] = arguments


def _checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[Json]:
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise OptionError("tools must be a list of JSON objects")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise OptionError(f"tools[{i}] must be a JSON object, not {type(tool).__name__}")
    return [_plain(f"tools[{i}]", tool) for i, tool in enumerate(tools)]


def _plain(where: str, value: object, depth: int = 0) -> Any:  # noqa: ANN401
    """A copy in JSON's own types: a template gets no object whose methods do anything."""
    if depth > MOST_DEPTH:
        raise OptionError(f"{where} is nested more than {MOST_DEPTH} deep")
    if isinstance(value, str):
        return _text(where, value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise OptionError(f"{where} has a key that is no text: {key!r}")
            plain[_text(where, key)] = _plain(f"{where}.{key[:40]}", item, depth + 1)
        return plain
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{i}]", item, depth + 1) for i, item in enumerate(value)]
    raise OptionError(f"{where} holds a {type(value).__name__}, which is not JSON")


def _text(where: str, text: str) -> str:
    plain = str.__str__(text)
    try:
        plain.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(plain[error.start]):04X}"
        raise OptionError(f"{where} holds {code}, half of a character: send valid UTF-8") from None
    return plain


# --- the sandbox


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up, so that a template gives the text the model was trained on."""
    from jinja2 import TemplateError as JinjaError
    from jinja2 import nodes
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.parser import Parser

    class Generation(Extension):
        """{% generation %} marks what the assistant says for training; here its body is simply written."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    def raise_exception(message: str) -> NoReturn:
        raise JinjaError(message)

    environment = _bounded_environment_class()(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]  # writes any amount of text, and no template wants it
    return environment


def _bounded_environment_class() -> type[ImmutableSandboxedEnvironment]:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        """Refuses an operation whose result would fill the memory; Jinja's own limit is on `range` alone."""

        intercepted_binops = frozenset(("*", "**", "+"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
            if _too_large(operator, left, right):
                raise OverflowError(f"the result of {operator} is too large")
            return super().call_binop(context, operator, left, right)

    return Bounded


def _too_large(operator: str, left: object, right: object) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        a, b = left.bit_length() // 3, right.bit_length() // 3
        return (a * right if operator == "**" else a + b) > MOST_DIGITS
    if operator == "+":
        return _length(left) + _length(right) > MOST_RESULT
    times = right if isinstance(right, int) else left if isinstance(left, int) else 0
    return (_length(left) + _length(right)) * times > MOST_RESULT


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:256])
