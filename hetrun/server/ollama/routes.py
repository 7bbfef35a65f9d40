"""All endpoints of Ollama's API."""

from __future__ import annotations

from starlette.routing import Route

from hetrun.server.ollama import embeddings, generation, models, storage
from hetrun.server.ollama.catalog import Catalog
from hetrun.server.service import Service


def routes(service: Service) -> list[Route]:
    catalog = Catalog(service, service.library)
    return [
        *models.routes(service, catalog),
        *generation.routes(service, catalog),
        *embeddings.routes(service, catalog),
        *storage.routes(service, catalog, service.library),
    ]
