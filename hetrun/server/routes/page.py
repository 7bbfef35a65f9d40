"""GET /: a page with a chat for browsers, and a list of addresses in plain text for others.

The page is a single file. It runs under a policy that allows only its own script and style, by their digests.
It needs no key, since it contains nothing about this server; its requests need the key like any others.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from hetrun import __version__
from hetrun.client.model_pool import ModelPool
from hetrun.server.service import Service

RUNNING = "Ollama is running"  # with --ollama, for clients that look for these words
ADDRESSES = """\
OpenAI's API    {base}/v1   (POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings)
Anthropic's API {base}      (POST /v1/messages, /v1/messages/count_tokens)
Ollama's API    {base}/api  (POST /api/chat, /api/generate, /api/embed, GET /api/tags)
models          GET {base}/v1/models
all requests    GET {base}/openapi.json
health          GET {base}/health
a chat          this address in a browser, or: hetrun chat --url {base}
"""


def routes(service: Service) -> list[Route]:
    async def page(request: Request) -> Response:
        if prefers_html(request.headers.get("accept", "")):
            return Response(content(), media_type="text/html", headers=headers())
        if service.ollama:
            return PlainTextResponse(RUNNING, headers={"Vary": "Accept"})
        return PlainTextResponse(text(service, str(request.base_url).rstrip("/")), headers={"Vary": "Accept"})

    return [Route("/", page)]


def text(service: Service, base: str) -> str:
    """The addresses, for a terminal; without the models if a key is required."""
    said = f"hetrun {__version__}\n\n{ADDRESSES.format(base=base)}"
    if service.needs_key:
        return f"{said}\nAll but /health wants the key: 'Authorization: Bearer KEY'\n"
    shelf = service.client
    if isinstance(shelf, ModelPool) and shelf.only is None:
        said += "".join(f"\nmodel {name}" for name in shelf.models) + "\n"
    return said


def prefers_html(accept: str) -> bool:
    """Whether the client is a browser: programs send */*, or nothing."""
    return "text/html" in accept.lower()


@cache
def content() -> bytes:
    """The page."""
    return files("hetrun.server").joinpath("page", "index.html").read_bytes()


@cache
def headers() -> dict[str, str]:
    """The page's headers: it may run, load and request only what is its own."""
    html = content().decode()
    script, style = (digest(html, name) for name in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
        "Vary": "Accept",
    }


def digest(html: str, name: str) -> str:
    """The digest of the page's only element of this name, as a policy names it."""
    (found,) = re.findall(rf"<{name}>(.*?)</{name}>", html, re.DOTALL)
    return "sha256-" + b64encode(hashlib.sha256(found.encode()).digest()).decode()
