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
from time import monotonic
from typing import TYPE_CHECKING

from hetrun.cli import REMARKS
from hetrun.cli.output import say
from hetrun.cli.progress import OPENING, loading
from hetrun.client import local_servers
from hetrun.client.engine_client import WorkerClient
from hetrun.client.interface import ChatClient
from hetrun.client.model_catalog import CatalogModel, ModelCatalog, find_models
from hetrun.client.model_pool import ModelPool
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings, default_model, is_of_service
from hetrun.errors import OptionError, UserError, printable
from hetrun.option_types import ANSWER_LENGTH, refused
from hetrun.system.garbage_collection import all_of_this_lasts
from hetrun.system.units import counted

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from hetrun.server.request_log import RequestLog

BESIDE = 256  # requests held besides those that the queue has room for: read, or answered
OLLAMA_PORT = 11434
MOST_NAMED = 10  # models in the line at the start
LONG_S = 3.0  # of loading, after which a log says so
POLL_S = 0.1  # how often the bar looks at how far loading has come


def serve_forever(settings: Settings, sampling: Mapping[str, object], verbose: bool) -> None:
    """Bind first, so that a wrong address is said before a model is loaded."""
    from hetrun.server import listen

    sampling = usual_sampling(settings, sampling)
    if settings.aliases and settings.models:
        raise OptionError("--alias names a single model: it does not go with --models")
    remark_on_kubernetes()
    address = listen.ListenAddress(settings.host, port(settings), settings.uds)
    listen.check_exposure(address, settings.api_key)
    with listen.listening(address) as bound, requests_logged(verbose) as log, remarks_in(log):
        asyncio.run(_serve(settings, sampling, bound, address.hosts(settings.allowed_hosts), log))


def port(settings: Settings) -> int:
    """The port to listen on: one that was given, or else Ollama's if its clients should find the server."""
    is_given = settings.origin("port") != "default"
    return OLLAMA_PORT if settings.ollama and not is_given else settings.port


def usual_sampling(settings: Settings, sampling: Mapping[str, object]) -> dict[str, object]:
    """What holds for requests that do not say otherwise."""
    given = {"max_tokens": settings.max_tokens, "seed": settings.seed}
    if settings.max_tokens == 0:
        raise refused("max_tokens (--max-tokens)", 0, ANSWER_LENGTH)
    return {**{name: value for name, value in given.items() if value not in (None, -1)}, **sampling}


def remark_on_kubernetes() -> None:
    """Say it where a variable looks as if it set the port, but was set for a service of that name."""
    name = "HETRUN_PORT"
    if is_of_service(name, value := os.environ.get(name, "")):
        say(f"{name}={printable(value[:80])} is ignored: Kubernetes has set it for a service called hetrun")


@contextmanager
def requests_logged(everything: bool) -> Iterator[RequestLog]:
    """Lines of requests on standard error, like all remarks."""
    from hetrun.server.request_log import RequestLog

    log = RequestLog(write_line, everything=everything)
    try:
        yield log
    finally:
        log.close()


class LoggedRemarks(logging.Handler):
    """Remarks written by the thread of the request log: if standard error is not read, writing to it waits
    for ever, and so would every request if the event loop did that."""

    def __init__(self, log: RequestLog) -> None:
        super().__init__(REMARKS.level)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        REMARKS.said.add(text := record.getMessage())
        text = printable(text)
        if record.exc_info and record.exc_info[1]:
            import traceback  # on use: few warnings have one

            text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        self._log.put(text)


@contextmanager
def remarks_in(log: RequestLog) -> Iterator[None]:
    """Inside, warnings of hetrun and of the HTTP server go into the log."""
    hetrun, http = logging.getLogger("hetrun"), logging.getLogger("uvicorn")
    handler = LoggedRemarks(log)
    hetrun.removeHandler(REMARKS)
    for logger in (hetrun, http):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in (hetrun, http):
            logger.removeHandler(handler)
        hetrun.addHandler(REMARKS)


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
    # What is wrong is said before a model is loaded.
    folder_of("--slot-save-path", settings.slot_save_path)
    folder_of("--media-path", settings.media_path)
    shelf = shelf_of(settings)
    async with AsyncExitStack() as ends:
        ends.push_async_callback(shelf.close)
        if only := shelf.only:
            only.begin()
        # Imported while the worker loads, as is what the app consists of.
        from hetrun.server import listen

        app = app_of(settings, only if only and not shelf.shares else shelf, sampling, hosts, log)

        if shelf.shares:
            from hetrun.memory.ledger import granted

            shelf.allow(granted(settings.ram).nbytes)
        stop = asyncio.Event()
        listen.stop_on_signals(stop)
        await ends.enter_async_context(listed(shelf, stop, settings, listen.url(bound)))
        if only:
            await loaded(only, stop, remark=True)
            if stop.is_set():
                return
            info = await only.info()
            SamplingParams.from_mapping(sampling).check_vocabulary(info.n_vocab)

        def started() -> None:
            all_of_this_lasts()
            named = f" as {', '.join(settings.aliases)}" if settings.aliases else ""
            what = f"{info.id}{named}" if only else in_words(list(shelf.models))
            say(f"{what} on {listen.url(bound)}/v1 (Ctrl-C stops)")
            if bound.family != socket.AF_UNIX:
                say(f"a chat for browsers: {listen.url(bound)}/")
            if only:
                say(f"chat template: {info.template_origin}")

        await listen.serve(app, bound, stop, started, shelf.close)
        await shelf.close()  # while it is listed: who stops it hears when its memory is free


def app_of(
    settings: Settings,
    client: ChatClient | ModelPool,
    sampling: Mapping[str, object],
    hosts: Iterable[str] | None,
    log: RequestLog,
) -> Starlette:
    """The server with these settings."""
    from hetrun.server.app import create_app
    from hetrun.server.pictures.sources import Sources
    from hetrun.tools.model_library import LocalLibrary

    return create_app(
        client,
        strict=settings.strict,
        api_key=settings.api_key,
        sampling=sampling,
        most_requests=settings.queue + BESIDE,
        hosts=hosts,
        origins=settings.cors_origins,
        tool_parser=settings.tool_parser,
        reasoning_format=settings.reasoning_format,
        slot_save_path=folder_of("--slot-save-path", settings.slot_save_path),
        log=log,
        pictures=Sources.of(folder_of("--media-path", settings.media_path), settings.media_domains),
        library=LocalLibrary(ctx=settings.ctx, offline=settings.offline),
        ollama_client=settings.ollama,
        keep_billing_header=settings.keep_billing_header,
        aliases=settings.aliases,
    )


def folder_of(option: str, path: Path | None) -> Path | None:
    """The folder that an option names, without symbolic links on the way to it."""
    if path is None:
        return None
    path = path.expanduser()
    if not path.is_dir():
        raise OptionError(f"{option} {printable(str(path))}: the folder does not exist; create it")
    return path.resolve()


def in_words(names: Sequence[str]) -> str:
    """How many models, and the names of the first."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{counted(len(names), 'model')} ({', '.join(names[:MOST_NAMED])}{more})"


@asynccontextmanager
async def listed(shelf: ModelPool, stop: asyncio.Event, settings: Settings, url: str) -> AsyncIterator[None]:
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


def shelf_of(settings: Settings) -> ModelPool:
    """The models that are offered: one that was named; several, loaded on demand within one budget; or, if
    none was named, all that `hetrun list` shows."""
    if settings.models:
        if settings.prompt_cache:
            raise OptionError("--prompt-cache is a file of one model: it does not go with --models")
        if _names_a_tower(settings):
            raise OptionError("--mmproj FILE belongs to one model: put each model's mmproj file beside it")
        named = [*([settings.model] if settings.model else []), *settings.models]
        return _several(settings, find_models(named))
    from hetrun.loader.hub.catalog import StoredModels, name_in_list

    if settings.model is None and (catalog := StoredModels(say)).found():
        models = catalog.found()
        of_one = {
            "--plan": settings.plan is not None,
            "--prompt-cache": settings.prompt_cache is not None,
            "--mmproj": _names_a_tower(settings),
        }
        if not any(of_one.values()):
            return _several(settings, models, catalog)
        if len(models) > 1:
            flag = next(flag for flag, given in reversed(of_one.items()) if given)
            raise OptionError(f"{flag} is a file of one model: name the model with -m")
        settings = _for(settings, str(next(iter(models.values())).path), settings.ram)
    place = Path(settings.model).expanduser() if settings.model else default_model()

    def alone(found: CatalogModel, ram: int | None) -> ChatClient:
        return WorkerClient(settings if ram is None else _for(settings, settings.model, ram))

    named_alone = CatalogModel(name_in_list(place), place, 0)
    return ModelPool([named_alone], alone, idle_s=settings.sleep_idle)


def _names_a_tower(settings: Settings) -> bool:
    return settings.mmproj not in (None, "none")


def _several(
    settings: Settings, models: Mapping[str, CatalogModel], catalog: ModelCatalog | None = None
) -> ModelPool:
    """Several models, and those of the catalog that come later."""

    def one_of_several(found: CatalogModel, ram: int | None) -> ChatClient:
        return WorkerClient(_for(settings, str(found.path), settings.ram if ram is None else ram))

    return ModelPool(
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


async def loaded(client: ChatClient, stop: asyncio.Event, remark: bool = False) -> None:
    """Wait with a bar until the model is loaded, or until it is asked to stop. Where there is no bar, as in
    a log, a `remark` says what takes so long."""
    ready = asyncio.ensure_future(client.info())
    asked = asyncio.ensure_future(stop.wait())
    long_at = monotonic() + LONG_S
    try:
        with loading(OPENING) as tell:
            while not ready.done() and not asked.done():
                await asyncio.wait((ready, asked), timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                if tell:
                    tell(client.progress)
                elif remark and monotonic() > long_at and not ready.done():
                    remark = False
                    say("the model is being loaded; the address is open once that is done")
        if ready.done():
            ready.result()
    finally:
        ready.cancel()
        asked.cancel()
