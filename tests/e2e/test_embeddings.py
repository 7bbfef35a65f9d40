"""Embeddings of a real model, from its file to OpenAI's own client."""

from __future__ import annotations

from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest

from hetrun import LLM
from hetrun.client.engine_client import WorkerClient
from hetrun.config import Settings, default_model
from hetrun.server.app import create_app

pytestmark = pytest.mark.slow

TEXTS = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is taking a nap by the window.",
    "Interest rates were raised by a quarter of a percent.",
    "tokens " * 700,
]


async def test_the_official_client_gets_what_the_model_says_in_process() -> None:
    model = str(default_model())
    with LLM(model, ctx=1024) as llm:
        expected = llm.embed(TEXTS)
    client = WorkerClient(Settings.resolve(environ=None, model=model, ctx=1024), front=0)
    try:
        info = await client.info()
        assert info.width == expected.shape[1] == 576
        # Its newer releases are typed for httpx2 and take both.
        http = cast("Any", httpx.AsyncClient(transport=httpx.ASGITransport(create_app(client)), timeout=120))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="any", http_client=http) as sdk:
            answer = await sdk.embeddings.create(model=info.id, input=TEXTS)
            chat = await sdk.chat.completions.create(
                model=info.id, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8
            )
            with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens"):
                await sdk.embeddings.create(model=info.id, input=["short", "tokens " * 2000])
    finally:
        await client.close()
    found = np.array([one.embedding for one in answer.data])
    assert (found * expected).sum(-1).min() > 0.999
    alike = found[:3] @ found[:3].T
    assert alike[0, 1] > alike[0, 2]
    assert answer.usage.prompt_tokens > 700
    assert chat.choices[0].message.content
