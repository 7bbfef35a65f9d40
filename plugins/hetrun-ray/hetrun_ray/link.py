"""hetrun's side: a place for each node, and the process that talks to Ray."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from subprocess import Popen
from typing import IO

from hetrun.errors import BackendUnavailable, printable
from hetrun.system.subprocesses import begin
from hetrun.tools.batch.request_lines import Ask
from hetrun.tools.batch.result_lines import Reply
from hetrun.tools.batch.worker import Away, Place
from hetrun_ray.words import (
    ClusterJoined,
    EndEngines,
    EngineStarted,
    NoCluster,
    NodeAnswer,
    NodeGone,
    NodeRequest,
    Pipe,
    RequestAnswered,
    StartEngines,
    Trouble,
)

log = logging.getLogger(__name__)

DRIVER = "from hetrun_ray.cluster import main; main({pipe})"
JOIN_S = 60.0  # how long it may take to find the cluster, where Ray would try for minutes
END_S = 30.0  # how long the driver may take to end all engines
LOOK_S = 0.05
LAST_WORDS = 300  # characters of the driver's log that are quoted
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}  # the user was not asked whether others may be told


class RayNode(Place):
    """One node. Nothing is waited for here: a place that is not ready says so, and others go on."""

    def __init__(self, number: int, name: str, link: DriverLink) -> None:
        self.name = f"ray node {name}"
        self.lanes = 1  # until it is known
        self.started = False
        self.failure = ""  # why its engine could not be started
        self._number, self._link = number, link
        self._seats = asyncio.Semaphore(1)

    def start(self, name: str, lanes: int) -> None:
        """Its engine answers, this many requests at a time."""
        self.name = f"ray node {name}"
        self.lanes, self.started, self.failure = lanes, True, ""
        # A batch has begun with as many lanes as the first node has. What is more than this one has waits
        # here, where nothing is lost when the engine dies.
        self._seats = asyncio.Semaphore(lanes)

    async def answer(self, ask: Ask) -> Reply:
        async with self._seats:
            match await self._link.ask(self._number, ask):
                case NodeAnswer(status, body):
                    return Reply(status, body)
                case NodeGone(why, after_s, blameless):
                    raise Away(f"{self.name}: {why}", after_s, blameless)


class DriverLink:
    """Ray's driver, in a process of its own, and the pipe to it."""

    def __init__(self) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self._process: Popen[bytes] | None = None
        self._pipe: Pipe | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._keys = itertools.count()
        self._asked: dict[int, asyncio.Future[NodeAnswer | NodeGone]] = {}
        self._nodes: Sequence[RayNode] = ()
        self._over = ""  # why nothing is answered any more
        self._joined = asyncio.Event()
        self._ready: asyncio.Future[int]  # the lanes of the first node

    async def __aenter__(self) -> DriverLink:
        self._ready = asyncio.get_running_loop().create_future()
        # In a session of its own it does not hear Ctrl-C: we tell it what to do.
        self._process, end = begin(DRIVER, self._log.fileno(), {**os.environ, **QUIET}, own_session=True)
        self._pipe = await Pipe.over(end)
        return self

    async def begin(self, what: StartEngines) -> Sequence[Place]:
        """The nodes, once the first one is ready. BackendUnavailable: none will be."""
        assert self._pipe is not None
        self._pipe.send(what)
        self._hearing = asyncio.create_task(self._hear(self._pipe))
        try:
            async with asyncio.timeout(JOIN_S):
                await self._joined.wait()
        except TimeoutError:
            self._fail(f"ray:{what.where}: Ray finds no cluster within {JOIN_S:g} s ({self._last_words()})")
        lanes = await self._ready
        for node in self._nodes:
            node.lanes = node.lanes if node.started else lanes
        return self._nodes

    async def ask(self, place: int, ask: Ask) -> NodeAnswer | NodeGone:
        """What a place answers."""
        if self._over or self._pipe is None:
            return NodeGone(self._over, None, blameless=True)
        key = next(self._keys)
        self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            self._pipe.send(NodeRequest(key, place, ask.index, ask.url, ask.body))
            return await self._asked[key]
        finally:
            self._asked.pop(key, None)

    # --- what the driver says

    async def _hear(self, pipe: Pipe) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._heard(await pipe.receive())
        self._over = f"Ray's driver has ended, and with it the way to the cluster ({self._last_words()})"
        self._fail(self._over)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(NodeGone(self._over, None, blameless=True))

    def _heard(self, message: object) -> None:
        match message:
            case RequestAnswered(key, found):
                if (answer := self._asked.get(key)) is not None and not answer.done():
                    answer.set_result(found)
            case ClusterJoined(names):
                self._nodes = [RayNode(number, name, self) for number, name in enumerate(names)]
                self._joined.set()
            case NoCluster(why):
                self._fail(why)
            case EngineStarted(place, name, lanes):
                self._nodes[place].start(name, lanes)
                if not self._ready.done():
                    self._ready.set_result(lanes)
            case Trouble(place, why, failed):
                self._troubled(self._nodes[place], why, failed)

    def _troubled(self, node: RayNode, why: str, failed: bool) -> None:
        if why != node.failure:  # the same again and again is said once
            log.warning("%s: %s", node.name, why)
        if failed:
            node.failure = why
        if all(node.failure for node in self._nodes):
            first = self._nodes[0]
            self._fail(
                f"none of the {len(self._nodes)} nodes of the Ray cluster could start an engine; "
                f"the first, {first.name}: {first.failure}"
            )

    def _fail(self, why: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(BackendUnavailable(why))
            self._joined.set()

    def _last_words(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4096))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "it said nothing")
        return printable(last)[-LAST_WORDS:]

    # --- the end

    async def __aexit__(self, *error: object) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
        self._ready.cancel()
        process = self._process
        try:
            if self._pipe is not None:
                self._pipe.send(EndEngines())
            if process is not None and not self._nodes:
                process.kill()  # it looks for a cluster, and hears nothing
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    while process is not None and process.poll() is None:
                        await asyncio.sleep(LOOK_S)
        finally:
            if process is not None and process.poll() is None:
                process.kill()  # Ray ends actors without a driver, and engines end with their actors
                process.wait()
            if self._pipe is not None:
                self._pipe.close()
            self._log.close()
