"""What editors and other programs ask an Ollama server before anything else, as recorded from their code."""

from __future__ import annotations

import json
import urllib.request

from tests.clients import editors
from tests.clients.checks import KEY, URL, check


def send(asked: editors.Asked) -> str:
    headers = asked.headers | {"Authorization": f"Bearer {KEY}"}
    url = URL.removesuffix("/v1") + asked.request["path"]
    request = urllib.request.Request(url, asked.body, headers, method=asked.request["method"])
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def tried(editor: editors.Editor) -> None:
    assert editors.replay(editor, send) > 0


if __name__ == "__main__":
    found = editors.editors()
    print(json.dumps({"version": f"{len(found)} of them"}), flush=True)
    for editor in found:
        check(editor["name"], lambda editor=editor: tried(editor))  # type: ignore[misc]
