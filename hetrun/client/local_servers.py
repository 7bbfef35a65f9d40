"""This user's servers on this machine, each with a private socket in the runtime folder.

Only this user can open the folder, so whatever answers there is this user's server. No file lists running
servers, no process is identified by its pid alone, and no key is needed. A socket on which nothing listens
was left by a killed server and is removed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import stat
import struct
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from hetrun import __version__
from hetrun.client.event_json import event_of, request_as_json
from hetrun.client.events import Event, GenerateRequest
from hetrun.client.http_client import RemoteClient, ServerUnreachable
from hetrun.client.remote.openai_format import read
from hetrun.config import Settings, runtime_dir
from hetrun.errors import EngineStopped, HetrunError, UserError
from hetrun.system.run_queue import time_limit

SERVER, STOP, GENERATE = "/server", "/stop", "/generate"  # the endpoints of a private socket
SUFFIX = ".sock"
ANSWER_S = 3.0  # for querying a server
HASTE_S = 1.0  # the same if the answer is optional
MOST_STOP_S = 60.0  # a server may have to write its prompt cache
LOOK_S = 0.05  # between two polls of a stopping server
# Options that change a model's answers, or its limits.
ALIKE = (
    *("ctx", "kv_type", "precision", "deterministic", "backends", "vram", "spec", "planner", "plan"),
    *("streaming", "chat_template", "chat_template_kwargs", "reasoning", "mmproj"),
)


@dataclass(frozen=True)
class ServedModel:
    """A model of a server, and its load."""

    name: str
    identity: str  # of its files, when they were loaded
    status: str  # loading, loaded, unloaded, failed
    progress: float
    memory: int  # bytes in use; 0: not known
    budget: int | None  # its memory limit in bytes
    requests: int


@dataclass(frozen=True)
class ServerFacts:
    """A server's description of itself on its private socket."""

    version: str
    pid: int
    address: str
    since: float  # seconds since 1970
    needs_key: bool
    options: Mapping[str, str]  # `alike` of its settings
    models: tuple[ServedModel, ...]


@dataclass(frozen=True)
class RunningServer:
    """A server and its private socket."""

    socket: Path
    pid: int  # according to the system
    facts: ServerFacts | None = field(default=None)  # None: it does not answer
    why_not: str = ""


def alike(settings: Settings) -> dict[str, str]:
    """The options that must match so that answers are the same, as text."""
    return {name: str(getattr(settings, name)) for name in ALIKE}


# --- for a server


@contextmanager
def private_socket() -> Iterator[socket.socket]:
    """A listening socket in the runtime folder, removed when the context ends. Raises OSError or UserError
    if it cannot be created."""
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    folder = _folder(create=True)
    begun, path = folder / f".{name}", folder / f"{name}{SUFFIX}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(begun))  # only the owner can open the folder
        begun.chmod(0o600)
        listener.listen()
        begun.rename(path)  # so it is never found before it listens
        yield listener
    finally:
        listener.close()
        for one in (begun, path):
            one.unlink(missing_ok=True)


def _folder(create: bool = False) -> Path:
    """The folder of sockets; raises UserError if other users may have written to it."""
    folder = runtime_dir()
    if create:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"{folder} must be a folder that only you own and can open (chmod 700)")
    return folder


# --- for finding servers


class PrivateClient(RemoteClient):
    """A server on its private socket."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"unix:{path}")

    async def facts(self, is_brief: bool = False) -> ServerFacts:
        """The server's description of itself; a brief one asks no engine what it uses."""
        said = await self._asked("GET", f"{SERVER}?brief=1" if is_brief else SERVER)
        try:
            facts: ServerFacts = read(ServerFacts, said)
        except ValueError as error:
            raise ServerUnreachable(
                f"its answer cannot be read: {error}; it may be another version of hetrun"
            ) from None
        return facts

    async def stop(self) -> None:
        """Ask it to stop."""
        await self._asked("POST", STOP, {})

    async def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """The events of a request, as from the engine there; an error is the last one."""
        try:
            body = {"model": model, "request": request_as_json(request)}
            async with aclosing(self._lines(GENERATE, body)) as lines:
                async for line in lines:
                    event = event_of(self._parsed(line))
                    yield event
                    if event.last:
                        return
            raise ServerUnreachable("the server closed the connection in the middle of its answer; try again")
        except (HetrunError, ValueError) as error:
            yield Event("error", error=error if isinstance(error, HetrunError) else EngineStopped(str(error)))


def running_servers(within_s: float = ANSWER_S, *, is_brief: bool = False) -> list[RunningServer]:
    """This user's servers, the oldest first. Sockets on which nothing listens are removed. A server that
    doesn't answer in time is listed without a description; time in which it waits for a core doesn't count.
    """
    try:
        folder = _folder()
        paths = [p for p in folder.iterdir() if p.suffix == SUFFIX and _is_ours(p)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return asyncio.run(_looked_at(paths, within_s, is_brief)) if paths else []


def _is_ours(path: Path) -> bool:
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.getuid()
    return False


async def _looked_at(paths: list[Path], within_s: float, is_brief: bool) -> list[RunningServer]:
    found = await asyncio.gather(*(_look(path, within_s, is_brief) for path in paths))
    return sorted(filter(None, found), key=lambda s: (s.facts.since if s.facts else 0.0, s.pid))


async def _look(path: Path, within_s: float, is_brief: bool) -> RunningServer | None:
    """The server on a socket; None if no process listens there."""
    try:
        pid = await asyncio.to_thread(_listener, path, within_s)
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)
        return None
    except OSError as error:
        return RunningServer(path, 0, None, error.strerror or str(error))
    try:
        async with time_limit(within_s, os.getpid(), pid):
            return RunningServer(path, pid, await PrivateClient(path).facts(is_brief))
    except TimeoutError:
        return RunningServer(path, pid, None, f"it does not answer within {within_s:g} s")
    except HetrunError as error:
        return RunningServer(path, pid, None, str(error))


def _listener(path: Path, within_s: float) -> int:
    """The pid of the process that listens there; 0 if the system doesn't tell."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(within_s)
        probe.connect(str(path))
        if not hasattr(socket, "SO_PEERCRED"):
            return 0
        found = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", found)[0])


def with_model(identity: str, settings: Settings) -> tuple[RunningServer, ServedModel] | None:
    """A server that has loaded these files with options that give the same answers, or is loading them."""
    wanted, loading = alike(settings), None
    for server in running_servers(HASTE_S, is_brief=True):
        facts = server.facts
        if facts is None or facts.version != __version__ or facts.options != wanted:
            continue
        for model in facts.models:
            if not identity or model.identity != identity:
                continue
            if model.status == "loaded":
                return server, model
            if model.status == "loading":
                loading = loading or (server, model)
    return loading


def stop(server: RunningServer) -> None:
    """Stop a server and wait until its memory is free; raises UserError if that takes too long."""
    asyncio.run(_stopped(server))


async def _stopped(server: RunningServer) -> None:
    with suppress(ServerUnreachable):  # it may be gone before it has answered
        await PrivateClient(server.socket).stop()
    begun = monotonic()
    while monotonic() - begun < MOST_STOP_S:
        try:
            await asyncio.to_thread(_listener, server.socket, ANSWER_S)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError:
            continue  # busy with stopping
        await asyncio.sleep(LOOK_S)
    raise UserError(f"the server with pid {server.pid} was asked to stop but is still running")
