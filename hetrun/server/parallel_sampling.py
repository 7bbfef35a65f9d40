"""Several engine requests as one stream of events, each with the number of its choice."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from time import monotonic

from hetrun.client.events import Event, GenerateRequest
from hetrun.client.interface import ChatClient
from hetrun.errors import Overloaded
from hetrun.server.request import Order

# Engine requests of one HTTP request: it must neither fill the shared queue nor be refused for its own size.
AT_ONCE = 32

Numbered = tuple[int, Event]


async def events(client: ChatClient, order: Order) -> AsyncGenerator[Numbered, None]:
    """The events of all choices as they happen, until each had its last event.

    Closing the generator cancels running choices. Choice i of prompt p has the number p * tried + i.
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
    """Tasks that run choices, those of earlier prompts first. The first choice of a prompt reads the prompt;
    the others start then, with its keys and values. A choice for which the queue has no room starts after
    another one has ended, so the work so far is not lost."""

    def __init__(self, client: ChatClient, order: Order) -> None:
        self.arrived: asyncio.Queue[Numbered] = asyncio.Queue()
        self._client = client
        self._order = order
        self._began = monotonic()
        self._next: asyncio.PriorityQueue[int] = asyncio.PriorityQueue()
        for leader in range(0, order.choices, order.tried):
            self._next.put_nowait(leader)
        self._running = 0
        self._tasks = [asyncio.create_task(self._work()) for _ in range(min(AT_ONCE, order.choices))]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            index = await self._next.get()
            self._running += 1
            try:
                await self._run(index)
            except Overloaded:
                self._next.put_nowait(index)
                return  # other tasks are running, and they are enough
            except Exception as error:
                self.arrived.put_nowait((index, Event("error", error=error)))
            finally:
                self._running -= 1

    async def _run(self, index: int) -> None:
        """Run a choice to its end; Overloaded: it has to start again after a running one."""
        p, i = divmod(index, self._order.tried)
        request, leads = self._now(choice(self._order.prompts[p], i)), i == 0 and self._order.tried > 1
        # If the answer arrives all at once, its end would start the others too late.
        request = replace(request, whole=request.whole and not leads)
        async with aclosing(self._client.stream(request)) as stream:
            async for event in stream:
                if isinstance(event.error, Overloaded) and self._running > 1:
                    raise event.error
                self.arrived.put_nowait((index, event))
                if leads and event.kind != "prompt":
                    leads = False
                    for follower in range(index + 1, index + self._order.tried):
                        self._next.put_nowait(follower)

    def _now(self, request: GenerateRequest) -> GenerateRequest:
        """Subtract a choice's waiting time from its deadline."""
        if request.deadline_s is None:
            return request
        return replace(request, deadline_s=request.deadline_s - (monotonic() - self._began))


def choice(prompt: GenerateRequest, i: int) -> GenerateRequest:
    """The request for choice i of a prompt; only the first one returns the prompt itself."""
    if i == 0:
        return prompt
    params = replace(prompt.params, seed=seed_of(prompt.params.seed, i), prompt_logprobs=None)
    return replace(prompt, params=params, echo=False, progress=False, slot=None)


def seed_of(seed: int | None, i: int) -> int | None:
    """The seed of a choice; the first has the request's, the others differ.

    It is a hash, so that choices don't repeat those of a request with the next seed.
    """
    if seed is None or i == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
