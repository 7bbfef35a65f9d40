"""The second request of a coding agent: how much of its prompt is cached, and how soon its answer begins.

    python -m tests.tools.second_turn              with the demonstration model
    python -m tests.tools.second_turn -m MODEL

Two requests to /v1/messages as Claude Code sends them: a system prompt of some 2,000 tokens after a billing
line that changes, tools, and a conversation that goes on with a result. A request for a title comes between
them. It fails if less than 95 % of the second prompt is cached, or if its first token takes longer than 10 %
of the first request's plus 100 ms.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from hetrun.system import subprocesses
from hetrun.tools.bench.serving.http_load import ServerEndpoint
from hetrun.tools.bench.serving.servers import ServerProcess
from tests.clients.__main__ import free_port

LEAST_CACHED, MOST_SHARE, MOST_MORE_S = 0.95, 0.10, 0.100
SYSTEM_TOKENS = 2000
RULE = "When you change a file, read it first, keep its style, and say in a sentence what you did. "
PATH = {"type": "object", "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]}
TOOLS = [{"name": name, "description": f"{name} a file.", "input_schema": PATH} for name in ("Read", "Write")]
WRITTEN = 32  # tokens of each answer


@dataclass(frozen=True)
class Turn:
    """What came of a request."""

    first_s: float  # until the first token
    prompt: int
    cached: int
    text: str


class Agent:
    """Sends requests to a server."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._number = 0

    def system(self) -> str:
        """A system prompt of the wanted length."""
        per = self.count(RULE * 11) - self.count(RULE * 10)
        return RULE * (SYSTEM_TOKENS // per)

    def count(self, text: str) -> int:
        """The tokens of a text."""
        body = {"model": "any", "messages": [{"role": "user", "content": text}]}
        with self._post("/v1/messages/count_tokens", body) as answer:
            return int(json.load(answer)["input_tokens"])

    def ask(self, system: str, messages: list[Any], **more: object) -> Turn:
        """A streamed answer."""
        self._number += 1
        line = f"x-anthropic-billing-header: cc_version=2.1.197; cch={self._number:05};"
        blocks = [{"type": "text", "text": text} for text in (line, system)]
        body = {"model": "any", "max_tokens": WRITTEN, "stream": True, "temperature": 0, "system": blocks}
        begin, first, texts, used = time.perf_counter(), 0.0, list[str](), dict[str, int]()
        with self._post("/v1/messages?beta=true", body | {"messages": messages} | more) as answer:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if event["type"] == "content_block_delta":
                    first = first or time.perf_counter() - begin
                    texts.append(event["delta"].get("text", ""))
                elif event["type"] == "message_delta":
                    used = event["usage"]
        cached = used["cache_read_input_tokens"]
        return Turn(first, used["input_tokens"] + cached, cached, "".join(texts))

    def _post(self, path: str, body: object) -> Any:  # noqa: ANN401 - an answer of urllib
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=600)


def measured(url: str) -> tuple[Turn, Turn]:
    """The first request and the second."""
    agent = Agent(url)
    agent.ask("Say hello.", [{"role": "user", "content": "hello"}])  # whatever is done once is done now
    system = agent.system()
    asked: list[Any] = [{"role": "user", "content": "Change the pigs in story.txt to wolves."}]
    first = agent.ask(system, asked, tools=TOOLS)
    agent.ask("Write a title of at most five words.", [{"role": "user", "content": "pigs to wolves"}])
    back = {"role": "assistant", "content": first.text or "I do."}
    second = agent.ask(system, [*asked, back, {"role": "user", "content": "Go on."}], tools=TOOLS)
    return first, second


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", dest="model", help="the model; else the demonstration model")
    model = parser.parse_args().model
    port = free_port()
    options = ["--port", str(port), "--ctx", "4096", *(["-m", model] if model else [])]
    command = subprocesses.python("from hetrun.cli import main; main()", "serve", *options)
    server = ServerProcess(command, ServerEndpoint(port=port))
    try:
        first, second = measured(f"http://127.0.0.1:{port}")
    finally:
        server.close()
    most_s = MOST_SHARE * first.first_s + MOST_MORE_S
    share = second.cached / second.prompt
    for name, turn in (("first", first), ("second", second)):
        print(f"{name:7} {turn.prompt} tokens, {turn.cached} cached, first token after {turn.first_s:.3f} s")
    print(f"{share:.1%} cached (at least {LEAST_CACHED:.0%}); first token within {most_s:.3f} s wanted")
    return 0 if share >= LEAST_CACHED and second.first_s <= most_s else 1


if __name__ == "__main__":
    sys.exit(main())
