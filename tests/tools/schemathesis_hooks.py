"""Hooks of schemathesis_run: bodies with fewer fields, and how often each endpoint answered what.

Schemathesis fills in most fields of a body at once, and one or the other of them is nearly always refused:
a grammar that is none, two forms for one answer, a token that the model lacks. Most bodies are thinned out
here, so that answers and streams are looked at too, and not only refusals.
"""

from __future__ import annotations

import atexit
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import schemathesis

FULL = 0.3  # of the bodies stay as they are
STREAMED = 0.3  # of the others ask for a stream, where there is one
MOST_FIELDS = 4  # of those that are not required

answers: Counter[tuple[str, str]] = Counter()


class Operation(Protocol):
    """What is used here of an endpoint, as Schemathesis knows it."""

    label: str
    schema: Any
    definition: Any


class Of(Protocol):
    """A case, or what a hook is told: of an endpoint."""

    operation: Operation


class Response(Protocol):
    """What is used of an answer."""

    status_code: int
    headers: Mapping[str, object]


def map_body(context: Of, body: object) -> object:
    """A body with what it must have, and a few other fields; the same one for the same body."""
    if not isinstance(body, dict):
        return body
    rng = random.Random(json.dumps(body, sort_keys=True, default=repr))
    if rng.random() < FULL:
        return body
    schema = schema_of(context.operation)
    needed = {name for part in (schema, *schema.get("anyOf", ())) for name in part.get("required", ())}
    others = [name for name in body if name not in needed]
    kept = rng.sample(others, min(len(others), rng.randint(0, MOST_FIELDS)))
    thin = {name: value for name, value in body.items() if name in needed or name in kept}
    if "stream" in schema.get("properties", ()) and rng.random() < STREAMED:
        thin["stream"] = True
    return thin


def after_call(context: object, case: Of, response: Response) -> None:
    """Count it."""
    media = str(response.headers.get("content-type", ""))
    streamed = "text/event-stream" in media or "x-ndjson" in media
    answers[case.operation.label, f"{response.status_code}{' streamed' if streamed else ''}"] += 1


def schema_of(operation: Operation) -> dict[str, Any]:
    """What the document says of its body."""
    raw = operation.schema.raw_schema
    schema: dict[str, Any] = operation.definition.raw["requestBody"]["content"]["application/json"]["schema"]
    while "$ref" in schema:
        schema = raw["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def told() -> None:
    """By endpoint: statuses and how many."""
    for label in sorted({label for label, _ in answers}):
        mine = sorted((status, n) for (of, status), n in answers.items() if of == label)
        print(f"{label}: {', '.join(f'{n} x {status}' for status, n in mine)}", file=sys.stderr)


schemathesis.hook(map_body)
schemathesis.hook(after_call)
atexit.register(told)
