"""`AsyncLLM`: beside an event loop, with cancelled tasks."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import aclosing
from typing import Any

import pytest

from hetrun import LLM, AsyncLLM, SamplingParams
from hetrun.errors import EngineStopped, OptionError
from tests.api.scripted import ScriptedEngine, scripted_async
from tests.models.cases import GQA
from tests.support.rig import model_file


async def test_answers_are_those_of_llm(tiny_llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0)
    prompts = [[5, 6, 7], [8, 9]]
    async with AsyncLLM(model_file(GQA), backends=["reference"], planner="static", ctx=1024) as llm:
        texts, chat, vectors = await asyncio.gather(
            llm.generate(prompts, greedy), llm.chat("hi", greedy), llm.embed("a")
        )
        events = [event async for event in llm.stream(prompts[0], greedy)]
        chunks = [chunk async for chunk in llm.chat("hi", greedy, stream=True)]
        assert await llm.detokenize(await llm.tokenize("hello")) == "hello"
        assert await llm.render("hi") == tiny_llm.render("hi")
        assert (await llm.plan()).backends == ["reference"]
        info = await llm.info()
        assert repr(llm) == f"<AsyncLLM {info.id}, context {info.context}>"
    assert [c.tokens for c in texts] == [c.tokens for c in tiny_llm.generate(prompts, greedy)]
    assert [e.token for e in events if e.kind == "token"] == texts[0].tokens
    assert "".join(chunk.text for chunk in chunks) == chat.text == tiny_llm.chat("hi", greedy).text
    assert vectors.shape == (1, info.width)
    with pytest.raises(EngineStopped, match=r"open it again with AsyncLLM"):
        await llm.generate("a")


async def test_several_conversations_are_answered_together(engine: ScriptedEngine) -> None:
    async with scripted_async(engine) as llm:
        assert [answer.text for answer in await llm.chat(["say a", "say b"])] == ["a", "b"]
        assert (await llm.chat("say c")).text == "c"
        several: Any = ["say a", "say b"]
        with pytest.raises(OptionError, match="stream=True is for one conversation"):
            await anext(llm.chat(several, stream=True))
        task = asyncio.ensure_future(llm.chat(["forever a", "forever b"]))
        while len(engine.requests) < 5:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(engine.cancelled)[-2:] == [4, 5]


async def test_a_cancelled_task_cancels_its_requests(engine: ScriptedEngine) -> None:
    async with scripted_async(engine) as llm:
        task = asyncio.create_task(llm.generate(["forever a", "forever b"]))
        while len(engine.requests) < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(engine.cancelled) == [1, 2]


async def test_leaving_a_stream_cancels_its_request(engine: ScriptedEngine) -> None:
    async with scripted_async(engine) as llm:
        async with aclosing(llm.chat("forever", stream=True)) as chunks:
            async for chunk in chunks:
                assert chunk.text == "ha "
                break
        assert engine.cancelled == [1]
        assert (await llm.chat("say hi")).text == "hi"


async def test_a_cancelled_first_use_leaves_the_model_to_others(engine: ScriptedEngine) -> None:
    llm = scripted_async(engine)
    assert repr(llm) == "<AsyncLLM, not loaded>"
    first, second = asyncio.create_task(llm.chat("say a")), asyncio.create_task(llm.chat("say b"))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).text == "b"
    await llm.close()


async def test_errors_are_raised_where_they_are_awaited(engine: ScriptedEngine) -> None:
    wrong: dict[str, Any] = {"n_ctx": 5}
    with pytest.raises(OptionError, match="did you mean ctx"):
        AsyncLLM(**wrong)
    missing = AsyncLLM("nothere.gguf")
    for _ in range(2):
        with pytest.raises(Exception, match=r"nothere\.gguf"):
            await missing.generate("a")
    await missing.close()
    async with scripted_async(engine) as llm:
        with pytest.raises(OptionError, match="role must be one of"):
            await llm.chat([{"role": "x", "content": "y"}])
        with pytest.raises(Exception, match="backend failed"):
            _ = [event async for event in llm.stream("fail")]
        with pytest.raises(TypeError, match=r"AsyncLLM\(path\)"):
            pickle.dumps(llm)


def test_it_can_be_used_from_one_loop_after_another(engine: ScriptedEngine) -> None:
    llm = scripted_async(engine)
    assert asyncio.run(llm.generate("say one"))[0].text == "one"
    assert asyncio.run(llm.generate("say two"))[0].text == "two"
    asyncio.run(llm.close())
