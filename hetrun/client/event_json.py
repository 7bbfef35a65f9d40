"""Requests and events as JSON, with nothing lost, for the private socket of a server of the same version.

OpenAI's API has no token ids, separates reasoning and has other defaults; this format carries the answer
that an engine in this process would give.
"""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from hetrun import errors
from hetrun.client.events import Event, GenerateRequest, Timings, TokenLogprob, Usage
from hetrun.client.pictures import in_base64
from hetrun.client.remote.openai_format import read
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import EngineStopped, HetrunError, Overloaded, UserError

Json = Mapping[str, Any]

ASKED = ("messages", "text", "tokens", "template_options", "echo")  # of a request, beside its parameters
KINDS = ("prompt", "token", "done", "error")
BYTES = "latin-1"  # a character for each byte


def request_as_json(request: GenerateRequest) -> dict[str, object]:
    """The JSON that `request_of` reads."""
    params = request.params
    values = {f.name: getattr(params, f.name) for f in fields(params) if f.name != "logit_bias"}
    values["logit_bias"] = [
        [token, repr(bias)] for token, bias in params.logit_bias.items()
    ]  # some are infinite
    said = {"params": values, **{name: getattr(request, name) for name in ASKED}}
    return said | ({"pictures": [in_base64(file) for file in request.pictures]} if request.pictures else {})


def request_of(said: Json) -> GenerateRequest:
    """Parse a request; raises OptionError or ValueError if something is wrong with it."""
    try:
        values = dict(said["params"])
        values["logit_bias"] = {int(token): float(bias) for token, bias in values.get("logit_bias", ())}
        given = {name: said[name] for name in ASKED if said.get(name) is not None}
        for name in given.keys() & {"messages", "tokens"}:
            given[name] = tuple(given[name])
        given["pictures"] = tuple(b64decode(file, validate=True) for file in said.get("pictures", ()))
        return GenerateRequest(SamplingParams.from_mapping(values), **given)
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is not a request: {error}") from None


def event_as_json(event: Event) -> dict[str, object]:
    """The JSON that `event_of` reads, without fields that have their default."""
    said: dict[str, object] = {"kind": event.kind}
    for name in ("text", "token", "finish_reason", "opened", "stopped"):
        if (value := getattr(event, name)) not in ("", None):
            said[name] = value
    if event.logprob is not None:
        said["logprob"] = _score_as_json(event.logprob)
    if event.prompt_logprobs:
        said["prompt_logprobs"] = [_score_as_json(score) for score in event.prompt_logprobs]
    if event.echo:
        said["echo"] = [piece.decode(BYTES) for piece in event.echo]
    if event.kind == "done":
        said |= {"usage": asdict(event.usage), "timings": asdict(event.timings)}
    if event.kind == "error":
        said["error"] = {"kind": type(event.error).__name__, "message": str(event.error)}
    return said


def event_of(said: Json) -> Event:
    """Parse an event; raises ValueError if it is invalid."""
    if said.get("kind") not in KINDS:
        raise ValueError(f"{str(said.get('kind'))[:40]!r} is not a kind of event")
    try:
        return Event(
            said["kind"],
            str(said.get("text", "")),
            said.get("token"),
            _score(said["logprob"]) if "logprob" in said else None,
            said.get("finish_reason"),
            read(Usage, said.get("usage", {})),
            read(Timings, said.get("timings", {})),
            _error(said["error"]) if "error" in said else None,
            tuple(_score(score) for score in said.get("prompt_logprobs", ())),
            tuple(piece.encode(BYTES) for piece in said.get("echo", ())),
            opened=str(said.get("opened", "")),
            stopped=str(said.get("stopped", "")),
        )
    except (KeyError, TypeError, AttributeError, UnicodeError) as error:
        raise ValueError(f"this is not an event: {error}") from None


def _score_as_json(score: TokenLogprob) -> list[object]:
    piece = None if score.piece is None else score.piece.decode(BYTES)
    top = [[token, _finite(logprob)] for token, logprob in score.top]
    return [score.token, _finite(score.logprob), top, piece, [p.decode(BYTES) for p in score.top_pieces]]


def _finite(number: float) -> float | str:
    """JSON has no infinity, so it becomes a string; `float` reads both."""
    return number if math.isfinite(number) else repr(number)


def _score(said: Any) -> TokenLogprob:  # noqa: ANN401 - JSON
    token, logprob, top, piece, pieces = said
    return TokenLogprob(
        int(token),
        float(logprob),
        tuple((int(t), float(p)) for t, p in top),
        None if piece is None else piece.encode(BYTES),
        tuple(p.encode(BYTES) for p in pieces),
    )


def _error(said: Json) -> HetrunError:
    """An error of the same class, if it is one of ours that takes only a message."""
    kind = getattr(errors, str(said["kind"]), None)
    if isinstance(kind, type) and issubclass(kind, HetrunError):
        if kind is Overloaded or "__init__" not in kind.__dict__:
            return kind(str(said["message"]))
        if issubclass(kind, UserError):  # such as one that wants a file's name as well
            return UserError(str(said["message"]))
    return EngineStopped(str(said["message"]))
