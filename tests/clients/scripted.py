"""A server whose model follows a script: it reads a file, edits it, and says that it is done.

    python -m tests.clients.scripted PORT

For agents: what a small model writes is not certain, but what they make of an answer can be checked. The
prompt names the file: "change the colour in FILE".
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator

import uvicorn

from hetrun.client.engine_client import LocalClient
from hetrun.client.events import Event, GenerateRequest
from hetrun.server.app import create_app
from tests.support.fakes import FakeEngine

FILE = re.compile(r"change the colour in (\S+)")
OLD, NEW = "colour = red", "colour = blue"
DONE = "The colour is blue now."
TITLE = "A change of colour"  # for requests beside the conversation, which have no tools


class Editor(FakeEngine):
    """Follows the script."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: GenerateRequest | None = None

    def submit(self, request: GenerateRequest, on_event: Callable[[Event], None]) -> int:
        self._asked = request
        return super().submit(request, on_event)

    def reply(self, prompt: str) -> Iterator[str]:
        assert self._asked is not None
        yield from re.split(r"(?<= )", answer(self._asked))


def answer(request: GenerateRequest) -> str:
    """The next step, by how many results of tools are there."""
    messages = request.messages or ()
    found = FILE.search("\n".join(str(m.get("content")) for m in messages if m["role"] == "user"))
    names = {tool["function"]["name"] for tool in request.tools}  # type: ignore[index]
    if not found or not {"Read", "Edit"} <= names:
        return TITLE
    results = sum(m["role"] == "tool" for m in messages)
    if results == 0:
        return f"I read it first.\n{call('Read', file_path=found[1])}"
    if results == 1:
        return call("Edit", file_path=found[1], old_string=OLD, new_string=NEW)
    return DONE


def call(name: str, **arguments: str) -> str:
    """A call in the form that many models write."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


if __name__ == "__main__":
    uvicorn.run(create_app(LocalClient(Editor())), port=int(sys.argv[1]), log_level="warning")
