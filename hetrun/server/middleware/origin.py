"""Web pages as clients: only allowed ones may use the server.

A browser sends requests for any page it shows. A third-party page can use our address, or a host name of its
own that points to it (DNS rebinding): `Origin` shows the first, `Host` the second. Programs send no `Origin`,
and any host name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetrun.option_types import THIS_MACHINE
from hetrun.server.errors import FINAL, ApiError

ANY = "*"
# Pages that a server on this machine has sent, by the names under which no other machine can be meant.
LOCAL_PAGE = re.compile(r"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?", re.ASCII)
METHODS = "GET, POST"
READABLE = "Retry-After, retry-after-ms, x-should-retry"  # headers of answers that a page may read
MOST_AGE_S = 600  # for which a browser caches the answer to a preflight
# Names of headers that a page wants to send; the answer repeats them, so they are checked.
HEADERS = re.compile(r"[A-Za-z0-9_-]+(, ?[A-Za-z0-9_-]+)*", re.ASCII)
MOST_HEADERS = 2048  # characters


class OriginGuard:
    """Middleware: refuses requests to other hosts, and those of pages that are not `origins`.

    `hosts`: names of this server, besides loopback addresses; None: any, because access is limited in
    another way (a key, or the permissions of a Unix socket). `keyed`: a key is required.
    """

    def __init__(
        self, app: ASGIApp, hosts: Iterable[str] | None, origins: Iterable[str], keyed: bool = False
    ) -> None:
        self._app = app
        self._keyed = keyed
        self._hosts = None if hosts is None else frozenset(map(str.lower, hosts))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if refusal := self._wrong_host(headers) or self._wrong_origin(origin, headers):
            await refusal.response(scope["path"])(scope, receive, send)
        elif origin is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(origin, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, _readable_by(origin, send))

    def _wrong_host(self, headers: Headers) -> ApiError | None:
        if self._hosts is None:
            return None
        for said in headers.getlist("host"):
            host = host_name(said)
            if host not in self._hosts and not is_loopback(host):
                message = (
                    f"This server does not answer to the name {host[:80]!r}: use its address, or start it "
                    "with --allowed-host"
                )
                return ApiError(message, code="wrong_host", status=421, headers=FINAL)
        return None

    def _wrong_origin(self, origin: str | None, headers: Headers) -> ApiError | None:
        if origin is None or ANY in self._origins or origin.lower() in self._origins:
            return None
        if THIS_MACHINE in self._origins and LOCAL_PAGE.fullmatch(origin.lower()):
            return None
        # The server's own page, by its host name. That name was checked before, or the request needs the key,
        # which a page with a rebound name doesn't have.
        host = headers.get("host", "").lower()
        if self._hosts is not None and origin.lower() == f"http://{host}":
            return None
        if self._keyed and origin.lower() in (f"http://{host}", f"https://{host}"):
            return None
        message = (
            f"Pages of {origin[:80]!r} may not use this server: start it with --cors-origin to allow them"
        )
        return ApiError(message, code="origin_not_allowed", status=403)


def host_name(said: str) -> str:
    """The host of a Host header, without its port."""
    host = said.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).rstrip(".")


def is_loopback(host: str) -> bool:
    """Whether it can only be this machine, whatever a name server says."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _preflight(origin: str, headers: Headers) -> Response:
    """The answer to a preflight: the requests that a page may send."""
    allowed = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Max-Age": str(MOST_AGE_S),
        "Vary": "Origin",
    }
    wanted = headers.get("access-control-request-headers", "").strip()
    if len(wanted) <= MOST_HEADERS and HEADERS.fullmatch(wanted):
        allowed["Access-Control-Allow-Headers"] = wanted
    if headers.get("access-control-request-private-network") == "true":
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=allowed)


def _readable_by(origin: str, send: Send) -> Send:
    async def readable(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = READABLE
            headers.add_vary_header("Origin")
        await send(message)

    return readable
