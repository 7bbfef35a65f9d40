"""POST /api/pull and DELETE /api/delete: models that come to this machine, and that leave it.

Only people who may use this machine anyway can do this: clients with the key, or, without a key, those on
this machine. A request that came through a proxy, or from a web page, is not from this machine.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from time import monotonic

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.client.model_catalog import LATEST, CatalogModel
from hetrun.client.model_pool import ModelPool, OnDemand
from hetrun.errors import HetrunError, UserError
from hetrun.server.body import json_object
from hetrun.server.errors import FINAL, ApiError, api_error
from hetrun.server.json_stream import json_text
from hetrun.server.library import ModelLibrary, NotHere, NotOurs, RemovableModel
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.middleware.origin import is_loopback
from hetrun.server.ollama.catalog import Catalog, model_name
from hetrun.server.ollama.options import Json, streams
from hetrun.server.ollama.output import OllamaLines
from hetrun.server.service import Service

MOST_DOWNLOADS = 4  # at a time
MOST_NAME = 512  # characters
TELL_S = 0.2  # between two lines of progress
PROXIES = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")  # their headers


class _GoneError(Exception):
    """No client waits for a download any more."""


def routes(service: Service, catalog: Catalog, library: ModelLibrary | None) -> list[Route]:
    async def pull(request: Request) -> Response:
        _check_access(request, service)
        body = await json_object(request)
        name = _required(body)
        download = Download(service, catalog, _of(library), name)
        await download.check()
        if streams(body):
            return OllamaLines(download.lines())
        async for _ in download.lines():
            pass
        return JSONResponse({"status": "success"})

    async def delete(request: Request) -> Response:
        _check_access(request, service)
        name = _required(await json_object(request))
        await _delete(service, _of(library), name)
        return Response()

    crowd = Middleware(Crowd, most_requests=MOST_DOWNLOADS)
    return [
        Route("/api/pull", pull, methods=["POST"], middleware=[crowd]),
        Route("/api/delete", delete, methods=["DELETE"], middleware=[crowd]),
    ]


def _check_access(request: Request, service: Service) -> None:
    """Without a key, only clients on this machine may change what is stored on it."""
    if service.needs_key:
        return
    headers, client = request.headers, request.client
    local = client is None or is_loopback(client.host)  # on a Unix socket there is no address
    if local and "origin" not in headers and not any(name in headers for name in PROXIES):
        return
    message = (
        "Downloading and deleting models needs a key (hetrun serve --api-key), or a client on this machine"
    )
    raise ApiError(message, code="not_allowed", status=403)


def _required(body: Json) -> str:
    name = model_name(body)
    if not name:
        raise ApiError("model is required", "model", "missing_required_parameter")
    if len(name) > MOST_NAME:
        message = f"model may have {MOST_NAME} characters, not {len(name)}"
        raise ApiError(message, "model", "string_above_max_length")
    return name


def _of(library: ModelLibrary | None) -> ModelLibrary:
    if library is None:
        message = "This server keeps no models: use hetrun pull, list and rm"
        raise ApiError(message, code="not_supported", status=501, headers=FINAL)
    return library


class Download:
    """One download, told in lines."""

    def __init__(self, service: Service, catalog: Catalog, library: ModelLibrary, name: str) -> None:
        self._service = service
        self._catalog = catalog
        self._library = library
        self._name = name
        self._here = False
        self._wanted = True
        self._told_at = 0.0
        self._lines: asyncio.Queue[Json | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def check(self) -> None:
        """Raises if the name can't be downloaded; a model that this server offers is here already."""
        self._here = await self._catalog.offers(self._name)
        if not self._here:
            try:
                await asyncio.to_thread(self._library.check_pull, self._name)
            except UserError as error:
                raise api_error(error) from None

    async def lines(self) -> AsyncGenerator[str, None]:
        """The progress in Ollama's words; raises ApiError if the download fails."""
        yield json_text({"status": "pulling manifest"})
        if not self._here:
            working = asyncio.create_task(self._run())
            try:
                while (line := await self._lines.get()) is not None:
                    yield json_text(line)
                found = await working
            except UserError as error:
                raise api_error(error) from None
            finally:
                self._wanted = False  # the thread sees it at the next bit
            yield json_text({"status": "writing manifest"})
            shelf = self._service.client
            if isinstance(shelf, ModelPool):
                shelf.add(found)
            else:
                yield json_text({"status": "this server offers one model; hetrun serve --models offers more"})
        yield json_text({"status": "success"})

    async def _run(self) -> CatalogModel:
        try:
            return await asyncio.to_thread(self._library.pull, self._name, self._progress)
        finally:
            self._lines.put_nowait(None)

    def _progress(self, done: int, total: int, what: str) -> None:
        """Called in the download's thread."""
        if not self._wanted:
            raise _GoneError
        now = monotonic()
        if now - self._told_at < TELL_S and done < total:
            return
        self._told_at = now
        # Clients group lines by a digest; this one stands for the whole download.
        digest = f"sha256:{hashlib.sha256(self._name.encode()).hexdigest()}"
        line: Json = {"status": f"pulling {what}", "digest": digest, "total": total, "completed": done}
        self._loop.call_soon_threadsafe(self._lines.put_nowait, line)


async def _delete(service: Service, library: ModelLibrary, name: str) -> None:
    """Delete a model's files, after unloading it."""
    try:
        what = await asyncio.to_thread(_removal, library, name)
        models = _of_files(service, what)
        if models and not isinstance(service.client, ModelPool):
            message = f"'{name}' is the model of this server: stop the server, then use hetrun rm"
            raise ApiError(message, "model", "in_use", status=409)
        for model in models:
            assert isinstance(service.client, ModelPool)
            await service.client.drop(model)
        await asyncio.to_thread(library.remove, what)
    except NotHere as error:
        raise ApiError(f"model '{name}' not found: {error}", "model", "model_not_found", status=404) from None
    except NotOurs as error:
        raise ApiError(str(error), "model", "not_allowed", status=403) from None
    except HetrunError as error:
        raise api_error(error) from None


def _removal(library: ModelLibrary, name: str) -> RemovableModel:
    try:
        return library.removal(library.known(name))
    except NotHere:
        if not name.endswith(LATEST):
            raise
        return library.removal(library.known(name.removesuffix(LATEST)))


def _of_files(service: Service, what: RemovableModel) -> list[OnDemand]:
    """The models of this server that have these files."""
    client = service.client
    models = list(client.models.values()) if isinstance(client, ModelPool) else [client]
    return [
        model
        for model in models
        if isinstance(model, OnDemand)
        and any(model.found.path == path or path in model.found.path.parents for path in what.paths)
    ]
