"""Shared by endpoints that send queries to the engine's process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from hetrun.client.events import GenerateRequest
from hetrun.client.queries import PromptLength, Question, Render, Tokenize
from hetrun.server.errors import FINAL, ApiError
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.service import Service

A = TypeVar("A")

MOST_ASKING = 64  # held at a time by one endpoint
MOST_BYTES = 64 * 2**20  # of their bodies
ANSWER_S = 60.0  # after a long pass, or while a worker restarts
LOOK_S = 5.0  # for queries that are answered at once


async def asked(service: Service, question: Question[A], within_s: float = ANSWER_S) -> A:
    """The engine's answer, with a time limit; waits for a loading model first."""
    await service.info()  # raises if there will be no engine
    try:
        async with asyncio.timeout(within_s):
            return await service.client.ask(question)
    except TimeoutError:
        message = f"the engine did not answer within {within_s:g} s"
        code, kind = "deadline_exceeded", "server_error"
        raise ApiError(message, code=code, status=504, kind=kind, headers=FINAL) from None


async def input_tokens(service: Service, prompt: GenerateRequest) -> int:
    """The tokens of this prompt, with everything that the template adds."""
    if prompt.tokens is not None:
        return len(prompt.tokens)
    text, tools = prompt.text, {"tools": prompt.tools} if prompt.tools else {}
    options = {**prompt.template_options, **tools}
    if prompt.pictures:
        return await asked(service, PromptLength(prompt.pictures, prompt.messages, text, options))
    if prompt.messages is not None:
        text = await asked(service, Render(prompt.messages, options))
    return len(await asked(service, Tokenize(text or "")))


def refuse_pictures(pictures: Sequence[bytes]) -> None:
    """Where only texts are tokenised."""
    if pictures:
        message = (
            "messages have pictures, which have no tokens to be listed; POST "
            "/v1/chat/completions/input_tokens counts what they take"
        )
        raise ApiError(message, "messages", "unsupported_parameter")


async def counted(service: Service, prompt: GenerateRequest) -> Response:
    """OpenAI's answer."""
    return JSONResponse(
        {"object": "response.input_tokens", "input_tokens": await input_tokens(service, prompt)}
    )


def few() -> list[Middleware]:
    """A route whose requests query the engine."""
    return [Middleware(Crowd, most_requests=MOST_ASKING, most_bytes=MOST_BYTES)]
