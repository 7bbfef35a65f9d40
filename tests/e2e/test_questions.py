"""Every question that a front may ask, answered by a real model in its worker, and over HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from hetrun.api.local_model import LocalModel
from hetrun.client.engine_client import WorkerClient
from hetrun.client.events import GenerateRequest
from hetrun.client.queries import Detokenize, PlanNow, Render, SetRam, StateQuery, Tokenize, TokenizerInfo
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings, default_model
from hetrun.engine.query_handlers import MOST_PART, PART, parts
from hetrun.errors import OptionError
from hetrun.server.app import create_app

pytestmark = pytest.mark.slow

MESSAGES = ({"role": "user", "content": "Why is the sky blue?"},)
RENDERED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
)


@asynccontextmanager
async def opened() -> AsyncIterator[WorkerClient]:
    settings = Settings.resolve(environ={}, model=str(default_model({})), ctx=1024, backends=["llamacpp"])
    client = WorkerClient(settings, front=0)  # pytest is large
    try:
        yield client
    finally:
        await client.close()


async def test_what_a_worker_knows_of_its_model() -> None:
    async with opened() as client:
        assert await client.ask(Tokenize("Hello world<|im_end|>")) == [19556, 905, 2]
        assert 2 not in await client.ask(Tokenize("Hello world<|im_end|>", parse_special=False))
        assert await client.ask(Detokenize((19556, 905, 2))) == [b"Hello", b" world", b"<|im_end|>"]
        with pytest.raises(OptionError, match="there is no token 49152"):
            await client.ask(Detokenize((49152,)))
        facts = await client.ask(TokenizerInfo())
        assert (facts.n_tokens, facts.bos, facts.eos) == (49152, 1, 2)
        assert (facts.bos_text, facts.eos_text, facts.add_bos) == ("<|im_start|>", "<|im_end|>", False)
        assert "add_generation_prompt" in facts.template
        assert await client.ask(Render(MESSAGES)) == RENDERED
        without = await client.ask(Render(MESSAGES, {"add_generation_prompt": False}))
        assert RENDERED.startswith(without)
        plan = await client.ask(PlanNow())
        assert plan["plans"]
        bill = await client.ask(SetRam(1 << 30))
        assert bill["limit"] == 1 << 30
        assert (await client.ask(PlanNow()))["memory"]["limit"] == 1 << 30  # type: ignore[index]
        assert (await client.ask(StateQuery())).budget == 1 << 30


async def test_requests_are_seen_while_they_run_and_counted_when_they_end() -> None:
    async with opened() as client:
        params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(params, messages=MESSAGES)
        events = client.stream(request)
        for _ in range(3):
            await anext(events)
        state = await client.ask(StateQuery())
        (slot,) = state.slots
        assert slot.state == "answer"
        assert slot.prompt_tokens == slot.prompt_computed == len(await client.ask(Tokenize(RENDERED)))
        assert slot.answer_limit == 200
        assert slot.answer_tokens >= 3
        assert slot.seconds > 0
        # Running answers do not stop for a long text.
        text = "the quick brown fox jumps over " * 6000
        tokens = await client.ask(Tokenize(text))
        assert b"".join(await client.ask(Detokenize(tuple(tokens)))) == text.encode()
        rest = [event async for event in events]
        assert rest[-1].finish_reason == "length"
        state = await client.ask(StateQuery())
        assert state.slots == ()
        assert state.counts.requests == {"length": 1}
        assert (state.counts.prompt_tokens, state.counts.answer_tokens) == (slot.prompt_tokens, 200)
        assert state.counts.begun == 1
        assert state.counts.steps >= 100


def test_a_text_cut_in_parts_has_the_tokens_of_the_whole() -> None:
    draw = random.Random(7)
    words = ["the", " ", "fox", ", ", "12", "\n\n", "ü", "  ", "<|im_end|>", "don't", " a", " B", "中文", "."]
    with LocalModel(default_model({}), ctx=256, backends=["llamacpp"]) as llm:
        for _ in range(5):
            text = "".join(draw.choice(words) for _ in range(20 * 1024))
            assert len(list(parts(text, cuts_at_spaces=True))) > 1
            for special in (True, False):
                whole = llm.call(lambda loaded, s=special, t=text: loaded.tokenizer.encode_as(t, False, s))  # type: ignore[misc]
                assert llm.ask(Tokenize(text, add_special=False, parse_special=special)) == whole
        with pytest.raises(OptionError, match="would have to be tokenised at once"):
            llm.ask(Tokenize("x" * (MOST_PART + PART + 1)))


async def test_over_http() -> None:
    async with opened() as client:
        transport = httpx.ASGITransport(create_app(client))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
            said = (await http.post("/tokenize", json={"content": "Hello 😀", "with_pieces": True})).json()
            assert said["tokens"][0] == {"id": 19556, "piece": "Hello"}
            raw = [p["piece"] for p in said["tokens"][1:]]
            assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in raw).decode() == " 😀"
            ids = [p["id"] for p in said["tokens"]]
            assert (await http.post("/detokenize", json={"tokens": ids})).json()["content"] == "Hello 😀"
            body = {"messages": list(MESSAGES)}
            assert (await http.post("/apply-template", json=body)).json() == {"prompt": RENDERED}
            counted = (await http.post("/tokenize", json=body)).json()["count"]
            answer = (await http.post("/v1/chat/completions", json=body | {"max_tokens": 3})).json()
            assert answer["usage"]["prompt_tokens"] == counted
            running = asyncio.create_task(
                http.post("/v1/chat/completions", json=body | {"max_tokens": 100, "ignore_eos": True})
            )
            while not (slots := (await http.get("/slots")).json())[0]["is_processing"]:
                await asyncio.sleep(0.01)
            assert len(slots) == 64
            assert slots[0]["n_prompt_tokens"] == counted
            assert "sky" not in str(slots)
            props = (await http.get("/props")).json()
            assert props["total_slots"] == 64
            assert "sky" not in str(props)
            assert (await http.get("/plan")).json()["plans"]
            assert (await running).status_code == 200
            lines = (await http.get("/metrics")).text.splitlines()
            assert 'hetrun_requests_total{end="length"} 2' in lines
            assert "hetrun_answer_tokens_total 103" in lines
