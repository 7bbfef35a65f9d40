"""What a server says at its control socket, to `hetrun ps` and `hetrun stop`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from hetrun import __version__
from hetrun.client.local_servers import STATUS, STOP, control_socket
from hetrun.errors import OptionError

log = logging.getLogger(__name__)

ASK_S = 5.0  # in which whoever connects says what he wants
MOST_LINE = 64  # bytes

Status = Callable[[], dict[str, object]]


@asynccontextmanager
async def controlled(stop: asyncio.Event, status: Status) -> AsyncIterator[None]:
    """While this lasts the server is found. Who asks it to stop sets `stop`, and hears the end of it.

    One that cannot be found serves all the same.
    """
    ends, tasks = asyncio.Event(), set[asyncio.Task[None]]()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(_answer(reader, writer, stop, ends, status))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async with AsyncExitStack() as stack:
        try:
            listener = stack.enter_context(control_socket())
            server = await asyncio.start_unix_server(connected, sock=listener, limit=MOST_LINE)
        except (OSError, OptionError) as error:
            log.info("hetrun ps and hetrun stop will not find this server: %s", error)
        else:
            stack.callback(server.close)
        try:
            yield
        finally:
            ends.set()
            await asyncio.gather(*tasks)


async def _answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    stop: asyncio.Event,
    ends: asyncio.Event,
    status: Status,
) -> None:
    try:
        with suppress(OSError, ValueError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                asked = await reader.readline()
            if asked not in (STATUS, STOP):
                return
            if asked == STOP:
                log.info("asked to stop by hetrun stop")
                stop.set()
            said = {**status(), "pid": os.getpid(), "version": __version__}
            writer.write(json.dumps(said).encode() + b"\n")
            async with asyncio.timeout(ASK_S):
                await writer.drain()
            if asked == STOP:
                await ends.wait()
    finally:
        writer.close()
