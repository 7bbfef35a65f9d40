"""`hetrun chat`: the terminal chat over an engine in a process of its own, or over a running server."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from hetrun.cli import sampling_options
from hetrun.cli.exit_codes import OUR_FAULT
from hetrun.cli.output import say
from hetrun.client.engine_client import WorkerClient
from hetrun.client.interface import ChatClient
from hetrun.client.worker_main import CHAT
from hetrun.config import Settings, dirs
from hetrun.errors import UserError
from hetrun.system.units import format_bytes

if TYPE_CHECKING:  # textual loads while the worker does
    from hetrun.tui.host import Doors, Opening, Tell

KEPT = "conversations.db"


def talk(settings: Settings, sampling: Mapping[str, object]) -> int:
    """The terminal chat and its exit code; what the engine prints goes to a file, for the screen is taken."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("chat needs a terminal; to answer a prompt from a pipe or a script: hetrun run")
    params = sampling_options.params_of(settings, sampling)
    with tempfile.TemporaryFile() as log:
        with ExitStack() as ends:
            client = _client(settings, log)
            ends.callback(lambda: asyncio.run(client.close()))
            # Imported while the worker loads.
            from hetrun.tui.app import ChatApp

            place = dirs().data / KEPT
            reports = dirs().state / "reports"
            app = ChatApp(client, params, settings.system, place, _doors(settings, log), reports)
            ends.callback(lambda: asyncio.run(app.client.close()))  # which may be another one by then
            app.run()
    if app.fault:
        say(f"{app.fault}. Every conversation was saved")
        return OUR_FAULT
    if app.load_error is not None:
        raise app.load_error
    return app.return_code or 0


def _client(settings: Settings, log: BinaryIO) -> ChatClient:
    if settings.url is None:
        return WorkerClient(settings, log=log, engine=CHAT)
    from hetrun.client.http_client import RemoteClient

    return RemoteClient(settings.url, api_key=settings.api_key, model=settings.model, api=settings.api)


def _doors(settings: Settings, log: BinaryIO) -> Doors:
    """Other models and other options; of a running server, its other models."""
    from hetrun.tui.host import Doors, HostModel

    if settings.url is not None:
        return doors_of_server(settings, settings.url)

    def reopen(changes: Mapping[str, object], tell: Tell) -> Opening:
        return partial(WorkerClient, changed(settings, changes, tell), log=log)

    def models() -> list[HostModel]:
        from hetrun.loader.hub.stores import available

        found = available(warn=lambda _: None)
        return [HostModel(model.name, str(model.path), format_bytes(model.size)) for model in found]

    return Doors(reopen, models)


def doors_of_server(settings: Settings, url: str) -> Doors:
    """Other models of a server."""
    from hetrun.client.http_client import RemoteClient
    from hetrun.tui.host import Doors, HostModel

    def client(model: str | None) -> RemoteClient:
        return RemoteClient(url, api_key=settings.api_key, model=model, api=settings.api)

    def reopen(changes: Mapping[str, object], tell: Tell) -> Opening:
        return partial(client, str(changes["model"]) if "model" in changes else settings.model)

    def models() -> list[HostModel]:
        found = asyncio.run(client(None).models())
        return [HostModel(m.id, m.path, format_bytes(m.file_bytes) if m.file_bytes else "") for m in found]

    return Doors(reopen, models, is_server=True)


def changed(settings: Settings, changes: Mapping[str, object], tell: Tell) -> Settings:
    """The same settings with some options as the user typed them; an OptionError if one makes no sense."""
    from hetrun.loader.hub.resolve import find

    typed = Settings.resolve(environ={}, **changes)
    values = {name: getattr(typed, name) for name in changes}
    if model := values.get("model"):
        values["model"] = str(find(str(model), not settings.offline, tell))
    origins = {**settings.origins, **dict.fromkeys(changes, "explicit")}
    return replace(settings, **values, origins=origins)
