"""Several engine requests as one stream of events, each with the number of its choice."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from time import monotonic

from hetrun.client import ChatClient
from hetrun.events import Event, GenerateRequest
from hetrun.server.orders import Order

# Of one HTTP request: it shall neither fill the queue that all share, nor be refused for its own company.
AT_ONCE = 32

Numbered = tuple[int, Event]


async def events(client: ChatClient, order: Order) -> AsyncGenerator[Numbered, None]:
    """What happens to all choices, in the order in which it happens, until each had its last event.

    Closing the generator cancels what runs. Choice i of prompt p has the number p * tried + i.
    """
    if order.choices == 1:
        async with aclosing(client.stream(order.prompts[0])) as only:
            async for event in only:
                yield 0, event
        return
    crew = _Crew(client, order)
    try:
        left = order.choices
        while left:
            index, event = await crew.arrived.get()
            left -= event.last
            yield index, event
    finally:
        await crew.close()


class _Crew:
    """One task for each choice. The first choice of a prompt leads: the others come when it has computed the
    prompt, and begin with its keys and values."""

    def __init__(self, client: ChatClient, order: Order) -> None:
        self.arrived: asyncio.Queue[Numbered] = asyncio.Queue()
        self._client = client
        self._places = asyncio.Semaphore(AT_ONCE)
        self._began = monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        for p, prompt in enumerate(order.prompts):
            ready = asyncio.Event()
            first = p * order.tried
            # The end of an answer that comes all at once would be too late a sign for the others.
            leader = replace(prompt, whole=prompt.whole and order.tried == 1)
            self._tasks.append(asyncio.create_task(self._run(first, leader, ready)))
            for i in range(1, order.tried):
                follower = self._follow(first + i, choice(prompt, i), ready)
                self._tasks.append(asyncio.create_task(follower))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, index: int, request: GenerateRequest, ready: asyncio.Event) -> None:
        await ready.wait()
        await self._run(index, request, ready)

    async def _run(self, index: int, request: GenerateRequest, ready: asyncio.Event) -> None:
        try:
            async with self._places, aclosing(self._client.stream(self._now(request))) as stream:
                async for event in stream:
                    self.arrived.put_nowait((index, event))
                    if event.kind != "prompt":
                        ready.set()
        except Exception as error:
            self.arrived.put_nowait((index, Event("error", error=error)))

    def _now(self, request: GenerateRequest) -> GenerateRequest:
        """The time that a choice waited for its turn is gone from its deadline."""
        if request.deadline_s is None:
            return request
        return replace(request, deadline_s=request.deadline_s - (monotonic() - self._began))


def choice(prompt: GenerateRequest, i: int) -> GenerateRequest:
    """The request for choice i of a prompt: what is said of the prompt itself the first one says."""
    params = replace(prompt.params, seed=seed_of(prompt.params.seed, i), prompt_logprobs=None)
    return replace(prompt, params=params, echo=False)


def seed_of(seed: int | None, i: int) -> int | None:
    """Each choice has a seed of its own, or all would be the same; the first has the request's.

    A hash: choices of a request shall not be those of another one whose seed is the next number.
    """
    if seed is None or i == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
