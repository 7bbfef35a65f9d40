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
    """Tasks that run choices, of an earlier prompt first. The first choice of a prompt leads: the others come
    when it has read the prompt, and begin with its keys and values. One for which the queue has no room comes
    behind another one: what is begun already is not thrown away for it."""

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
                return  # there are others, and they are enough
            except Exception as error:
                self.arrived.put_nowait((index, Event("error", error=error)))
            finally:
                self._running -= 1

    async def _run(self, index: int) -> None:
        """A choice, to its end; Overloaded: it is to come once more, behind one that runs."""
        p, i = divmod(index, self._order.tried)
        request, leads = self._now(choice(self._order.prompts[p], i)), i == 0 and self._order.tried > 1
        # The end of an answer that comes all at once would be too late a sign for the others.
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
        """The time that a choice waited for its turn is gone from its deadline."""
        if request.deadline_s is None:
            return request
        return replace(request, deadline_s=request.deadline_s - (monotonic() - self._began))


def choice(prompt: GenerateRequest, i: int) -> GenerateRequest:
    """The request for choice i of a prompt: what is said of the prompt itself the first one says."""
    if i == 0:
        return prompt
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
