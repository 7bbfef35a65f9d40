"""Replays the requests of `ollama_editors.json`, and checks what the programs read of the answers.

It needs nothing but Python, so that it runs in a client's environment and in the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("ollama_editors.json")
# Continue takes the value of each line of a model's parameters from these groups.
PARAMETER = re.compile(r'^(\S+)\s+((?:".*")|\S+)$')


@dataclass(frozen=True)
class Asked:
    """One request of an editor."""

    editor: Mapping[str, Any]
    request: Mapping[str, Any]
    model: str | None

    @property
    def headers(self) -> dict[str, str]:
        return {**self.editor.get("headers", {}), **self.request.get("headers", {})}

    @property
    def body(self) -> bytes | None:
        if "body" not in self.request:
            return None
        return json.dumps(self.request["body"]).replace("{model}", self.model or "").encode()


Editor = Mapping[str, Any]
Send = Callable[[Asked], str]  # the text of an answer with the status 200


def editors() -> list[Mapping[str, Any]]:
    """All of them."""
    found: list[Mapping[str, Any]] = json.loads(RECORDED.read_text())["editors"]
    return found


def replay(editor: Mapping[str, Any], send: Send) -> int:
    """Send an editor's requests, those for a model for each that was listed; how many fields were read."""
    models: list[str] = []
    read = 0
    for request in editor["requests"]:
        for_models = "{model}" in json.dumps(request.get("body"))
        if for_models and not models:
            raise AssertionError(f"{editor['name']} finds no model")
        for model in models if for_models else [None]:
            asked = Asked(editor, request, model)
            for answer in _objects(send(asked)):
                if request["path"] == "/api/tags":
                    models = [entry[editor["names"]] for entry in answer["models"]]
                for field in request["reads"]:
                    read += _check(asked, answer, field)
    for name in models:
        # A program that adds a tag to a name without one looks for that in the list.
        assert ":" in name or not editor.get("tag"), name
    return read


def _objects(text: str) -> list[Any]:
    """One object, or one in each line."""
    return [json.loads(line) for line in text.splitlines() if line]


def _check(asked: Asked, answer: Any, field: Mapping[str, Any]) -> int:  # noqa: ANN401 - JSON
    found = list(_at(answer, field["at"], answer))
    where = f"{asked.editor['name']}: {asked.request['path']} {'.'.join(field['at'])}"
    assert found, f"{where} is missing"
    for value in found:
        assert _fits(value, field["type"], asked.editor), f"{where} is {value!r}"
    return len(found)


def _at(value: Any, path: list[str], whole: Any) -> Iterator[Any]:  # noqa: ANN401 - JSON
    if not path:
        yield value
        return
    key, *rest = path
    if key == "*":
        for item in value:
            yield from _at(item, rest, whole)
        return
    if "{architecture}" in key:
        key = key.replace("{architecture}", whole["model_info"]["general.architecture"])
    if key in value:
        yield from _at(value[key], rest, whole)


def _fits(value: Any, kind: str, editor: Mapping[str, Any]) -> bool:  # noqa: ANN401 - JSON
    match kind:
        case "string":
            return isinstance(value, str) and bool(value)
        case "text":
            return isinstance(value, str)
        case "strings":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case "count":
            return type(value) is int and value > 0
        case "number":
            return isinstance(value, int | float)
        case "flag":
            return isinstance(value, bool)
        case "time":
            return datetime.fromisoformat(value).tzinfo is not None
        case "version":
            return _numbers(value) >= _numbers(editor.get("least_version", "0.0.0"))
        case "parameters":
            return all(PARAMETER.match(line) for line in value.split("\n"))
    raise AssertionError(kind)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
