"""The process that runs a stranger's templates: what it takes from itself first, and what it does then.

It gets the templates, says that it is ready, and answers one request after the other. By then it has no file
but its pipe and can open none, its memory ends a little above what it has, and the system ends it when a
template computes for too long, also inside one long call that hears no signal. It ends with its parent, whose
end of the pipe closes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError

from hetrun.system.sandbox.framing import HEAD, framed, length
from hetrun.system.sandbox.inside import bound_memory, bounded_time, give_up_rights, read, write
from hetrun.text.chat import limits
from hetrun.text.chat.jinja_sandbox import TemplateTimeout, compiled, line_of, reason_of, rendered
from hetrun.text.chat.messages import tool_variants, variants

# What Jinja and Python import on use must be there before no file can be opened.
PRIMER = (
    r"{{ '<b>\n\N{DIGIT ONE}' | pprint | striptags | urlencode | urlize | wordwrap }}{{ strftime_now('%B') }}"
)

Answer = Mapping[str, object]


def main(pipe: int) -> None:
    """The child's whole life; `pipe` is its end of the pipe."""
    sources = json.loads(read(pipe, length(read(pipe, HEAD.size))))
    time.localtime()  # reads the time zone
    rendered(compiled(PRIMER), {}, limits.MOST_OUTPUT)
    with suppress(TemplateSyntaxError):
        compiled("{%")
    try:
        TemplateServer(pipe, sources, give_up_rights()).run()
    except MemoryError:
        os._exit(limits.NO_MEMORY)


class TemplateServer:
    """Answers requests. A template is compiled when it is first wanted, the first one at once."""

    def __init__(self, pipe: int, sources: Sequence[str], used: int) -> None:
        self._pipe = pipe
        self._sources = sources
        self._used = used
        self._templates: dict[int, Template] = {}

    def run(self) -> NoReturn:
        """Until the parent hangs up, or a template has gone too far."""
        write(self._pipe, framed({"ready": True}))
        self._bound_memory(0)
        answer = self._attempt({"template": 0}, 0)
        while not answer.get("over"):
            size = length(read(self._pipe, HEAD.size))
            self._bound_memory(size)
            answer = self._attempt(json.loads(read(self._pipe, size)), size)
            write(self._pipe, framed(answer))
        # What was interrupted anywhere may hold a lock, and what filled the memory may still lie there.
        os._exit(limits.NO_MEMORY if answer["reason"] == limits.TOO_LARGE else limits.NO_TIME)

    def _bound_memory(self, size: int) -> None:
        soft, hard = (self._used + limits.memory(n) for n in (size, limits.MOST_INPUT))
        bound_memory(soft, hard)

    def _attempt(self, request: Mapping[str, Any], size: int) -> Answer:
        """The text, or what went wrong, in bounded time."""
        with bounded_time(limits.seconds(size), TemplateTimeout):
            try:
                return self._answer(request, size)
            except (Exception, TemplateTimeout) as error:
                return self._failure(request, error)

    def _answer(self, request: Mapping[str, Any], size: int) -> Answer:
        number = request["template"]
        if number not in self._templates:
            self._templates[number] = compiled(self._sources[number])
        if "variables" not in request:
            return {"text": ""}
        first: Exception | None = None
        given = request["variables"]
        pairs = (
            (tools, said) for tools in tool_variants(given["tools"]) for said in variants(given["messages"])
        )
        for tools, messages in pairs:
            try:
                variables = {**given, "messages": messages, "tools": tools}
                text = rendered(self._templates[number], variables, limits.output(size))
                text.encode()
                return {"text": text}
            except MemoryError:
                raise
            except Exception as error:
                first = first or error
        assert first is not None
        raise first

    def _failure(self, request: Mapping[str, Any], error: BaseException) -> Answer:
        line = line_of(error, self._templates.get(request["template"]))
        over = isinstance(error, MemoryError | TemplateTimeout)
        return {"reason": reason_of(error), "line": line, "over": over}
