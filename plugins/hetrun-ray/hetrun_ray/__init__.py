"""hetrun's batches on a Ray cluster: `hetrun run -f FILE -o OUT --workers ray:auto`.

    hetrun's process     link.py      a place for each node, and the pipe to
    Ray's driver         cluster.py   an actor on each node, and another one when it is lost
    an actor             engine.py    starts and asks
    `hetrun serve`       serving.py   on a private socket, for as long as its actor lives

Ray's driver is a process of its own because Ray ends the process that it is in when the cluster is gone, and
prints what it likes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from hetrun.client.address import address
from hetrun.errors import BackendUnavailable, OptionError
from hetrun.tools.batch.worker import Place, Wanted

WHERE = re.compile(r"auto|(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):[0-9]{1,5}")

_one = threading.Lock()  # an address stands for all nodes: a second one would start each engine twice


@asynccontextmanager
async def places(where: str, wanted: Wanted) -> AsyncIterator[Sequence[Place]]:
    """A place for each node of a cluster, as soon as the first one is ready."""
    from hetrun_ray.link import DriverLink
    from hetrun_ray.options import for_engines

    if not WHERE.fullmatch(where):
        raise OptionError(
            f"--workers ray:{where}: give ray:auto on a machine of the cluster, or ray:HOST:PORT as "
            "`ray start --head` printed it"
        )
    begin = for_engines(where, wanted)
    if not _one.acquire(blocking=False):
        raise OptionError("--workers has two addresses with ray: one stands for the whole cluster")
    try:
        await _reached(where)
        async with DriverLink() as link:
            yield await link.begin(begin)
    finally:
        _one.release()


async def _reached(where: str) -> None:
    """Whether something listens there: Ray would try for minutes."""
    if where == "auto":
        return
    try:
        _, writer = await address(f"http://{where}", "--workers").connected()
    except OSError as error:
        raise BackendUnavailable(
            f"--workers ray:{where}: nothing listens there ({error}); `ray start --head` begins a cluster"
        ) from None
    writer.close()
