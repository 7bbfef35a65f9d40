"""A server with hetrun's own HTTP layer and a scripted model: it reads a file, edits it, and says so.

    python -m tests.clients.scripted_agent FILE     prints its address, and serves until its input ends

The script's calls are text in the format of Hermes, as a model writes them; hetrun finds the calls in it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetrun.client.engine_client import LocalClient
from hetrun.client.events import Message
from hetrun.server import listen
from hetrun.server.app import create_app
from tests.support.fakes import FakeEngine

BEFORE, AFTER = "three little pigs", "three little wolves"
DONE = "The file is changed."
CHARACTERS = 12  # of a token


class Agent(FakeEngine):
    """Reads a file with the client's tool for it, then edits it; without these tools it writes a title."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = str(file)

    def reply(self, prompt: str) -> Iterator[str]:
        text = self._said()
        for at in range(0, len(text), CHARACTERS):
            yield text[at : at + CHARACTERS]

    def _said(self) -> str:
        request = self.requests[-1]
        tools = {str(_function(tool)["name"]) for tool in request.tools}
        if not tools >= {"Read", "Edit"}:
            return '{"title": "A file is changed"}'
        results = [m for m in request.messages or () if m["role"] == "tool"]
        match len(results):
            case 0:
                return "I read the file first.\n" + _call("Read", file_path=self._file)
            case 1:
                return _call("Edit", file_path=self._file, old_string=BEFORE, new_string=AFTER)
        return DONE


def _function(tool: Message) -> Any:  # noqa: ANN401 - JSON
    return tool["function"]


def _call(name: str, **arguments: str) -> str:
    called = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{called}\n</tool_call>"


async def serve(file: Path) -> None:
    """Serve until the input ends."""
    agent = Agent(file)
    with listen.listening(listen.ListenAddress(port=0)) as bound:
        async with listen.served(create_app(LocalClient(agent)), bound):
            print(listen.url(bound), flush=True)
            await asyncio.to_thread(sys.stdin.read)
    agent.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
