"""`--workers`: servers elsewhere, and the places that packages bring for a scheme."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

from hetrun.cli.output import say
from hetrun.client.address import PORTS, Address, address
from hetrun.config import Settings
from hetrun.errors import BackendUnavailable, HetrunError, OptionError, PluginError
from hetrun.system import entry_points
from hetrun.tools.batch.http_worker import Worker
from hetrun.tools.batch.worker import Away, Place, Places, PluginPlace, Wanted

OURS = (*PORTS, "unix")  # schemes that packages cannot take over
# Packages that bring places for a scheme, to be named where they are not installed.
BRINGERS: Mapping[str, str] = {"ray": "hetrun-ray"}


@asynccontextmanager
async def elsewhere(urls: Sequence[str], settings: Settings) -> AsyncIterator[list[Place]]:
    """The places of `--workers`: servers, and what packages bring for a scheme."""
    theirs = {url: point for url in urls if (point := _bringer(url)) is not None}
    workers = [Worker(_plain(url), settings.api_key) for url in urls if url not in theirs]
    chosen = {name: getattr(settings, name) for name in settings.origins if name not in ("model", "api_key")}
    wanted = Wanted(settings.model, chosen, settings.api_key)
    async with AsyncExitStack() as stack:
        for worker in workers:
            stack.push_async_callback(worker.close)
        # First, because it is quick to see what is wrong there.
        places = await reached(workers, alone=not theirs)
        for url, point in theirs.items():
            where = url.partition(":")[2]
            if sys.stderr.isatty():  # engines may have to be started
                say(f"{url} is getting ready")
            places += await stack.enter_async_context(_brought(point, where, wanted))
        yield places


def _bringer(url: str) -> entry_points.PluginPoint | None:
    """What brings places for an address. Other packages cannot take over the schemes of hetrun itself."""
    scheme = url.partition(":")[0]
    return None if scheme in OURS else entry_points.find("workers", scheme)


def _plain(url: str) -> Address:
    scheme, colon, where = url.partition(":")
    try:
        return address(url, "--workers")
    except OptionError:
        if not colon or scheme in OURS or where[:1].isdecimal():  # a name and a port
            raise
        known = [f"{name}:" for name in entry_points.points("workers")]
        others = f", or begin with {' or '.join(known)}, which packages bring" if known else ""
        mend = f"; for {scheme}: pip install {BRINGERS[scheme]}" if scheme in BRINGERS else ""
        raise OptionError(
            f"--workers {url} must be like http://host:8080, or unix:PATH for a socket{others}{mend}"
        ) from None


@asynccontextmanager
async def _brought(
    point: entry_points.PluginPoint, where: str, wanted: Wanted
) -> AsyncIterator[Sequence[Place]]:
    """A package's places. Whatever it raises that is not for people is said of it."""

    def fault(why: str | BaseException) -> PluginError:
        said = why if isinstance(why, str) else entry_points.in_words(why)
        return PluginError(f"{entry_points.KINDS[point.group]} {point.name}:{where}", point.whose, said)

    ours: BaseException | None = None
    try:
        async with cast(Places, entry_points.load(point))(where, wanted) as found:
            places = [PluginPlace(place, fault) for place in found]
            if not places:
                raise fault("none of its workers answers")
            try:
                yield places
            except BaseException as error:
                ours = error
                raise
    except HetrunError:
        raise
    except entry_points.FAILURES as error:
        if error is ours:
            raise
        raise fault(error) from error


async def reached(workers: Sequence[Worker], alone: bool = True) -> list[Place]:
    """All, and a word on those that do not answer. UserError: none does and there are no others (`alone`), or
    they have different models."""
    models: dict[str, str] = {}
    found: list[Place] = []
    for worker in workers:
        try:
            models[worker.name] = await worker.look()
            found.append(worker)
        except Away as away:
            say(f"{away}; hetrun will try again")
            found.append(worker)
    if alone and not models:
        raise BackendUnavailable(
            f"no worker answers: start one with hetrun serve, or check {workers[0].name}"
        )
    if len(set(models.values())) > 1:
        which = ", ".join(f"{name} has {model or 'no model'}" for name, model in models.items())
        raise OptionError(f"the workers have different models: {which}")
    return found
