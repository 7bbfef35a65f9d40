"""GET /health: 200 while requests can be answered, 503 while the model loads or when the engine is gone."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.errors import HetrunError
from hetrun.server.service import Service


def routes(service: Service) -> list[Route]:
    async def health(request: Request) -> Response:
        progress = service.client.progress
        if progress < 1:
            return JSONResponse({"status": "loading", "progress": round(progress, 2)}, 503)
        try:
            await service.client.info()
        except HetrunError as error:
            return JSONResponse({"status": "failed", "error": str(error)}, 503)
        return JSONResponse({"status": "ok"})

    return [Route("/health", health)]
