"""Errors as OpenAI's clients expect them: a status, and {"error": {message, type, param, code}}.

Paths of another API have errors in that API's shape, whichever part of the server refuses the request.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetrun.errors import (
    ContextFull,
    DeadlineExceeded,
    EngineStopped,
    FieldError,
    Overloaded,
    SystemFault,
    UserError,
)
from hetrun.server.anthropic_format import errors as anthropic

log = logging.getLogger(__name__)

# OpenAI's clients retry 408, 409, 429 and every 5xx twice, unless this header says that it is pointless.
FINAL = {"x-should-retry": "false"}
OLLAMA = "/api/"  # its paths
MOST_LISTED, MOST_NAME = 10, 200  # models listed in a message, and characters quoted of an unknown name

Names = Sequence[tuple[re.Pattern[str], str]]  # of fields in one API, and in another


class ApiError(Exception):
    """An answer other than 200. `param` names the wrong field, `code` is for programs."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.error = {"message": message, "type": kind, "param": param, "code": code}

    def body(self, path: str = "") -> dict[str, object]:
        """The error in the shape that clients of this path expect."""
        if path.startswith(OLLAMA):
            return {"error": self.error["message"]}
        if anthropic.is_here(path):
            return anthropic.body_of(self.status_at(path), self.error)
        return {"error": self.error}

    def status_at(self, path: str) -> int:
        """The status that clients of this path expect."""
        if anthropic.is_here(path):
            return anthropic.status_of(self.status, may_retry="Retry-After" in (self.headers or {}))
        return self.status

    def renamed(self, names: Names) -> ApiError:
        """The same error with other names of fields, in its text, too."""
        said, param = str(self), str(self.error["param"] or "")
        for name, other in names:
            said, param = name.sub(other, said), name.sub(other, param)
        code = self.error["code"]
        return ApiError(
            message=said,
            param=param or None,
            code=None if code is None else str(code),
            status=self.status,
            kind=str(self.error["type"]),
            headers=self.headers,
        )

    def response(self, path: str = "") -> Response:
        """The answer to a request for this path."""
        return JSONResponse(self.body(path), self.status_at(path), self.headers)


def api_error(error: Exception | None, context: int | None = None, prompt: str = "messages") -> ApiError:
    """The answer to a request that ended with this error; `prompt` is the field that the prompt came in."""
    match error:
        case ApiError():
            return error
        case ContextFull():
            # Each client library recognises an overflow by some of these words.
            limit = f"This model's maximum context length is {context} tokens. " if context else ""
            said = f"{limit}The prompt is too long: {error}"
            return ApiError(said, prompt, "context_length_exceeded")
        case FieldError():
            return ApiError(str(error), error.field, error.code)
        case UserError():
            return ApiError(str(error))
        case Overloaded():
            return overloaded(str(error), error.retry_after_s)
        case DeadlineExceeded():
            # The answer is no longer wanted, so clients should not retry.
            kind = "server_error"
            return ApiError(str(error), code="deadline_exceeded", status=504, kind=kind, headers=FINAL)
        case EngineStopped():
            kind = "server_error"
            return ApiError(str(error), code="engine_stopped", status=503, kind=kind, headers=FINAL)
        case SystemFault():  # without memory, for one: another time it may work
            return ApiError(str(error), code="system_fault", status=503, kind="server_error")
    log.error("a request failed", exc_info=error)
    return ApiError(str(error), code="internal_error", status=500, kind="server_error", headers=FINAL)


@contextmanager
def renamed(names: Names) -> Iterator[None]:
    """Give fields in errors of the chat their names in another API."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from None


@contextmanager
def api_errors() -> Iterator[None]:
    """Turn errors in fields into API errors."""
    try:
        yield
    except FieldError as error:
        raise api_error(error) from None


def overloaded(
    message: str, retry_after_s: float | None, headers: Mapping[str, str] | None = None
) -> ApiError:
    """Too many requests: 429, and when to retry. None: never with the same request.

    Not 503, because a load balancer would take a busy server for a broken one.
    """
    said = dict(headers or {})
    if retry_after_s is None:
        said |= FINAL
    else:
        said["Retry-After"] = str(math.ceil(retry_after_s))
        said["retry-after-ms"] = str(math.ceil(1000 * retry_after_s))  # OpenAI's clients read this one first
    return ApiError(message, code="overloaded", status=429, kind="rate_limit_error", headers=said)


def wrong_type(param: str, wanted: str, value: object) -> ApiError:
    return ApiError(f"{param} must be {wanted}, not {type(value).__name__}", param, "invalid_type")


def not_found(model: str, known: Sequence[str]) -> ApiError:
    """404, with the models that exist."""
    first = ", ".join(known[:MOST_LISTED])
    more = f" and {len(known) - MOST_LISTED} more, see /v1/models" if len(known) > MOST_LISTED else ""
    message = f"The model '{model[:MOST_NAME]}' does not exist here; this server has {first}{more}"
    return ApiError(message, "model", "model_not_found", status=404)


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    said = {404: f"There is nothing at {where}", 405: f"{where} is not allowed"}.get(error.status_code)
    answer = ApiError(said or error.detail, status=error.status_code, headers=error.headers)
    return answer.response(request.url.path)


async def on_gone(request: Request, error: Exception) -> Response:
    """The client disconnected, so this answer is for the log only; the status is nginx's."""
    return Response(status_code=499)


async def on_failure(request: Request, error: Exception) -> Response:
    """A bug; Starlette raises it again after the answer, so that it is logged."""
    return api_error(error).response(request.url.path)
