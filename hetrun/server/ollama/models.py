"""GET /api/version, /api/tags and /api/ps, POST /api/show: what editors ask before anything else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun import __version__
from hetrun.client.model_pool import OnDemand
from hetrun.server.body import json_object
from hetrun.server.errors import ApiError
from hetrun.server.ollama.catalog import (
    Catalog,
    OllamaModel,
    capabilities,
    model_info,
    model_name,
    parameters,
    state_bytes,
    template_of,
)
from hetrun.server.ollama.options import KNOWN, Json
from hetrun.server.query import few
from hetrun.server.routes.models import status_of
from hetrun.server.service import Service

# The version of Ollama whose API this is. Clients refuse to work with versions below the one they were
# written for (VS Code's Copilot: 0.6.4); scanners report versions below 0.17.1 as vulnerable.
OLLAMA_VERSION = "0.18.0"
FILLS = "{# .Suffix #}"  # Continue takes this word of a template for a sign that a model fills gaps
COPILOT = "GitHubCopilotChat/"  # as its User-Agent begins
LOOK_S = 1.0  # for a query that an engine answers at once
FOREVER = timedelta(days=365 * 292)  # Ollama's longest duration


def routes(service: Service, catalog: Catalog) -> list[Route]:
    async def version(request: Request) -> Response:
        return JSONResponse({"version": OLLAMA_VERSION, "hetrun": __version__})

    async def tags(request: Request) -> Response:
        return JSONResponse({"models": [model.listed() for model in await catalog.all()]})

    async def ps(request: Request) -> Response:
        loaded = [model for model in await catalog.all() if status_of(model.client) == "loaded"]
        return JSONResponse({"models": [await _running(model) for model in loaded]})

    async def show(request: Request) -> Response:
        body = await json_object(request)
        if not model_name(body):
            raise ApiError("model is required", "model", "missing_required_parameter")
        _, here = await catalog.find(body)
        model = await catalog.one(here)
        template, info = await template_of(model, here), model_info(model)
        if request.headers.get("user-agent", "").startswith(COPILOT):
            info["general.basename"] = model.name  # it shows this, which is the same for all files of a model
        can = capabilities(model, template, here)
        if "insert" in can:
            template += FILLS
        said: Json = {
            "modelfile": f"FROM {model.path.name}\n",
            "parameters": parameters(model, service.sampling, KNOWN),
            "template": template,
            "details": model.details(),
            "model_info": info,
            "capabilities": can,
            "modified_at": model.modified_at,
        }
        if isinstance(text := info.get("general.license"), str):
            said["license"] = text
        return JSONResponse(said)

    return [
        Route("/api/version", version),
        Route("/api/tags", tags, middleware=few()),
        Route("/api/ps", ps, middleware=few()),
        Route("/api/show", show, methods=["POST"], middleware=few()),
    ]


async def _running(model: OllamaModel) -> Json:
    """An entry of the list of loaded models."""
    leaves_in_s = model.client.leaves_in_s if isinstance(model.client, OnDemand) else None
    left = FOREVER if leaves_in_s is None else timedelta(seconds=leaves_in_s)
    size, on_devices = await state_bytes(model, LOOK_S)
    entry = model.listed()
    del entry["modified_at"]
    return entry | {
        "size": size,
        "size_vram": on_devices,
        "expires_at": (datetime.now(UTC) + left).isoformat().replace("+00:00", "Z"),
        "context_length": model.context,
    }
