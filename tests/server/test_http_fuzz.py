"""Mutated requests against a real server, each burst from its seed; a long run: tests.server.http_fuzz."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.server.http_fuzz import BURST, MAKERS, FuzzedRequest, fuzzed_server, request_of, right

MOST_BURSTS = 24
ENOUGH_S = 8.0  # a busy machine does less in it, and at least one burst


async def test_bad_requests_are_refused_and_leave_nothing() -> None:
    threads = threading.active_count()
    async with fuzzed_server() as server:
        until = time.monotonic() + ENOUGH_S
        for seed in range(MOST_BURSTS):
            await server.burst(seed)
            if time.monotonic() > until:
                break
        totals = server.totals
    assert totals.requests == totals.bursts * BURST
    # Most are told what is wrong; who gets no answer has sent a part, or something that is no request.
    assert totals.statuses[400] > totals.requests / 4, totals.to_text()
    assert totals.statuses[200] > 0, totals.to_text()
    assert threading.active_count() <= threads + 8  # uvicorn's and asyncio's own


def test_bursts_are_what_their_seeds_say() -> None:
    first, again = ([request_of(random.Random(seed)) for seed in range(200)] for _ in range(2))
    assert first == again
    assert {request.kind for request in first} == {make.__name__ for make in MAKERS}


@pytest.mark.parametrize("length", ["9" * 5000, "\u00b2".encode().decode("latin-1"), "1_0", "+1"])
async def test_lengths_that_are_no_numbers(length: str) -> None:
    async with fuzzed_server() as server:
        data = right().replace(b"Content-Length: ", f"Content-Length: {length}".encode("latin-1"))
        answer = await server._send(FuzzedRequest("length", data))
        assert answer == b"" or b" 400 " in answer.split(b"\r\n")[0] or b" 413 " in answer.split(b"\r\n")[0]
