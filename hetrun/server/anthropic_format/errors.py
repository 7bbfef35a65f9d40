"""Errors in the shape of Anthropic's API. It imports nothing of the server, whose errors use it."""

from __future__ import annotations

from collections.abc import Mapping

PATH = "/v1/messages"
OVERLOADED = 529
# Types by status; another one is `api_error`, or `invalid_request_error` where the request is wrong.
KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
TOO_LONG = "prompt is too long: "  # by these words clients recognise a prompt that they have to shorten


def is_here(path: str) -> bool:
    """Whether the path is one of Anthropic's API."""
    return path == PATH or path.startswith(f"{PATH}/")


def status_of(status: int, *, may_retry: bool) -> int:
    """The status of an error: a full server is 529 here, and 429 only where a retry is pointless."""
    return OVERLOADED if status == 429 and may_retry else status


def body_of(status: int, error: Mapping[str, object]) -> dict[str, object]:
    """The error as JSON; `status` is that of `status_of`."""
    message = str(error["message"])
    if error["code"] == "context_length_exceeded":
        message = f"{TOO_LONG}{message}"
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
