"""`hetrun serve` and `hetrun chat`: fronts over an engine in a process of its own."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import ExitStack

from hetrun.cli.progress import loading
from hetrun.client import ChatClient, WorkerClient
from hetrun.config import Settings
from hetrun.params import SamplingParams

POLL_S = 0.1  # how often the bar looks at how far loading has come


def serve_forever(settings: Settings, verbose: bool) -> None:
    """Bind first, so that a wrong address is said before a model is loaded."""
    from hetrun.server import listen

    address = listen.Address(settings.host, settings.port, settings.uds)
    listen.check_exposure(address, settings.api_key)
    with ExitStack() as undo:
        bound = undo.enter_context(listen.bind(address))
        asyncio.run(_serve(settings, bound, verbose))


async def _serve(settings: Settings, bound: object, verbose: bool) -> None:
    import socket

    from hetrun.server import listen
    from hetrun.server.app import create_app

    assert isinstance(bound, socket.socket)
    stop = asyncio.Event()
    listen.stop_on_signals(stop)
    client = WorkerClient(settings)
    try:
        await _loaded(client, stop)
        if stop.is_set():
            return
        app = create_app(client, strict=settings.strict, api_key=settings.api_key)
        name = (await client.info()).name

        def started() -> None:
            print(f"hetrun: {name} on {listen.url(bound)}/v1 (Ctrl-C stops)", file=sys.stderr)

        await listen.serve(app, bound, stop, started, access_log=verbose)
    finally:
        await client.close()


async def _loaded(client: ChatClient, stop: asyncio.Event) -> None:
    """Wait until the model is loaded, or until somebody asks to stop."""
    ready = asyncio.ensure_future(client.info())
    asked = asyncio.ensure_future(stop.wait())
    try:
        with loading("loading") as tell:
            while not ready.done() and not asked.done():
                await asyncio.wait((ready, asked), timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                if tell:
                    tell(client.progress)
        if ready.done():
            ready.result()
    finally:
        ready.cancel()
        asked.cancel()


def talk(settings: Settings) -> None:
    """The terminal chat; what the engine prints goes to a file, for the screen is taken."""
    from hetrun.tui.app import ChatApp

    params = SamplingParams(
        max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed
    )
    with tempfile.TemporaryFile() as log:
        app = ChatApp(WorkerClient(settings, log=log), params, settings.system)
        app.run()
        if app.load_error is not None:
            raise app.load_error
