"""Ray's driver: an actor on each node, another one when it is lost, and requests for them.

It is a process of its own, which may die of what happens to the cluster; hetrun's then asks no more here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hetrun.errors import printable
from hetrun_ray.engine import NodeEngine, ReadyEngine
from hetrun_ray.words import (
    ClusterJoined,
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

AGAIN_S = 0.5  # when to come again to a place that begins
LOOK_S = 1.0  # for a node that comes back, or another one
SLOW_S = 20.0  # an actor that has not begun by then
PAUSE_S, MOST_PAUSE_S = 1.0, 60.0  # behind an engine that could not be started
TOGETHER = 1024  # calls of an actor at a time
END_S = 10.0
# A request is not what an actor dies of, which only passes it on; but one that several died over may be.
MOST_LOST = 8


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A machine of the cluster, as long as Ray runs there without a break."""

    id: str
    host: str
    gpus: float

    @property
    def name(self) -> str:
        return f"{self.host}/{self.id[:6]}"


class Actor:
    """An `NodeEngine` on a node, as it is called from here. RayError: it is gone, or was never there."""

    def __init__(self, node: ClusterNode, begin: StartEngines) -> None:
        # One CPU is its place in Ray's books: a node with none free is busy with other work.
        made = ray.remote(NodeEngine).options(
            num_cpus=1,
            num_gpus=node.gpus if begin.gpus else 0,
            max_restarts=0,
            max_concurrency=TOGETHER,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        self._handle: Any = made.remote(dict(begin.options))
        self.runs = False  # until it is known

    async def hello(self) -> None:
        await self._handle.hello.remote()
        self.runs = True

    async def begin(self) -> ReadyEngine | str:
        found = await self._handle.begin.remote()
        assert isinstance(found, ReadyEngine | str)
        return found

    async def lives(self) -> str:
        return str(await self._handle.lives.remote())

    async def answer(self, asked: NodeRequest) -> NodeAnswer | NodeGone:
        found = await self._handle.answer.remote(asked.url, asked.body)
        assert isinstance(found, NodeAnswer | NodeGone)
        return found

    async def end(self) -> None:
        await self._handle.end.remote()

    def kill(self) -> None:
        with suppress(RayError, ValueError):  # there is nothing to kill any more
            ray.kill(self._handle)


@dataclass(eq=False)
class Seat:
    """A place of hetrun's, and the node that it is on now."""

    number: int
    node: ClusterNode
    actor: Actor | None = None  # once its engine answers
    why: str = "its engine starts"
    lost: asyncio.Event = field(default_factory=asyncio.Event)


def main(descriptor: int) -> None:
    """The whole life of the process; `descriptor` is its end of the pipe."""
    os.chdir("/")  # Ray lets all nodes import what lies in the driver's folder
    try:
        asyncio.run(_work(descriptor))
    finally:
        os._exit(0)  # whatever Ray's threads do


async def _work(descriptor: int) -> None:
    pipe = await Pipe.over(socket.socket(fileno=descriptor))
    with suppress(EOFError, OSError):
        begin = await pipe.receive()
        assert isinstance(begin, StartEngines)
        try:
            ray.init(begin.where, log_to_driver=False, logging_level=logging.ERROR)
            nodes = alive()
        except Exception as error:
            pipe.send(NoCluster(f"ray:{begin.where}: {_not_joined(begin.where, error)}"))
            await pipe.receive()
            return
        if not nodes:
            pipe.send(NoCluster(f"ray:{begin.where}: no node of the cluster has a CPU to offer"))
            await pipe.receive()
            return
        cluster = Cluster(pipe, begin, nodes)
        try:
            await cluster.run()
        finally:
            await cluster.close()
            ray.shutdown()


def alive() -> list[ClusterNode]:
    """The nodes that offer a CPU; who offers none wants no work there."""
    known = ray.nodes()
    found = [node for node in known if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    return [ClusterNode(n["NodeID"], n["NodeManagerHostname"], n["Resources"].get("GPU", 0)) for n in found]


class Cluster:
    """All seats."""

    def __init__(self, pipe: Pipe, begin: StartEngines, nodes: list[ClusterNode]) -> None:
        self._pipe, self._begin = pipe, begin
        self._seats = [Seat(number, node) for number, node in enumerate(nodes)]
        self._actors: dict[Seat, Actor] = {}  # each seat's, from the moment that it is asked for
        self._model: ReadyEngine | None = None  # of the first engine: all have the same
        self._lost: Counter[int] = Counter()  # how often each request was lost
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until hetrun wants nothing any more, or is gone."""
        self._pipe.send(ClusterJoined(tuple(seat.node.name for seat in self._seats)))
        for seat in self._seats:
            self._spawn(self._keep(seat))
        while isinstance(asked := await self._pipe.receive(), NodeRequest):
            self._spawn(self._answer(asked))

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- requests

    async def _answer(self, asked: NodeRequest) -> None:
        self._pipe.send(RequestAnswered(asked.key, await self._found(asked)))

    async def _found(self, asked: NodeRequest) -> NodeAnswer | NodeGone:
        seat = self._seats[asked.place]
        if (actor := seat.actor) is None:
            return NodeGone(seat.why, AGAIN_S, blameless=True)
        try:
            found = await actor.answer(asked)
        except RayError as error:
            if seat.actor is actor:
                seat.actor, seat.why = None, f"it is lost ({_in_words(error)})"
                seat.lost.set()
            self._lost[asked.index] += 1
            return NodeGone(seat.why, AGAIN_S, blameless=self._lost[asked.index] < MOST_LOST)
        self._lost.pop(asked.index, None)
        return found

    # --- engines

    async def _keep(self, seat: Seat) -> None:
        """One engine after the other, as long as there is a node."""
        pause = PAUSE_S
        while True:
            if not await self._has_node(seat):
                seat.why = "it has left the cluster"
                await asyncio.sleep(LOOK_S)
                continue
            try:
                actor = self._actors[seat] = Actor(seat.node, self._begin)
                if not (failed := await self._failure(seat, actor)):
                    await self._live(seat, actor)
            except Exception as error:  # a bug here or in Ray, which costs one place and not all
                failed = _in_words(error)
            finally:
                self._drop(seat)
            if failed:
                self._trouble(seat, failed, failed=True)
            pause = min(2 * pause, MOST_PAUSE_S) if failed else PAUSE_S
            await asyncio.sleep(pause)

    async def _has_node(self, seat: Seat) -> bool:
        """Its node, or if that has left one that has joined: Ray knows who comes back by another name."""
        nodes = await asyncio.to_thread(alive)
        if seat.node in nodes:
            return True
        taken = [other.node.id for other in self._seats]
        free = [node for node in nodes if node.id not in taken]
        if free:
            seat.node = min(free, key=lambda node: node.host != seat.node.host)
        return bool(free)

    async def _failure(self, seat: Seat, actor: Actor) -> str:
        """Starts an engine; why it could not begin, or nothing."""
        seat.why = "its engine starts"
        try:
            await self._arrived(seat, actor)
            begun = await actor.begin()
        except RayError as error:
            return _in_words(error)
        if not isinstance(begun, ReadyEngine):
            return begun
        self._model = self._model or begun
        if (begun.model, begun.nbytes) != (self._model.model, self._model.nbytes):
            return f"it has another model than the first node: {_of(begun)}, not {_of(self._model)}"
        self._pipe.send(EngineStarted(seat.number, seat.node.name, begun.lanes))
        return ""

    async def _arrived(self, seat: Seat, actor: Actor) -> None:
        """Waits until the actor runs."""
        hello = asyncio.create_task(actor.hello())
        await asyncio.wait((hello,), timeout=SLOW_S)
        if not hello.done():
            self._trouble(seat, "it does not begin: other work holds its CPUs or GPUs, or it does not answer")
        await hello

    async def _live(self, seat: Seat, actor: Actor) -> None:
        """As long as the engine answers."""
        seat.lost.clear()
        seat.actor = actor
        ends = (asyncio.create_task(actor.lives()), asyncio.create_task(_set(seat.lost)))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if ends[0].done():
                seat.why = ends[0].result()
        except RayError as error:
            seat.why = f"it is lost ({_in_words(error)})"
        finally:
            for end in ends:
                end.cancel()
        self._trouble(seat, f"{seat.why}. Others take its requests")

    def _trouble(self, seat: Seat, why: str, failed: bool = False) -> None:
        seat.why = why
        self._pipe.send(Trouble(seat.number, why, failed))

    def _drop(self, seat: Seat) -> None:
        seat.actor = None
        if (actor := self._actors.pop(seat, None)) is not None:
            actor.kill()

    # --- the end

    async def close(self) -> None:
        """End all engines, and their actors."""
        actors = list(self._actors.values())
        self._actors.clear()  # what keeps them must not kill them first
        for task in self._tasks:
            task.cancel()
        ends = [asyncio.create_task(actor.end()) for actor in actors if actor.runs]
        if ends:
            await asyncio.wait(ends, timeout=END_S)
        for end in ends:
            end.cancel()
        for actor in actors:
            actor.kill()


async def _set(event: asyncio.Event) -> str:
    await event.wait()
    return ""


def _not_joined(where: str, error: Exception) -> str:
    if where == "auto" and isinstance(error, ConnectionError):
        return "no Ray cluster runs on this machine; `ray start --head` begins one"
    return f"Ray cannot join the cluster: {_in_words(error)}"


def _of(begun: ReadyEngine) -> str:
    return f"{begun.model} ({begun.nbytes} bytes)"


def _in_words(error: Exception) -> str:
    """Ray's reasons are paragraphs: what was raised stands at the end, or what happened at the beginning."""
    if f"No module named '{__package__}" in str(error):
        return "hetrun-ray is not installed there: pip install hetrun-ray"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    said = lines[-1] if "Error: " in lines[-1] else lines[0]
    return printable(f"{type(error).__name__}: {said}")[:200]
