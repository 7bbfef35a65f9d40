"""The server that an agent uses: one that was named, one of this user's that runs, or one that is started."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath
from time import sleep
from typing import IO

from hetrun.client import local_servers
from hetrun.client.http_client import RemoteClient
from hetrun.client.local_servers import RunningServer, ServedModel
from hetrun.client.model_catalog import name_of
from hetrun.config import Settings
from hetrun.errors import OptionError, UserError
from hetrun.loader.hub.catalog import StoredModels, name_in_list
from hetrun.loader.hub.resolve import find
from hetrun.system.subprocesses import ending, python, wait

Say = Callable[[str], None]
Tell = Callable[[float], object]  # the share of a model that is loaded

POLL_S = 0.1  # how often a server that starts is looked for
STOP_S = 20.0  # for a server that was asked to end
MOST_LOG = 64 << 10  # bytes of its log that are read
OF_A_SERVER = ("ctx", "ram")  # options that a running server cannot change
PLANNED = "http://127.0.0.1:8080"  # where `hetrun serve` listens


@dataclass(frozen=True)
class ServerModel:
    """A model of a server."""

    url: str
    model: str | None  # None: the only one, or the one that is loaded
    context: int = 0
    pid: int = 0  # of a server of this user; 0: one elsewhere, or one that does not run
    is_loaded: bool = True  # as far as is known


def named(settings: Settings) -> ServerModel | None:
    """The server of --url, or one of this user's that has the model; None: one has to be started."""
    own = [name for name in OF_A_SERVER if settings.origin(name) == "explicit"]
    if settings.url is not None:
        if own:
            raise OptionError(f"--{own[0]} is for a server that is started here: leave it out, or --url")
        return ServerModel(settings.url, settings.model)
    if own:
        return None
    wanted = spellings(settings.model)
    locked = ""
    for server, model in _models(local_servers.running_servers()):
        assert server.facts is not None
        if wanted and model.name not in wanted:
            continue
        if server.facts.needs_key and not settings.api_key:
            locked = locked or server.facts.address
            continue
        is_alone = len(server.facts.models) == 1
        if wanted or is_alone or model.status == "loaded":
            is_loaded = model.status == "loaded"
            return ServerModel(server.facts.address, model.name, pid=server.pid, is_loaded=is_loaded)
    if locked:
        raise OptionError(f"the server on {locked} needs its key: give it with --api-key")
    return None


def _models(servers: Sequence[RunningServer]) -> Iterator[tuple[RunningServer, ServedModel]]:
    """Models that an agent can reach, loaded ones first. No agent takes a Unix socket."""
    found = [
        (server, model)
        for server in servers
        if server.facts and server.facts.address.startswith("http")
        for model in server.facts.models
    ]
    yield from sorted(found, key=lambda one: one[1].status != "loaded")


def spellings(model: str | None) -> set[str]:
    """The names that a server may have for a model; empty if none is named."""
    if model is None:
        return set()
    names = {model, name_of(PurePath(model))}
    with suppress(UserError):
        names.add(name_in_list(find(model, allowed=False)))
    return names


def planned(settings: Settings) -> ServerModel:
    """The server as it would be started."""
    if settings.model is not None:
        with suppress(UserError):
            return ServerModel(PLANNED, name_in_list(find(settings.model, allowed=False)))
        return ServerModel(PLANNED, settings.model)
    models = list(StoredModels().found())
    if not models:
        raise UserError("there is no model on this machine: hetrun pull user/repo downloads one")
    if len(models) > 1:
        raise OptionError(f"choose a model with -m: {', '.join(models[:10])}{', ...' if models[10:] else ''}")
    return ServerModel(PLANNED, models[0])


def serve_arguments(settings: Settings, model: str) -> list[str]:
    """The arguments of `hetrun serve`, besides where it listens."""
    arguments = ["serve", "-m", settings.model or model]
    for name, flag in (("ctx", "-c"), ("ram", "--ram")):
        if settings.origin(name) == "explicit":
            arguments += [flag, str(getattr(settings, name))]
    return arguments


def seen(choice: ServerModel, key: str | None, say: Say) -> ServerModel:
    """The same with the name and the context of its model, which is loaded for that."""

    async def look() -> ServerModel:
        client = RemoteClient(choice.url, api_key=key, model=choice.model, tell=say)
        info = await client.info()
        if client.is_guess:
            names = ", ".join(model.id for model in await client.models())
            raise OptionError(f"{choice.url} has several models; choose one with -m: {names}")
        return ServerModel(choice.url, client.model, info.context, choice.pid)

    return asyncio.run(look())


@contextmanager
def started(settings: Settings, model: str, keep: bool, tell: Tell | None = None) -> Iterator[ServerModel]:
    """A server of its own, which ends with the context unless it is to be kept. `tell` hears how far loading
    has come."""
    where = ("--host", "127.0.0.1", "--port", "0")
    command = python("from hetrun.cli import main; main()", *serve_arguments(settings, model), *where)
    env = {name: value for name, value in os.environ.items() if name != "HETRUN_UDS"}
    env |= {"HETRUN_API_KEY": settings.api_key} if settings.api_key else {}
    with tempfile.TemporaryFile() as log:
        # In a session of its own: Ctrl-C is for the agent.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )
        kept = False
        try:
            yield _ready(process, log, model, tell)
            kept = keep
        finally:
            if not kept:
                _end(process)


def _ready(process: subprocess.Popen[bytes], log: IO[bytes], model: str, tell: Tell | None) -> ServerModel:
    """Its address, when its model is loaded; several are loaded on demand."""
    while True:
        if (code := process.poll()) is not None:
            raise UserError(f"hetrun serve {ending(code)}: {_last_line(log)}")
        for server in local_servers.running_servers(local_servers.HASTE_S, is_brief=True):
            facts = server.facts
            if facts is None or facts.pid != process.pid:
                continue
            if tell:
                tell(facts.models[0].progress)
            names = [one.name for one in facts.models]
            if len(names) > 1 or facts.models[0].status == "loaded":
                return ServerModel(facts.address, model if model in names else names[0], pid=process.pid)
        sleep(POLL_S)


def _last_line(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - MOST_LOG))
    lines = log.read().decode(errors="replace").splitlines()
    return lines[-1].removeprefix("hetrun: ") if lines else "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        wait(process, STOP_S)
    except TimeoutError:
        process.kill()
        process.wait()
