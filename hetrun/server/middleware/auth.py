"""The API key, if one is set."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from hetrun.server.errors import ApiError

# Health checks need no key, nor does the page, which has a field for it.
OPEN = frozenset({"/", "/health", "/v1/health"})


class RequireKey:
    """Middleware: 401 unless the request carries the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._allowed(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        # Its first words are OpenAI's, by which some clients recognise the error.
        message = "Incorrect API key provided, or none: send it as 'Authorization: Bearer KEY'"
        error = ApiError(message, code="invalid_api_key", status=401, headers=headers)
        await error.response(scope["path"])(scope, receive, send)

    def _allowed(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # In constant time, so that the time of a comparison doesn't reveal how much was right.
        return secrets.compare_digest(given.encode(), self._key)
