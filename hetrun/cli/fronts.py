"""`hetrun serve` and `hetrun chat`: fronts over an engine in a process of its own."""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
from collections.abc import Mapping

from hetrun.cli import sampling_options, say
from hetrun.cli.progress import OPENING, loading
from hetrun.client import ChatClient, WorkerClient
from hetrun.config import Settings
from hetrun.errors import UserError
from hetrun.params import SamplingParams

BESIDE = 256  # requests held besides those that the queue has room for: read, or answered
POLL_S = 0.1  # how often the bar looks at how far loading has come


def serve_forever(settings: Settings, sampling: Mapping[str, object], verbose: bool) -> None:
    """Bind first, so that a wrong address is said before a model is loaded."""
    from hetrun.server import listen

    address = listen.Address(settings.host, settings.port, settings.uds)
    listen.check_exposure(address, settings.api_key)
    with listen.listening(address) as bound:
        asyncio.run(_serve(settings, sampling, bound, verbose))


async def _serve(
    settings: Settings, sampling: Mapping[str, object], bound: socket.socket, verbose: bool
) -> None:
    client = WorkerClient(settings)
    try:
        # Imported while the worker loads.
        from hetrun.server import listen
        from hetrun.server.app import create_app

        stop = asyncio.Event()
        listen.stop_on_signals(stop)
        await _loaded(client, stop)
        if stop.is_set():
            return
        info = await client.info()
        SamplingParams.from_mapping(sampling).check_vocabulary(info.n_vocab)
        app = create_app(
            client,
            strict=settings.strict,
            api_key=settings.api_key,
            sampling=sampling,
            most_requests=settings.queue + BESIDE,
        )

        def started() -> None:
            say(f"{info.id} on {listen.url(bound)}/v1 (Ctrl-C stops)")
            say(f"chat template: {info.template_origin}")

        await listen.serve(app, bound, stop, started, access_log=verbose)
    finally:
        await client.close()


async def _loaded(client: ChatClient, stop: asyncio.Event) -> None:
    """Wait until the model is loaded, or until somebody asks to stop."""
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


def talk(settings: Settings, sampling: Mapping[str, object]) -> int:
    """The terminal chat and its exit code; what the engine prints goes to a file, for the screen is taken."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("chat needs a terminal; to answer a prompt from a pipe or a script: hetrun run")
    params = sampling_options.params_of(settings, sampling)
    with tempfile.TemporaryFile() as log:
        client = WorkerClient(settings, log=log)
        try:
            # Imported while the worker loads.
            from hetrun.tui.app import ChatApp

            app = ChatApp(client, params, settings.system)
            app.run()
        finally:
            asyncio.run(client.close())
    if app.load_error is not None:
        raise app.load_error
    return app.return_code or 0
