"""GET /: what is here. A page with a small chat for browsers, two lines for everybody else."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from hetrun import __version__
from hetrun.server.service import Service

PAGE = Path(__file__).parent.parent / "page.html"
IN_WORDS = f"""\
hetrun {__version__}: OpenAI's API is at /v1 (chat/completions, completions, responses, embeddings, models).
/openapi.json describes all requests, /health and /metrics the server; in a browser this address is a chat.
"""
VARIES = {"Vary": "Accept", "X-Content-Type-Options": "nosniff"}


def routes(service: Service) -> list[Route]:
    content = PAGE.read_bytes()
    headers = VARIES | {
        "Content-Security-Policy": policy(content.decode()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
    }

    async def page(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", "").lower():
            return HTMLResponse(content, headers=headers)
        return PlainTextResponse(IN_WORDS, headers=VARIES)

    return [Route("/", page)]


def policy(page: str) -> str:
    """What a browser may do for the page: run its own script and style, and ask this server.

    Text of a model that became markup by some mistake could neither run nor fetch anything.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash_of('script', page)}",
            f"style-src {_hash_of('style', page)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash_of(tag: str, page: str) -> str:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
