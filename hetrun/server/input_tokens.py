"""How many tokens a request's prompt has: counted as the engine would read it, without an answer."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from hetrun.client.events import GenerateRequest
from hetrun.client.queries import Render, Tokenize
from hetrun.server.query import asked
from hetrun.server.service import Service


async def input_tokens(service: Service, prompt: GenerateRequest) -> int:
    """The tokens of this prompt, with everything that the template adds."""
    if prompt.tokens is not None:
        return len(prompt.tokens)
    text = prompt.text
    if prompt.messages is not None:
        tools = {"tools": prompt.tools} if prompt.tools else {}
        text = await asked(service, Render(prompt.messages, {**prompt.template_options, **tools}))
    return len(await asked(service, Tokenize(text or "")))


async def counted(service: Service, prompt: GenerateRequest) -> Response:
    """OpenAI's answer."""
    return JSONResponse(
        {"object": "response.input_tokens", "input_tokens": await input_tokens(service, prompt)}
    )
