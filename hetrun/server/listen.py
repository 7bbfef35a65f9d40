"""Binding an address, and running the app on it until a signal asks to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from hetrun.errors import OptionError
from hetrun.server.middleware.timeouts import TimedConnection

GRACE_S = 2  # how long running answers may continue after a request to stop
FAREWELL_S = 3  # how long clients may take to read why their answers ended


@dataclass(frozen=True)
class ListenAddress:
    """Where to listen: a TCP port, or a Unix socket if `uds` is given."""

    host: str = "127.0.0.1"
    port: int = 8080
    uds: Path | None = None

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach it."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def hosts(self, allowed: Iterable[str]) -> frozenset[str] | None:
        """The accepted host names of requests, besides this machine's own; None: any.

        With a key, or on a socket that only some users can open, the name doesn't matter.
        """
        return frozenset((self.host, *allowed)) if self.is_private and self.uds is None else None


def check_exposure(address: ListenAddress, api_key: str | None) -> None:
    """Require a key if other machines can reach the address."""
    if not address.is_private and not api_key:
        raise OptionError(
            f"--host {address.host} can be reached from other machines: give --api-key KEY as well, "
            "or listen on 127.0.0.1 or on a Unix socket (--uds PATH)"
        )


def bind(address: ListenAddress) -> socket.socket:
    """A bound socket; raises OptionError if the address cannot be used."""
    return _bind_tcp(address.host, address.port) if address.uds is None else _bind_unix(address.uds)


@contextlib.contextmanager
def listening(address: ListenAddress) -> Generator[socket.socket, None, None]:
    """A bound socket; at the end it is closed, and a Unix socket's file is removed."""
    bound = bind(address)
    try:
        yield bound
    finally:
        bound.close()
        if address.uds is not None:
            address.uds.unlink(missing_ok=True)


def url(bound: socket.socket) -> str:
    """The URL to reach it."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"


def _bind_tcp(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:  # the C library would silently wrap it around
        raise OptionError(f"--port must be a number from 0 to 65535, not {port}")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OptionError(
            f"--host {host} --port {port} is not an address to listen on: {error.strerror}"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except OSError as error:
        listener.close()
        hint = "is another server running? Choose another --port" if error.errno == errno.EADDRINUSE else ""
        raise OptionError(
            f"cannot listen on {host} port {port}: {error.strerror}; {hint}".rstrip("; ")
        ) from None
    return listener


def _bind_unix(path: Path) -> socket.socket:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Created private, because a chmod afterwards would leave a gap.
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise OptionError(f"--uds {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket of a killed server, and nothing else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OptionError(f"--uds {path}: there is a file of this name; remove it or choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise OptionError(f"--uds {path}: {error.strerror}") from None
    raise OptionError(f"--uds {path}: another server listens there")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._when_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._when_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Does nothing: uvicorn would raise caught signals again at the end; see `stop_on_signals`."""
        yield


async def serve(
    app: ASGIApp,
    bound: socket.socket,
    stop: asyncio.Event,
    started: Callable[[], None],
    end_answers: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Answer requests on the socket until `stop` is set; the socket is closed then.

    Running answers may continue for a moment. `end_answers` then ends the rest with an error; without it, or
    if it takes too long, their connections are cut.
    """
    config = uvicorn.Config(
        app,
        loop="asyncio",  # the alternatives refuse a Unix socket that is already bound
        http=TimedConnection,
        ws="none",
        lifespan="off",
        log_config=None,  # its lines go to hetrun's log, in the same format
        log_level=logging.WARNING,
        access_log=False,
        timeout_graceful_shutdown=GRACE_S + FAREWELL_S,
        server_header=False,
    )
    server = _Server(config, started)
    running = asyncio.create_task(server.serve(sockets=[bound]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await asyncio.wait((running,), timeout=GRACE_S)
        if not running.done() and end_answers:
            await end_answers()
        await running
    finally:
        stopping.cancel()


@contextlib.asynccontextmanager
async def served(app: ASGIApp, bound: socket.socket) -> AsyncGenerator[None, None]:
    """Within this context, requests on the socket are answered."""
    stop, started = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(serve(app, bound, stop, started.set))
    try:
        await started.wait()
        yield
    finally:
        stop.set()
        await running


def stop_on_signals(stop: asyncio.Event) -> None:
    """Ctrl-C and SIGTERM set `stop`."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
