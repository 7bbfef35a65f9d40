"""The identity of clients: each gets an equal share of the engine's time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from starlette.requests import Request

from hetrun.server.errors import wrong_type

NAMES = ("safety_identifier", "user")  # OpenAI's, the newer one first


def asker(request: Request, body: Mapping[str, object]) -> str:
    """An id for all requests of one client: of the user that it names, else of its address.

    Requests with different API keys are from different clients, even if any key is accepted. The id is a
    hash: it is short, and hides keys and names.
    """
    named: str | None = None
    for field in NAMES:
        value = body.get(field)
        if value is not None and not isinstance(value, str):
            raise wrong_type(field, "a string", value)
        named = named or value
    # Clients on a Unix socket have no address.
    address = request.client.host if request.client else ""
    who = ("user", named) if named else ("address", address)
    return hashlib.blake2b("\0".join((_key(request), *who)).encode(), digest_size=8).hexdigest()


def owner(request: Request) -> str:
    """An id for all requests with one API key: the owner of stored responses."""
    return hashlib.blake2b(_key(request).encode(), digest_size=16).hexdigest()


def _key(request: Request) -> str:
    return request.headers.get("authorization") or request.headers.get("x-api-key", "")
