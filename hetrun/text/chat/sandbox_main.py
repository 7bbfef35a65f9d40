"""The process that runs a stranger's templates: what it takes from itself first, and what it does then.

It gets the templates, says that it is ready, and answers one request after the other. By then it has no file
but its pipe and can open none, its memory ends a little above what it has, and the system ends it when a
template computes for too long, also inside one long call that hears no signal. It ends with its parent, whose
end of the pipe closes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError

from hetrun.text.chat import limits
from hetrun.text.chat.framing import HEAD, framed, length
from hetrun.text.chat.jinja_sandbox import OutOfTime, compiled, line_of, reason_of, rendered
from hetrun.text.chat.messages import tool_variants, variants

# What Jinja and Python import on use must be there before no file can be opened.
PRIMER = (
    r"{{ '<b>\n\N{DIGIT ONE}' | pprint | striptags | urlencode | urlize | wordwrap }}{{ strftime_now('%B') }}"
)

Answer = Mapping[str, object]


def main(pipe: int) -> None:
    """The child's whole life; `pipe` is its end of the pipe."""
    sources = json.loads(_read(pipe, length(_read(pipe, HEAD.size))))
    time.localtime()  # reads the time zone
    rendered(compiled(PRIMER), {}, limits.MOST_OUTPUT)
    with suppress(TemplateSyntaxError):
        compiled("{%")
    try:
        Server(pipe, sources, _give_up()).run()
    except MemoryError:
        os._exit(limits.NO_MEMORY)


def _give_up() -> int:
    """No files, no processes and no core dumps from here on; how many bytes of memory are in use."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0, 0))
    signal.signal(signal.SIGVTALRM, _out_of_time)
    return used


def _out_of_time(signum: int, frame: FrameType | None) -> NoReturn:
    raise OutOfTime


class Server:
    """Answers requests. A template is compiled when it is first wanted, the first one at once."""

    def __init__(self, pipe: int, sources: Sequence[str], used: int) -> None:
        self._pipe = pipe
        self._sources = sources
        self._used = used
        self._templates: dict[int, Template] = {}

    def run(self) -> NoReturn:
        """Until the parent hangs up, or a template has gone too far."""
        _write(self._pipe, {"ready": True})
        self._bound_memory(0)
        answer = self._attempt({"template": 0}, 0)
        while not answer.get("over"):
            size = length(_read(self._pipe, HEAD.size))
            self._bound_memory(size)
            answer = self._attempt(json.loads(_read(self._pipe, size)), size)
            _write(self._pipe, answer)
        # What was interrupted anywhere may hold a lock, and what filled the memory may still lie there.
        os._exit(limits.NO_MEMORY if answer["reason"] == limits.TOO_LARGE else limits.NO_TIME)

    def _bound_memory(self, size: int) -> None:
        soft, hard = (self._used + limits.memory(n) for n in (size, limits.MOST_INPUT))
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def _attempt(self, request: Mapping[str, Any], size: int) -> Answer:
        """The text, or what went wrong, in bounded time."""
        seconds = limits.seconds(size)
        # Python hears the first one, so that the line can be said; the second has no handler and ends us.
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.8 * seconds)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return self._answer(request, size)
        except (Exception, OutOfTime) as error:
            return self._failure(request, error)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)

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
        over = isinstance(error, MemoryError | OutOfTime)
        return {"reason": reason_of(error), "line": line, "over": over}


def _read(pipe: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(pipe, min(size, limits.MIB))
        if not part:
            os._exit(0)  # the parent is gone
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(pipe: int, message: object) -> None:
    data = memoryview(framed(message))
    while data:
        data = data[os.write(pipe, data) :]
