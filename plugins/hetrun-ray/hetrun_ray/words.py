"""What is said over the pipe between hetrun's process and Ray's driver."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Mapping
from dataclasses import dataclass

HEAD = 8  # bytes that say how long a message is


# --- from hetrun


@dataclass(frozen=True, slots=True)
class StartEngines:
    """Start an engine on each node."""

    where: str  # as ray.init takes it
    options: Mapping[str, str]  # environment variables of the engines
    gpus: bool = True  # whether they may use them


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """A request, for one place."""

    key: int
    place: int
    index: int  # in its file
    url: str
    body: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class EndEngines:
    """End all engines, and yourself."""


# --- from Ray's driver


@dataclass(frozen=True, slots=True)
class ClusterJoined:
    """The cluster is there; a name for each node."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NoCluster:
    """There is no cluster to work on."""

    why: str


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """A place answers from now on."""

    place: int
    name: str  # of its node, which may be another one than before
    lanes: int


@dataclass(frozen=True, slots=True)
class Trouble:
    """A place does not answer; `failed`: its engine could not be started."""

    place: int
    why: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """What an engine answered."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class NodeGone:
    """Why there is no answer here."""

    why: str
    after_s: float | None
    blameless: bool


@dataclass(frozen=True, slots=True)
class RequestAnswered:
    """What came of a request."""

    key: int
    found: NodeAnswer | NodeGone


class Pipe:
    """One end. Both are ours, so messages are pickled."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, end: socket.socket) -> Pipe:
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: object) -> None:
        """Who does not listen any more is told nothing."""
        data = pickle.dumps(message)
        self._writer.write(len(data).to_bytes(HEAD) + data)

    async def receive(self) -> object:
        """The next message; EOFError or OSError: the other end is gone."""
        size = int.from_bytes(await self._reader.readexactly(HEAD))
        return pickle.loads(await self._reader.readexactly(size))

    def close(self) -> None:
        self._writer.close()
