"""`hetrun serve`: the server over engines in processes of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetrun.cli import REMARKS
from hetrun.cli.output import say
from hetrun.cli.progress import OPENING, loading
from hetrun.client import local_servers
from hetrun.client.engine_client import WorkerClient
from hetrun.client.interface import ChatClient
from hetrun.client.model_catalog import Found, ModelCatalog, find_models
from hetrun.client.model_pool import Shelf
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings, default_model
from hetrun.errors import OptionError, UserError
from hetrun.system.garbage_collection import all_of_this_lasts
from hetrun.system.units import counted

if TYPE_CHECKING:
    from hetrun.server.request_log import RequestLog

BESIDE = 256  # requests held besides those that the queue has room for: read, or answered
MOST_NAMED = 10  # models in the line at the start
POLL_S = 0.1  # how often the bar looks at how far loading has come


def serve_forever(settings: Settings, sampling: Mapping[str, object], verbose: bool) -> None:
    """Bind first, so that a wrong address is said before a model is loaded."""
    from hetrun.server import listen

    address = listen.Address(settings.host, settings.port, settings.uds)
    listen.check_exposure(address, settings.api_key)
    logging.getLogger("uvicorn").addHandler(REMARKS)
    with listen.listening(address) as bound, requests_logged(verbose) as log:
        asyncio.run(_serve(settings, sampling, bound, address.hosts(settings.allowed_hosts), log))


@contextmanager
def requests_logged(everything: bool) -> Iterator[RequestLog]:
    """Lines of requests on standard error, like all remarks."""
    from hetrun.server.request_log import RequestLog

    log = RequestLog(write_line, everything=everything)
    try:
        yield log
    finally:
        log.close()


def write_line(text: str) -> None:
    """A remark in one write, past Python's own file: a thread that waits until standard error is read must
    not hold the lock of that."""
    with suppress(OSError):
        os.write(2, f"hetrun: {text}\n".encode(errors="backslashreplace"))


async def _serve(
    settings: Settings,
    sampling: Mapping[str, object],
    bound: socket.socket,
    hosts: Iterable[str] | None,
    log: RequestLog,
) -> None:
    shelf = shelf_of(settings)
    async with AsyncExitStack() as ends:
        ends.push_async_callback(shelf.close)
        if only := shelf.only:
            only.begin()
        # Imported while the worker loads.
        from hetrun.server import listen
        from hetrun.server.app import create_app

        if shelf.shares:
            from hetrun.memory.ledger import granted

            shelf.allow(granted(settings.ram).nbytes)
        stop = asyncio.Event()
        listen.stop_on_signals(stop)
        await ends.enter_async_context(listed(shelf, stop, settings, listen.url(bound)))
        if only:
            await loaded(only, stop)
            if stop.is_set():
                return
            info = await only.info()
            SamplingParams.from_mapping(sampling).check_vocabulary(info.n_vocab)
        app = create_app(
            only if only and not shelf.shares else shelf,
            strict=settings.strict,
            api_key=settings.api_key,
            sampling=sampling,
            most_requests=settings.queue + BESIDE,
            hosts=hosts,
            origins=settings.cors_origins,
            tool_parser=settings.tool_parser,
            reasoning_format=settings.reasoning_format,
            log=log,
        )

        def started() -> None:
            all_of_this_lasts()
            what = info.id if only else in_words(list(shelf.models))
            say(f"{what} on {listen.url(bound)}/v1 (Ctrl-C stops)")
            if bound.family != socket.AF_UNIX:
                say(f"a chat for browsers: {listen.url(bound)}/")
            if only:
                say(f"chat template: {info.template_origin}")

        await listen.serve(app, bound, stop, started, shelf.close)
        await shelf.close()  # while it is listed: who stops it hears when its memory is free


def in_words(names: Sequence[str]) -> str:
    """How many models, and the names of the first."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{counted(len(names), 'model')} ({', '.join(names[:MOST_NAMED])}{more})"


@asynccontextmanager
async def listed(shelf: Shelf, stop: asyncio.Event, settings: Settings, url: str) -> AsyncIterator[None]:
    """Inside, `hetrun ps`, `stop` and `run` find the server."""
    from hetrun.server import listen
    from hetrun.server.private_socket import private_app

    async with AsyncExitStack() as ends:
        try:
            private = ends.enter_context(local_servers.private_socket())
        except (OSError, UserError) as error:
            say(f"hetrun ps will not list this server: {error}")
        else:
            key, options = settings.api_key is not None, local_servers.alike(settings)
            app = private_app(shelf, stop, address=url, needs_key=key, options=options)
            await ends.enter_async_context(listen.served(app, private))
        yield


def shelf_of(settings: Settings) -> Shelf:
    """The models that are offered: one that was named; several, loaded on demand within one budget; or, if
    none was named, all that `hetrun list` shows."""
    if settings.models:
        if settings.prompt_cache:
            raise OptionError("--prompt-cache is a file of one model: it does not go with --models")
        named = [*([settings.model] if settings.model else []), *settings.models]
        return _several(settings, find_models(named))
    from hetrun.loader.hub.catalog import StoredModels, name_in_list

    if settings.model is None and (catalog := StoredModels(say)).found():
        models = catalog.found()
        if settings.prompt_cache is None and settings.plan is None:
            return _several(settings, models, catalog)
        if len(models) > 1:
            flag = "--plan" if settings.prompt_cache is None else "--prompt-cache"
            raise OptionError(f"{flag} is a file of one model: name the model with -m")
        settings = _for(settings, str(next(iter(models.values())).path), settings.ram)
    place = Path(settings.model).expanduser() if settings.model else default_model()

    def alone(found: Found, ram: int | None) -> ChatClient:
        return WorkerClient(settings if ram is None else _for(settings, settings.model, ram))

    named_alone = Found(name_in_list(place), place, 0)
    return Shelf([named_alone], alone, idle_s=settings.sleep_idle)


def _several(settings: Settings, models: Mapping[str, Found], catalog: ModelCatalog | None = None) -> Shelf:
    """Several models, and those of the catalog that come later."""

    def one_of_several(found: Found, ram: int | None) -> ChatClient:
        return WorkerClient(_for(settings, str(found.path), settings.ram if ram is None else ram))

    return Shelf(
        models.values(),
        one_of_several,
        most_loaded=settings.models_max,
        idle_s=settings.sleep_idle,
        catalog=catalog,
    )


def _for(settings: Settings, model: str | None, ram: int | None) -> Settings:
    """The same for a model that may take so much."""
    origins = {**settings.origins, "model": "explicit", "ram": "explicit"}
    return replace(settings, model=model, ram=ram, origins=origins)


async def loaded(client: ChatClient, stop: asyncio.Event) -> None:
    """Wait with a bar until the model is loaded, or until somebody asks to stop."""
    ready = asyncio.ensure_future(client.info())
    asked = asyncio.ensure_future(stop.wait())
    try:
        with loading(OPENING) as tell:
            while not ready.done() and not asked.done():
                await asyncio.wait((ready, asked), timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                if tell:
                    tell(client.progress)
        if ready.done():
            ready.result()
    finally:
        ready.cancel()
        asked.cancel()
