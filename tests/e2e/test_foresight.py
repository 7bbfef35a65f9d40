"""Where layers run, and what other options would mean, asked of a real model in its worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from hetrun.client import WorkerClient
from hetrun.config import Settings, default_model
from hetrun.errors import BudgetError, OptionError
from hetrun.events import GenerateRequest
from hetrun.params import SamplingParams
from hetrun.questions import Layers, PlanNow, State, WhatIf

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LAYERS = 30


@asynccontextmanager
async def opened(planner: str) -> AsyncIterator[WorkerClient]:
    model = str(default_model({}))
    client = WorkerClient(
        Settings.resolve(environ={}, model=model, ctx=1024, backends=["llamacpp"], planner=planner)
    )
    try:
        yield client
    finally:
        await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[WorkerClient]:
    """Nothing that is asked here changes anything."""
    async with opened("static") as client:
        yield client


async def test_a_map_of_the_layers(client: WorkerClient) -> None:
    layers = await client.ask(Layers())
    assert [layer.scope for layer in layers] == ["embed", *(f"blk.{i}" for i in range(LAYERS)), "output"]
    assert {name for layer in layers for name in (*layer.decode, *layer.prefill)} == {"llamacpp"}
    assert all(layer.nbytes > 1 << 20 and layer.streamed == 0 for layer in layers[1:-1])


async def test_memory_in_use_adds_up(client: WorkerClient) -> None:
    request = GenerateRequest(SamplingParams(max_tokens=40, ignore_eos=True), text="Once upon a time")
    assert [event async for event in client.stream(request)][-1].usage.completion_tokens == 40
    state = await client.ask(State())
    ours = sum(n for what, n in state.in_use.items() if what not in ("reserve", "helper processes"))
    assert abs(ours - state.used) < 0.1 * state.used
    assert state.in_use["weights"] > 80 << 20
    assert 0 < state.in_use["KV"] < 80 << 20  # and not what all may have


async def test_what_other_options_would_mean(client: WorkerClient) -> None:
    now = await client.ask(WhatIf())
    plan = await client.ask(PlanNow())
    assert now.context == 1024
    assert now.streamed_bytes == 0
    rows = "KV of one full sequence"
    bill = plan["memory"]
    assert isinstance(bill, dict)
    assert now.memory[rows] == bill[rows]
    longer = await client.ask(WhatIf({"ctx": "2048"}))
    assert (longer.context, longer.memory[rows]) == (2048, 2 * now.memory[rows])
    smaller = await client.ask(WhatIf({"kv_type": "q8_0"}))
    assert smaller.kv_type == "q8_0"
    assert "f16" in smaller.notes[0]
    assert 0.5 < smaller.memory[rows] / now.memory[rows] < 0.6  # 34 bytes for what took 64
    one = await client.ask(WhatIf({"threads": "1"}))
    assert one.threads == 1
    again = await client.ask(WhatIf())  # nothing was changed by all that
    assert (again.context, again.threads, again.kv_type) == (now.context, now.threads, now.kv_type)
    assert again.memory[rows] == now.memory[rows]


async def test_speeds_are_predicted_by_what_was_measured() -> None:
    async with opened("measured") as client:
        now, longer = await client.ask(WhatIf()), await client.ask(WhatIf({"ctx": "8192"}))
    assert now.measured
    assert longer.full_tok_s is not None
    assert now.full_tok_s is not None
    assert now.decode_tok_s is not None
    # The more a token attends to, the longer it takes.
    assert 1 < longer.full_tok_s < now.full_tok_s < now.decode_tok_s < 100_000
    assert now.prefill_tok_s is not None
    assert now.prefill_tok_s > now.decode_tok_s


async def test_what_cannot_be_is_said(client: WorkerClient) -> None:
    with pytest.raises(BudgetError, match="10"):
        await client.ask(WhatIf({"ram": "10MiB"}))
    with pytest.raises(OptionError, match="model is not among what can be tried"):
        await client.ask(WhatIf({"model": "/etc/passwd"}))
    with pytest.raises(OptionError, match="ctx"):
        await client.ask(WhatIf({"ctx": "many"}))
