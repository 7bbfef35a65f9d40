"""Where layers run, and what other options would mean, asked of a real model in its worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from hetrun.api.local_model import LocalModel
from hetrun.backend import Available, Descriptor, Floats, Pass, registry
from hetrun.backend.interpreter import OpFunction
from hetrun.backends.reference.ops import TABLE
from hetrun.client.engine_client import WorkerClient
from hetrun.client.events import GenerateRequest
from hetrun.client.queries import Layers, PlanForecast, PlanNow, StateQuery, WhatIf
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings, default_model
from hetrun.errors import BudgetError, OptionError
from hetrun.graph import Op
from hetrun.graph.ops import Attention
from hetrun.memory.kv.cache import KvCache
from tests.engine.simulated import MEASURING
from tests.models.tiny import TinyLlama, write_gguf
from tests.support.tiers import exhaustive
from tests.support.timeline import HOST, Host, Simulated

pytestmark = pytest.mark.slow
with_client = pytest.mark.asyncio(loop_scope="module")

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


@with_client
async def test_a_map_of_the_layers(client: WorkerClient) -> None:
    layers = await client.ask(Layers())
    assert [layer.scope for layer in layers] == ["embed", *(f"blk.{i}" for i in range(LAYERS)), "output"]
    assert {name for layer in layers for name in (*layer.decode, *layer.prefill)} == {"llamacpp"}
    assert all(layer.nbytes > 1 << 20 and layer.streamed == 0 for layer in layers[1:-1])


@with_client
async def test_memory_in_use_adds_up(client: WorkerClient) -> None:
    request = GenerateRequest(SamplingParams(max_tokens=40, ignore_eos=True), text="Once upon a time")
    assert [event async for event in client.stream(request)][-1].usage.completion_tokens == 40
    state = await client.ask(StateQuery())
    ours = sum(n for what, n in state.in_use.items() if what not in ("reserve", "helper processes"))
    assert abs(ours - state.used) < 0.1 * state.used
    assert state.in_use["weights"] > 80 << 20
    assert 0 < state.in_use["KV"] < 80 << 20  # and not what all may have


@with_client
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


OP_S, PRODUCT_S, SEEN_S = 1e-5, 1e-9, 1e-6  # what an op takes, a number of a weight, and a token that is seen


def timed(timeline: Simulated, function: OpFunction) -> OpFunction:
    """With what it takes: more the longer the text before, and of many tokens at once less for each."""

    def run(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
        seen = 0
        if isinstance(op.attrs, Attention):
            group = kv.group(op.attrs.layer)
            seen = len(x[0]) * max(len(part.kv[group].rows) for part in work.parts)
        timeline.takes(HOST, OP_S + PRODUCT_S * sum(m.size for m in w) + SEEN_S * seen)
        return function(op, x, w, work, kv)

    return run


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A backend on a clock that nothing else on the machine moves, where no other program runs."""
    timeline = Simulated()
    monkeypatch.setattr("hetrun.executor.autotune.measurement.backend_probe.others_running", lambda: 0.0)
    besides = ("active_plan", "crowd_watch", "thread_trials")
    measured = [p for p in MEASURING if p not in besides and (p == "measurement.prober" or "." not in p)]
    for name in ("executor", *(f"autotune.{part}" for part in measured)):
        monkeypatch.setattr(f"hetrun.executor.{name}.perf_counter", timeline.now)
    monkeypatch.setattr("hetrun.executor.tuning_setup.LEAST_MEASURED", 0)
    table = {kind: timed(timeline, function) for kind, function in TABLE.items()}
    undo = registry.register(Descriptor("host", lambda: Available("a test"), lambda: Host(timeline, table)))
    yield "host"
    undo()


def assert_predicted(now: PlanForecast, longer: PlanForecast) -> None:
    assert now.measured
    assert longer.full_tok_s is not None
    assert now.full_tok_s is not None
    assert now.decode_tok_s is not None
    # The more a token attends to, the longer it takes.
    assert 1 < longer.full_tok_s < now.full_tok_s < now.decode_tok_s < 100_000
    assert now.prefill_tok_s is not None
    assert now.prefill_tok_s > now.decode_tok_s


def test_speeds_are_predicted_by_what_was_measured(host: str, tmp_path: Path) -> None:
    path = write_gguf(TinyLlama("foreseen", context=8192), tmp_path / "m.gguf")
    with LocalModel(path, ctx=1024, backends=[host], planner="measured", eager=True) as llm:
        assert_predicted(llm.ask(WhatIf()), llm.ask(WhatIf({"ctx": "8192"})))


# What this machine is like while it is measured decides, and so may what else runs there.
@exhaustive
async def test_speeds_of_this_machine_are_predicted() -> None:
    async with opened("measured") as client:
        assert_predicted(await client.ask(WhatIf()), await client.ask(WhatIf({"ctx": "8192"})))


@with_client
async def test_what_cannot_be_is_said(client: WorkerClient) -> None:
    with pytest.raises(BudgetError, match="10"):
        await client.ask(WhatIf({"ram": "10MiB"}))
    with pytest.raises(OptionError, match="model cannot be tried"):
        await client.ask(WhatIf({"model": "/etc/passwd"}))
    with pytest.raises(OptionError, match="ctx"):
        await client.ask(WhatIf({"ctx": "many"}))
