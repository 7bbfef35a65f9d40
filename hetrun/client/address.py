"""Where a server listens, as people write it, and a connection to it."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from hetrun.errors import OptionError

CONNECT_S = 10.0
PORTS = {"http": 80, "https": 443}

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and under which path it has its routes."""

    url: str
    socket: str = ""  # a Unix socket's path
    host: str = ""
    port: int = 0
    tls: bool = False
    path: str = ""

    @property
    def header(self) -> str:
        """The value of the Host header."""
        if self.socket:
            return "localhost"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def connected(self) -> Streams:
        """A new connection; raises OSError with a reason if it fails."""
        try:
            async with asyncio.timeout(CONNECT_S):
                if self.socket:
                    return await asyncio.open_unix_connection(self.socket)
                tls = ssl.create_default_context() if self.tls else None
                return await asyncio.open_connection(self.host, self.port, ssl=tls)
        except TimeoutError as error:
            raise OSError(str(error) or f"no connection within {CONNECT_S:g} s") from None


def address(url: str, option: str) -> Address:
    """Parse a URL as users give it, with or without /v1 at its end; unix:PATH is a socket."""
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").removeprefix("//")
        if not path:
            raise OptionError(f"{option} {url}: a socket's path is missing, as in unix:/run/hetrun.sock")
        return Address(url, socket=path)
    try:
        found = urlsplit(url if "://" in url else f"http://{url}")
        port = found.port
    except ValueError as error:
        raise OptionError(f"{option} {url}: {error}") from None
    if found.scheme not in PORTS or not found.hostname or found.query or found.fragment or found.username:
        raise OptionError(f"{option} {url} must be like http://host:8080, or unix:PATH for a socket")
    path = found.path.rstrip("/").removesuffix("/v1")
    return Address(url, "", found.hostname, port or PORTS[found.scheme], found.scheme == "https", path)
