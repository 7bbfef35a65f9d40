"""A server in a thread of this process, for commands that ask one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hetrun.client.interface import ChatClient
from hetrun.server import listen
from hetrun.server.app import create_app


@contextmanager
def served(client: ChatClient, place: listen.Address, **options: object) -> Iterator[str]:
    """Its URL, until the block ends; `options` are those of `create_app`."""
    begun = threading.Event()
    ends: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        ends.append((asyncio.get_running_loop(), stop))
        app = create_app(client, **options)  # type: ignore[arg-type]
        await listen.serve(app, bound, stop, begun.set)

    with listen.listening(place) as bound:
        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            assert begun.wait(60)
            yield listen.url(bound)
        finally:
            loop, stop = ends[0]
            loop.call_soon_threadsafe(stop.set)
            thread.join()
