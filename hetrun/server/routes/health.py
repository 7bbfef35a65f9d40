"""GET /health: 200 while requests can be answered, 503 while the model loads, is stuck, or has failed."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.client.interface import Health
from hetrun.server.service import Service


def routes(service: Service) -> list[Route]:
    async def health(request: Request) -> Response:
        health = service.client.health
        return JSONResponse(described(health), 200 if health.status == "ok" else 503)

    return [Route("/health", health), Route("/v1/health", health)]


def described(health: Health) -> dict[str, object]:
    """The status and its details, as JSON."""
    said: dict[str, object] = {"status": health.status}
    match health.status:
        case "loading":
            said["progress"] = round(health.progress, 2)
            if health.reason:
                said["reason"] = health.reason
        case "failed":
            said["error"] = health.reason
        case "stuck" if stuck := health.stuck:
            # Without a segment, the whole process sends no pulse.
            said |= {"segment": stuck.what or None, "seconds": round(stuck.seconds, 1)}
            said["expected"] = stuck.expected_s
    if health.streaming is not None:  # weights come from disk
        said["streaming"] = asdict(health.streaming)
    return said
