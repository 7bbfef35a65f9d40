"""What a client's script says of what it tried: a line of JSON for each.

This runs in the environments of the clients, which have none of hetrun's packages.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

URL = os.environ.get("CHECK_URL", "")  # with /v1
KEY = os.environ.get("CHECK_KEY", "")
UDS = os.environ.get("CHECK_UDS", "")
MODEL = os.environ.get("CHECK_MODEL", "")
SEEING_URL = os.environ.get("CHECK_SEEING_URL", "")  # of a model that reads pictures
SEEN = json.loads(os.environ.get("CHECK_SEEN", "{}"))  # a picture, and what it answers about it
MESSAGES = [{"role": "user", "content": "Say hello."}]
TOO_LONG = [{"role": "user", "content": "hello " * 5000}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "number": {"enum": [1, 2]}},
    "required": ["city", "number"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look a city up.", "parameters": SCHEMA},
}
# So much cannot be read until then, and the server can predict that: whoever is alone is tried, though.
HURRY = {"deadline_s": 0.2}
HURRIED = [{"role": "user", "content": "hurry " * 1800}]


def package(name: str) -> None:
    """Say which version of a package this is about."""
    print(json.dumps({"version": version(name)}), flush=True)


def check(what: str, does: Callable[[], None]) -> None:
    """Do it, and say whether it went well, or why not."""
    why = ""
    try:
        does()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    print(json.dumps({"what": what, "why": why}), flush=True)


def expect(condition: bool, said: object) -> None:
    """Fail with what was said instead."""
    if not condition:
        raise AssertionError(repr(said)[:500])


def good_city(text: str | None) -> None:
    """It follows the schema."""
    found = json.loads(text or "")
    expect(found["city"] in ("Paris", "Rome") and found["number"] in (1, 2), text)


def sees(text: str | None, tokens: int | None = None) -> None:
    """It is the answer about the picture, whose tokens were in the prompt."""
    expect(SEEN["tokens"] > SEEN["alone"], SEEN)
    expect((text or "").strip() == SEEN["text"].strip(), (text, SEEN["text"]))
    expect(tokens is None or tokens == SEEN["tokens"], (tokens, SEEN["tokens"]))


@contextmanager
def busy() -> Iterator[None]:
    """The server writes a long answer to somebody else meanwhile."""
    asked = {"messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/chat/completions", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        answer.readline()
        answer.readline()  # its second event, which is a text
        yield


def refuses_hurry(kind: type[Exception], does: Callable[[], object]) -> None:
    """What cannot be done in time is refused at once, with this class."""
    with busy():
        raises(kind, does)


def raises(kind: type[Exception], does: Callable[[], object], code: str | None = None) -> None:
    """Fail unless it ends with this class, and with this code where one is given."""
    try:
        does()
    except kind as error:
        expect(code is None or getattr(error, "code", None) == code, error)
        return
    raise AssertionError(f"no {kind.__name__}")
