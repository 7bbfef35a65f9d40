"""Lines of answers, in the shape of the lines that asked; and what a line of answers says of its request."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field

from hetrun.tools.batch.request_lines import Ask, Json

OK = 200
# What OpenAI's objects call themselves and each other: drawn at random, so no two runs have the same.
IDS = ("id", "call_id", "item_id")
TIMES = ("created", "created_at", "completed_at")
# Of what a run did before depends how long it took, and what was computed already.
OF_THIS_RUN = ("timings", "prompt_tokens_details", "input_tokens_details")
_HEADS = b'{"index": ', b'{"id": "batch_req_'
_DIGEST = re.compile(r"[0-9a-f]{12}")
_OF_OPENAI = re.compile(rf"batch_req_(\d{{1,18}})_({_DIGEST.pattern})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reply:
    """What was answered to a request."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class ResultLine:
    """A line of answers, ready to be written."""

    line: bytes
    failed: bool = False
    answer_tokens: int = 0
    prompt_tokens: int = 0
    said: str = field(default="", compare=False)  # what went wrong


def refused(ask: Ask, why: str) -> ResultLine:
    """Of a line that is no request, or of one that could not be answered."""
    said = f"line {ask.line}: {why}"
    error: Json = {"message": said, "type": "invalid_request_error", "param": None, "code": "invalid_line"}
    if ask.shape == "own":
        return ResultLine(_own(ask, {"error": error}), failed=True, said=said)
    error = {"code": "invalid_line", "message": said}
    return ResultLine(_openai(ask, {"response": None, "error": error}), failed=True, said=said)


def result(ask: Ask, reply: Reply, same: bool = False) -> ResultLine:
    """Of an answer; with `same` nothing is in it that differs from run to run."""
    try:
        body = json.loads(reply.body)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return refused(ask, f"the answer (status {reply.status}) is no JSON object")
    failed = reply.status != OK
    if same:
        body = _repeatable(body, ask.digest + str(ask.index))
    if ask.shape == "openai":
        number = f"req_{ask.index}_{ask.digest}"
        response: Json = {"status_code": reply.status, "request_id": number, "body": body}
        line = _openai(ask, {"response": response, "error": None})
    else:
        line = _own(ask, _failure(body) if failed else _answer(ask, body))
    usage = _dict(body.get("usage"))
    return ResultLine(
        line,
        failed,
        _int(usage.get("completion_tokens", usage.get("output_tokens"))),
        _int(usage.get("prompt_tokens", usage.get("input_tokens"))),
        f"line {ask.line}: {_dict(body.get('error')).get('message')}" if failed else "",
    )


def request_of(line: bytes) -> tuple[int, str] | None:
    """The number and the digest of the request that a line answers; None: it is no line of ours."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match found:
        case {"index": int() as index, "request": str() as digest} if index >= 0 and _DIGEST.fullmatch(
            digest
        ):
            return index, digest
        case {"id": str() as name, "custom_id": _, "response": _} if of := _OF_OPENAI.fullmatch(name):
            return int(of[1]), of[2]
    return None


def is_beginning(part: bytes) -> bool:
    """Whether a part of a line may be the beginning of a result, as it may be of nothing else; of none of its
    bytes, or of zeros, it may."""
    part = part.strip(b"\0")
    return any(part[: len(head)] == head[: len(part)] for head in _HEADS)


def _own(ask: Ask, said: Json) -> bytes:
    head: Json = {"index": ask.index}
    head |= {} if ask.name is None else {"id": ask.name}
    tail: Json = {} if ask.metadata is None else {"metadata": ask.metadata}
    return _line(head | said | tail | {"request": ask.digest})


def _openai(ask: Ask, said: Json) -> bytes:
    head: Json = {"id": f"batch_req_{ask.index}_{ask.digest}", "custom_id": ask.name}
    return _line(head | said)


def _line(found: Json) -> bytes:
    """JSON without a line end in it; a text may hold half a character, which only escaped can be written."""
    try:
        return json.dumps(found, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(found).encode() + b"\n"


def _answer(ask: Ask, body: Json) -> Json:
    choices = body.get("choices")
    choice = _dict(choices[0]) if isinstance(choices, list) and choices else {}
    message, usage = _dict(choice.get("message")), _dict(body.get("usage"))
    said: Json = {
        "text": choice.get("text", message.get("content")) or "",
        "finish_reason": choice.get("finish_reason"),
        "usage": {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")},
    }
    seed = ask.body.get("seed")
    more = {
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": message.get("tool_calls"),
        "logprobs": choice.get("logprobs"),
        "seed": seed if ask.body.get("temperature") != 0 else None,
    }
    return said | {name: value for name, value in more.items() if value is not None}


def _failure(body: Json) -> Json:
    return {"error": body.get("error", body)}


def _repeatable(body: Json, salt: str) -> Json:
    """An answer without times, and with names that follow from the request."""
    names: dict[str, str] = {}

    def renamed(name: str) -> str:
        if name not in names:
            number = hashlib.blake2b(f"{salt}{len(names)}".encode(), digest_size=12).hexdigest()
            head, dash, _ = name.rpartition("-" if "-" in name else "_")
            names[name] = f"{head}{dash}{number}"
        return names[name]

    def walked(value: object) -> object:
        if isinstance(value, list):
            return [walked(part) for part in value]
        if not isinstance(value, dict):
            return value
        return {name: of(name, part) for name, part in value.items() if name not in OF_THIS_RUN}

    def of(name: str, part: object) -> object:
        if name in TIMES:
            return part and 0
        if name in IDS and isinstance(part, str):
            return renamed(part)
        return part if name == "metadata" else walked(part)  # which is not ours

    return _dict(walked(body))


def _dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _int(value: object) -> int:
    return value if type(value) is int else 0
