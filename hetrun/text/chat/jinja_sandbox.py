"""Jinja as transformers sets it up, so that a template gives the text that the model was trained on.

Only the child process imports this. Jinja's immutable sandbox is the first of two walls: no attribute with an
underscore, no change to what is given. What it cannot bound is time and memory; that is done to the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from types import TracebackType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError as JinjaError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hetrun.text.chat import limits

MOST_SAID = 500  # characters of an error, which a template can make as long as it likes


class TemplateTimeout(BaseException):
    """The template computes for too long. No `except Exception` on its way may swallow that."""


class MessagesRefused(JinjaError):
    """The template called raise_exception: it does not like the messages."""


def compiled(source: str) -> Template:
    """The template as Python code."""
    return _environment().from_string(source)


def rendered(template: Template, variables: Mapping[str, Any], most: int) -> str:
    """The template's text, of at most `most` characters."""
    pieces: list[str] = []
    size = 0
    # As Template.generate does, but for the work it puts into tracebacks for people.
    for piece in template.root_render_func(template.new_context(dict(variables))):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise OverflowError(f"it writes more than {most:,} characters")
    return "".join(pieces)


def line_of(error: BaseException, template: Template | None) -> int | None:
    """The template's line that is to blame."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    line = None
    traceback: TracebackType | None = error.__traceback__
    while template is not None and traceback is not None:
        # Between two lines of a loop Python names none (None, whatever typeshed says).
        if traceback.tb_frame.f_code.co_filename == "<template>" and (at := traceback.tb_lineno):
            line = template.get_corresponding_lineno(at)
        traceback = traceback.tb_next
    return line


def reason_of(error: BaseException) -> str:
    """What went wrong, for people."""
    text = (error.msg if isinstance(error, SyntaxError) else str(error)).strip()[:MOST_SAID]
    if isinstance(error, TemplateTimeout):
        return limits.TOO_LONG
    if isinstance(error, MemoryError):
        return limits.TOO_LARGE
    if isinstance(error, MessagesRefused):
        return f"the template refuses these messages: {text}"
    if isinstance(error, SecurityError):
        return f"forbidden in a template: {text}"
    if isinstance(error, RecursionError):
        return "it calls itself without an end, or is nested too deeply"
    if isinstance(error, UnicodeEncodeError):
        return f"it writes U+{ord(error.object[error.start]):04X}, half of a character"
    if isinstance(error, JinjaError | OverflowError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}"


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:  # noqa: ANN401
        """Jinja gives something undefined, and complains only when that is used; no template needs to try."""
        raise SecurityError(f"{attribute[:100]!r} of a {type(obj).__name__}")


class _Generation(Extension):
    """{% generation %} marks what the assistant says, for training; here its body is simply written."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """As transformers has it: no names with an underscore, which lead into Python's own objects."""

    def __init__(*args: Any, **given: Any) -> None:  # noqa: ANN401
        # No parameter is named self, because a template may name a variable so.
        self, *rest = args
        attributes = dict(*rest, **given)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name[:100]!r} in a namespace")


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:  # noqa: ANN401
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:  # noqa: ANN401
        return dict.fromkeys(*given)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    del environment.globals["lipsum"]  # imports on use, and no template wants it
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


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


def _raise_exception(message: object) -> NoReturn:
    raise MessagesRefused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
