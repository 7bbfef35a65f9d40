"""Errors as OpenAI's clients expect them: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetrun.errors import ContextFull, DeadlineExceeded, EngineStopped, FieldError, Overloaded, UserError

log = logging.getLogger(__name__)

# OpenAI's clients ask again twice after 408, 409, 429 and every 5xx: for what would fail again.
FINAL = {"x-should-retry": "false"}
MOST_LISTED, MOST_NAME = 10, 200  # models in one sentence, and characters of a name that a client made up


class ApiError(Exception):
    """An answer other than 200. `param` names the field at fault, `code` is for programs."""

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

    def body(self) -> dict[str, object]:
        return {"error": self.error}

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, self.headers)


def api_error(error: Exception | None, context: int | None = None, prompt: str = "messages") -> ApiError:
    """The answer to a request that ended with this error; `prompt` is the field that the prompt came in."""
    match error:
        case ApiError():
            return error
        case ContextFull():
            # Client libraries recognise an overflow by some of these words, each by others.
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
            # Nobody wants this answer any more, so nobody shall ask for it once more.
            kind = "server_error"
            return ApiError(str(error), code="deadline_exceeded", status=504, kind=kind, headers=FINAL)
        case EngineStopped():
            kind = "server_error"
            return ApiError(str(error), code="engine_stopped", status=503, kind=kind, headers=FINAL)
    log.error("a request failed", exc_info=error)
    return ApiError(str(error), code="internal_error", status=500, kind="server_error", headers=FINAL)


@contextmanager
def api_errors() -> Iterator[None]:
    """Raise errors of fields as answers."""
    try:
        yield
    except FieldError as error:
        raise api_error(error) from None


def overloaded(
    message: str, retry_after_s: float | None, headers: Mapping[str, str] | None = None
) -> ApiError:
    """More than can be done now: 429, and when to come again. None: never with the same request.

    Not 503, which makes a balancer of load take a server for broken that is only busy.
    """
    said = dict(headers or {})
    if retry_after_s is None:
        said |= FINAL
    else:
        said["Retry-After"] = str(math.ceil(retry_after_s))
        said["retry-after-ms"] = str(math.ceil(1000 * retry_after_s))  # what OpenAI's clients look at first
    return ApiError(message, code="overloaded", status=429, kind="rate_limit_error", headers=said)


def wrong_type(param: str, wanted: str, value: object) -> ApiError:
    return ApiError(f"{param} must be {wanted}, not {type(value).__name__}", param, "invalid_type")


def not_found(model: str, known: Sequence[str]) -> ApiError:
    """404, with the models that there are."""
    first = ", ".join(known[:MOST_LISTED])
    more = f" and {len(known) - MOST_LISTED} more, see /v1/models" if len(known) > MOST_LISTED else ""
    message = f"The model '{model[:MOST_NAME]}' does not exist here; this server has {first}{more}"
    return ApiError(message, "model", "model_not_found", status=404)


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    said = {404: f"There is nothing at {where}", 405: f"{where} is not allowed"}.get(error.status_code)
    answer = ApiError(said or error.detail, status=error.status_code, headers=error.headers)
    return answer.response()


async def on_gone(request: Request, error: Exception) -> Response:
    """The client hung up: nobody reads this; the number is nginx's, for logs."""
    return Response(status_code=499)


async def on_failure(request: Request, error: Exception) -> Response:
    """A bug of ours; Starlette raises it again after the answer, so that it is logged."""
    return api_error(error).response()
