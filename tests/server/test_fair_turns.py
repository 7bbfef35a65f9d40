"""Requests that come together go on one behind the other, with rounds of the event loop in between."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from starlette.types import Message, Receive, Scope, Send

from hetrun.server.middleware.fair_turns import InTurn


async def test_bodies_that_come_together_are_worked_at_in_rounds_of_their_own() -> None:
    rounds, went_on = 0, list[tuple[int, int]]()

    async def counting() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        went_on.append((rounds, scope["number"]))

    guarded = InTurn(app)
    others = asyncio.create_task(counting())
    await asyncio.gather(*(guarded({"type": "http", "number": i}, whole_body, nowhere) for i in range(50)))
    others.cancel()
    assert [number for _, number in went_on] == list(range(50))  # first come, first served
    assert all(before < after for (before, _), (after, _) in pairwise(went_on))


async def test_who_gives_up_does_not_keep_the_turn() -> None:
    seen = list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        seen.append(scope["number"])

    guarded = InTurn(app)
    asking = [
        asyncio.create_task(guarded({"type": "http", "number": i}, whole_body, nowhere)) for i in range(5)
    ]
    await asyncio.sleep(0)
    for i in (0, 2):  # one that has the turn, one that waits for it
        asking[i].cancel()
    await asyncio.wait(asking)
    assert seen == [1, 3, 4]


async def test_only_the_end_of_a_body_takes_a_turn() -> None:
    parts = iter([True, True, False])
    rounds = 0

    async def receive() -> Message:
        return {"type": "http.request", "body": b"x", "more_body": next(parts)}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal rounds
        for _ in range(3):
            passed = asyncio.Event()
            asyncio.get_running_loop().call_soon(passed.set)  # in the next round
            await receive()
            rounds += passed.is_set()

    await InTurn(app)({"type": "http"}, receive, nowhere)
    assert rounds == 1


async def whole_body() -> Message:
    return {"type": "http.request", "body": b"{}", "more_body": False}


async def nowhere(message: Message) -> None:
    raise AssertionError("nothing is answered here")
