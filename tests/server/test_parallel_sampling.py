"""Several answers to one request: run together, told apart, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.client.events import Event, GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import Overloaded
from hetrun.server import parallel_sampling
from hetrun.server.app import create_app
from hetrun.server.fields import LogprobCount
from hetrun.server.parallel_sampling import seed_of
from hetrun.server.request import Order
from tests.server.test_api import CHAT, asking, chunks_of, error_of
from tests.support.fakes import INFO, FakeEngine


def an_order(text: str, n: int, deadline_s: float | None = None) -> Order:
    request = GenerateRequest(SamplingParams(), text=text, deadline_s=deadline_s)
    return Order(INFO, (request,), "prompt", LogprobCount(), n=n, tried=n)


async def test_a_whole_answer_has_all_choices(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = (await http.post(CHAT, json=asking(n=3, prompt_logprobs=0))).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"hello world"}
    assert answer["usage"] == {  # what the prompt takes counts once
        "prompt_tokens": 7,
        "completion_tokens": 6,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert answer["timings"]["predicted_n"] == 6
    assert len(answer["prompt_logprobs"]) == 2
    assert [r.params.prompt_logprobs for r in engine.requests] == [0, None, None]


async def test_a_stream_has_all_choices(http: httpx.AsyncClient) -> None:
    body = asking(n=3, stream=True, stream_options={"include_usage": True})
    *chunks, last = chunks_of(await http.post(CHAT, json=body))
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "hello world"
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert last["usage"]["completion_tokens"] == 6


async def test_without_usage_the_last_chunk_has_the_timings(http: httpx.AsyncClient) -> None:
    *others, last = chunks_of(await http.post(CHAT, json=asking(n=2, stream=True)))
    assert not any("timings" in chunk for chunk in others)
    assert last["timings"]["predicted_n"] == 4


async def test_the_others_come_when_the_first_has_read_the_prompt(engine: FakeEngine) -> None:
    async with aclosing(parallel_sampling.events(LocalClient(engine), an_order("silence", 3))) as events:
        waiting = asyncio.ensure_future(anext(events))
        while not engine.requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert len(engine.requests) == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    seen = [
        (index, event.kind)
        async for index, event in parallel_sampling.events(LocalClient(engine), an_order("say a", 3))
    ]
    assert seen[0] == (0, "token")
    assert sorted(index for index, kind in seen if kind == "done") == [0, 1, 2]


async def test_only_a_few_choices_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_sampling, "AT_ONCE", 4)
    running, most = 0, 0

    class Client(LocalClient):
        def __init__(self) -> None:
            pass

        async def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            yield Event("token", "a")
            await asyncio.sleep(0)
            yield Event("done")
            running -= 1

    ends = [i async for i, event in parallel_sampling.events(Client(), an_order("x", 50)) if event.last]
    assert (sorted(ends), most) == (list(range(50)), 4)


async def test_who_leaves_cancels_all(engine: FakeEngine) -> None:
    async with aclosing(parallel_sampling.events(LocalClient(engine), an_order("forever", 5))) as events:
        async for index, _ in events:
            if index == 4:
                break
    assert sorted(engine.cancelled) == [1, 2, 3, 4, 5]
    assert await asyncio.to_thread(engine.idle.wait, 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_fails_ends_all(
    http: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    response = await http.post(CHAT, json=asking("fail", n=3, stream=stream))
    assert response.status_code == (200 if stream else 500)
    assert "the fake backend failed" in response.text
    assert await asyncio.to_thread(engine.idle.wait, 5)


class Crowded(LocalClient):
    """Its queue has room for `room` requests at a time."""

    def __init__(self, engine: FakeEngine, room: int) -> None:
        super().__init__(engine)
        self.room, self.refused = room, 0

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        if not self.room:
            self.refused += 1
            yield Event("error", error=Overloaded("the queue is full", 2.0))
            return
        self.room -= 1
        try:
            async with aclosing(super().stream(request)) as events:
                async for event in events:
                    yield event
        finally:
            self.room += 1


@pytest.mark.parametrize("room", [1, 2, 3])
async def test_choices_that_find_no_room_come_behind_the_others(engine: FakeEngine, room: int) -> None:
    client = Crowded(engine, room)
    ends = [i async for i, event in parallel_sampling.events(client, an_order("say a", 20)) if event.last]
    assert sorted(ends) == list(range(20))
    assert client.refused


async def test_where_none_finds_room_that_is_the_answer_to_all(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(Crowded(engine, 0)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        response = await http.post(CHAT, json=asking("forever", n=3))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "2"
    assert error_of(response)["code"] == "overloaded"
    assert not engine.requests


async def test_each_choice_has_its_own_seed(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    await http.post(CHAT, json=asking(n=4, seed=7))
    seeds = [request.params.seed for request in engine.requests]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    engine.requests.clear()
    await http.post(CHAT, json=asking(n=4, seed=7))
    assert [request.params.seed for request in engine.requests] == seeds
    assert seed_of(8, 0) not in seeds
    assert seed_of(None, 3) is None


async def test_a_deadline_goes_on_while_a_choice_waits(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0, 100.0, 103.0])
    monkeypatch.setattr(parallel_sampling, "monotonic", lambda: next(times))
    order = an_order("say a", 2, deadline_s=5.0)
    assert [
        index async for index, event in parallel_sampling.events(LocalClient(engine), order) if event.last
    ] == [
        0,
        1,
    ]
    assert [r.deadline_s for r in engine.requests] == [5.0, 2.0]
