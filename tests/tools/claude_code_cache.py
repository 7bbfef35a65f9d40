"""What the prefix cache saves an agent: a conversation as Claude Code has it, with a long system prompt.

    python -m tests.tools.claude_code_cache [MODEL] [--system TOKENS] [-r TIMES]

The first block of the system prompt differs in each request, as Claude Code's does. Between the two requests
of a conversation there is one for a title, which has another prompt. Of the second request, at least 95 % of
the tokens should come from the cache, and its first token should take at most a tenth of the first request's
time and 100 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from hetrun.config import default_model
from hetrun.system import subprocesses
from hetrun.tools.bench.serving.http_load import Endpoint
from hetrun.tools.bench.serving.servers import Server
from tests.clients.__main__ import free_port

RULE = "Rule {}: read a file before you change it, say what you changed, and keep to the style of the code. "
LIMIT_S, SHARE, PART = 0.1, 0.95, 0.1
SCHEMA = {"type": "object", "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]}
TOOLS = [{"name": "Read", "description": "Reads a file.", "input_schema": SCHEMA}]


@dataclass(frozen=True)
class Asked:
    """One streamed request."""

    tokens: int
    cached: int
    first_s: float  # until its first block


def ask(url: str, system: str, messages: list[dict[str, Any]], *, tools: bool = True) -> Asked:
    """The same system prompt after a header that is new each time."""
    header = f"x-anthropic-billing-header: cc_version=2.1; cch={secrets.token_hex(3)};"
    body = {
        "model": "any",
        "max_tokens": 8,
        "stream": True,
        "system": [{"type": "text", "text": header}, {"type": "text", "text": system}],
        "messages": messages,
        **({"tools": TOOLS} if tools else {}),
    }
    request = urllib.request.Request(
        f"{url}/v1/messages", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    usage: dict[str, int] = {}
    began, first_s = time.perf_counter(), 0.0
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if event["type"].startswith("content_block") and not first_s:
                first_s = time.perf_counter() - began
            usage = event.get("usage", usage)
    cached = usage["cache_read_input_tokens"]
    return Asked(usage["input_tokens"] + cached, cached, first_s)


def conversation(url: str, rules: int) -> tuple[Asked, Asked]:
    """The first and the second request of a new conversation."""
    topic = secrets.token_hex(4)  # so that nothing of an earlier conversation is found
    system = f"You work on project {topic}. " + "".join(RULE.format(i) for i in range(rules))
    said: list[dict[str, Any]] = [{"role": "user", "content": f"What is in the file {topic}.py?"}]
    first = ask(url, system, said)
    ask(url, "Write a title of five words.", [{"role": "user", "content": topic * 4}], tools=False)
    use = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": f"{topic}.py"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "colour = red"}
    said += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return first, ask(url, system, said)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=str(default_model({})))
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt, about")
    parser.add_argument("-r", type=int, default=5, help="conversations")
    arguments = parser.parse_args()
    port = free_port()
    command = subprocesses.python(
        "from hetrun.cli import main; main()", "serve", "-m", arguments.model, "--port", str(port)
    )
    server = Server(command, Endpoint(port=port))
    try:
        url = f"http://127.0.0.1:{port}"
        conversation(url, 2)
        pairs = [conversation(url, arguments.system // 22) for _ in range(arguments.r)]
    finally:
        server.close()
    good = True
    for first, second in pairs:
        share, most_s = second.cached / second.tokens, PART * first.first_s + LIMIT_S
        good = good and share >= SHARE and second.first_s <= most_s
        print(
            f"{first.tokens} tokens, {first.first_s:.2f} s to the first block; then {second.tokens} tokens, "
            f"{share:.1%} cached, {1000 * second.first_s:.0f} ms (at most {1000 * most_s:.0f})"
        )
    print(f"median {1000 * statistics.median(second.first_s for _, second in pairs):.0f} ms", end="; ")
    print(f"load average {os.getloadavg()[0]:.1f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
