"""What each line of a file asks for.

A text is a prompt. A JSON object is OpenAI's request of a batch (custom_id, method, url, body), or has
`prompt` or `messages` and beside it what a request for a chat may have.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from hetrun.client.schema_words import fault_in_words
from hetrun.system.strict_json import fault_in_json, parsed
from hetrun.system.units import format_bytes
from hetrun.tools.batch.line_reader import MOST_LINE, Line

Json = dict[str, object]
Shape = Literal["own", "openai"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
URLS = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)
# What a line of our own has besides the fields of the request that is made of it.
NAMES = ("id", "custom_id")
OWN = (*NAMES, "prompt", "messages", "system", "metadata")
OPENAI = ("custom_id", "method", "url", "body")
BOM = b"\xef\xbb\xbf"
SEEDS = 1 << 32


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; or, with a `fault`, why its line is none."""

    index: int  # of the request in its file, from 0 on
    line: int
    digest: str  # of the line and of what was said for all
    shape: Shape
    url: str = ""
    body: Json = field(default_factory=dict)
    name: object = None  # that the client has given it
    metadata: object = None  # comes back as it is
    fault: str = ""

    @property
    def text(self) -> bytes:
        """What it begins with, to find requests that begin alike."""
        head = [self.body.get(name) for name in ("tools", "messages", "prompt", "input", "instructions")]
        return json.dumps([self.url, *head], ensure_ascii=False).encode(errors="replace")


@dataclass(frozen=True)
class ForAll:
    """What the command line says of all requests; a line may say otherwise."""

    known: Mapping[str, tuple[str, ...]]  # fields of a request, by its URL
    limits: tuple[str, ...] = ()  # of these the fields that say how long an answer may be,
    forms: tuple[str, ...] = ()  # and what it must look like
    body: Json = field(default_factory=dict)
    own: Json = field(default_factory=dict)  # of lines that are not OpenAI's
    system: str | None = None
    raw: bool = False
    seed: int | None = None  # of the first request: each has the next one
    digest: bytes = b""  # of what answers follow from besides the lines


class Fault(Exception):
    """A line is no request; the text says why."""


class RequestReader:
    """Makes requests of lines. `shape` None: the first line that says something tells what all are."""

    def __init__(self, for_all: ForAll, kind: Literal["text", "json"] | None = None) -> None:
        self._for_all = for_all
        self._kind = kind
        self._shape: Shape | None = None
        self._index = 0

    def read(self, line: Line) -> Ask | None:
        """The request; None: the line is blank."""
        data = line.data.removeprefix(BOM) if line.number == 1 else line.data
        if line.whole and not data.strip():
            return None
        self._kind = self._kind or ("json" if data.lstrip().startswith(b"{") else "text")
        ask = self._asked_in(line, data)
        # What is wrong with a line does not depend on the model, which may not even be loaded.
        own = data if ask.fault else self._for_all.digest + data
        return replace(ask, digest=hashlib.blake2b(own, digest_size=6).hexdigest())

    def _asked_in(self, line: Line, data: bytes) -> Ask:
        ask = Ask(self._index, line.number, "", self._shape or "own")
        self._index += 1
        if not line.whole:
            return replace(ask, fault=f"the line is longer than {format_bytes(MOST_LINE)}")
        try:
            if self._kind == "text":
                return self._own(ask, {"prompt": _decoded(data)})
            given = _object(data)
            # What went wrong before the first good line is told in our own words.
            self._shape = self._shape or ("openai" if "body" in given else "own")
            return self._openai(ask, given) if self._shape == "openai" else self._own(ask, given)
        except Fault as fault:
            return replace(ask, shape=self._shape or "own", fault=str(fault))

    def _own(self, ask: Ask, given: Json) -> Ask:
        ask = replace(ask, name=_name(given), metadata=given.get("metadata"))
        try:
            url, asked = self._asked(given)
            _refuse_unknown(given, (*OWN, *self._for_all.known[url]))
            if given.get("n") not in (None, 1):
                raise Fault("n must be 1: a line has one answer; repeat the line, or use OpenAI's format")
            rest = {name: value for name, value in given.items() if name not in OWN and value is not None}
            if fault := fault_in_words(rest.get("json_schema")):
                raise Fault(f"json_schema: {fault}")
            return replace(ask, url=url, body=self._completed(ask, url, asked | rest))
        except Fault as fault:
            return replace(ask, fault=str(fault))

    def _asked(self, given: Json) -> tuple[str, Json]:
        """Where the request goes, and what it is about."""
        prompt, messages = given.get("prompt"), given.get("messages")
        if prompt is None and messages is None:  # whose name may be the one that is wrong
            _refuse_unknown(
                given, (*OWN, *(name for names in self._for_all.known.values() for name in names))
            )
        if (prompt is None) == (messages is None):
            raise Fault("the line must have either prompt or messages")
        if messages is not None:
            if not isinstance(messages, list):
                raise Fault("messages must be a list of objects with role and content")
            return CHAT, {"messages": self._with_system(given, messages)}
        if isinstance(prompt, list) or self._for_all.raw:
            if given.get("system") is not None:
                raise Fault("system cannot be given with --raw, or with a prompt of tokens")
            return COMPLETIONS, {"prompt": prompt}
        if not isinstance(prompt, str):
            raise Fault(f"prompt must be a text or a list of tokens, not {type(prompt).__name__}")
        return CHAT, {"messages": self._with_system(given, [{"role": "user", "content": prompt}])}

    def _with_system(self, given: Json, messages: list[object]) -> list[object]:
        system = given.get("system", self._for_all.system)
        if system is None:
            return messages
        if not isinstance(system, str):
            raise Fault("system must be a text")
        first = messages[0] if messages else None
        if isinstance(first, dict) and first.get("role") in ("system", "developer"):
            if given.get("system") is None:
                return messages  # what the line says itself counts
            raise Fault("system is given twice: the messages have one already")
        return [{"role": "system", "content": system}, *messages]

    def _openai(self, ask: Ask, given: Json) -> Ask:
        ask = replace(ask, shape="openai", name=_name(given))
        try:
            _refuse_unknown(given, OPENAI)
            if given.get("method", "POST") != "POST":
                raise Fault("method must be POST")
            url, body = given.get("url", CHAT), given.get("body")
            if url not in URLS:
                raise Fault(f"url must be one of {', '.join(URLS)}")
            if not isinstance(body, dict):
                raise Fault("body must be an object")
            return replace(ask, url=str(url), body=self._completed(ask, str(url), body))
        except Fault as fault:
            return replace(ask, fault=str(fault))

    def _completed(self, ask: Ask, url: str, body: Json) -> Json:
        """The request with what it leaves to the command line."""
        if body.get("stream"):
            raise Fault("stream: answers of a batch cannot be streamed")
        if url not in (CHAT, COMPLETIONS):
            return body
        said = {name for name, value in body.items() if value is not None}
        groups = [names for names in (self._for_all.limits, self._for_all.forms) if said.intersection(names)]
        whole = self._for_all.body | (self._for_all.own if ask.shape == "own" else {})
        left = {k: v for k, v in whole.items() if not any(k in names for names in groups)}
        if url == COMPLETIONS and ask.shape == "own":
            # OpenAI's default of 16 tokens is not what a request without a limit means.
            left = left if said.union(left).intersection(self._for_all.limits) else left | {"n_predict": -1}
        if self._for_all.seed is not None:
            left["seed"] = (self._for_all.seed + ask.index) % SEEDS
        return left | {name: value for name, value in body.items() if value is not None}


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Fault(f"it is not UTF-8 text: byte {error.start} is {data[error.start]:#x}") from None


def _object(data: bytes) -> Json:
    try:
        _decoded(data)  # says where it is no text
        found = parsed(data)
    except UnicodeError:
        raise Fault("a text in it holds half of a character (a lone surrogate)") from None
    except RecursionError:
        raise Fault("it is nested too deeply") from None
    except ValueError as error:
        raise Fault(f"it is not JSON: {fault_in_json(error)}") from None
    if not isinstance(found, dict):
        raise Fault(f"it is not a JSON object, but {type(found).__name__}")
    return found


def _name(given: Json) -> object:
    return next((given[name] for name in reversed(NAMES) if given.get(name) is not None), None)


def _refuse_unknown(given: Json, known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "what is your own goes under metadata"
            raise Fault(f"unknown field {name[:100]!r}: {hint}")
