"""`hetrun chat`: the terminal chat over an engine in a process of its own, or over a running server."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO

from hetrun.cli import sampling_options
from hetrun.client import ChatClient, WorkerClient
from hetrun.config import Settings, dirs
from hetrun.errors import UserError

if TYPE_CHECKING:  # textual loads while the worker does
    from hetrun.tui.doors import Doors

KEPT = "conversations.db"


def talk(settings: Settings, sampling: Mapping[str, object]) -> int:
    """The terminal chat and its exit code; what the engine prints goes to a file, for the screen is taken."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("chat needs a terminal; to answer a prompt from a pipe or a script: hetrun run")
    params = sampling_options.params_of(settings, sampling)
    with tempfile.TemporaryFile() as log:
        client = _client(settings, log)
        try:
            # Imported while the worker loads.
            from hetrun.tui.app import ChatApp

            place = dirs().data / KEPT
            app = ChatApp(client, params, settings.system, place, _doors(settings, log))
            app.run()
            client = app.client
        finally:
            asyncio.run(client.close())
    if app.load_error is not None:
        raise app.load_error
    return app.return_code or 0


def _client(settings: Settings, log: BinaryIO) -> ChatClient:
    if settings.url is None:
        return WorkerClient(settings, log=log)
    from hetrun.remote import RemoteClient

    return RemoteClient(settings.url, api_key=settings.api_key, model=settings.model)


def _doors(settings: Settings, log: BinaryIO) -> Doors:
    """Other models and other options; those of a running server are its own."""
    from hetrun.tui.doors import Doors, Offered

    if settings.url is not None:
        return Doors()
    now = settings

    def reopen(changes: Mapping[str, object]) -> ChatClient:
        nonlocal now
        found = changed(now, changes)
        client = WorkerClient(found, log=log)
        now = found
        return client

    def models() -> list[Offered]:
        from hetrun.cli.inspection import size
        from hetrun.hub.stores import stored

        found = stored(warn=lambda _: None)
        return [Offered(model.name, str(model.path), size(model.size)) for model in found]

    return Doors(reopen, models)


def changed(settings: Settings, changes: Mapping[str, object]) -> Settings:
    """The same with some options as somebody has typed them; an OptionError if one makes no sense."""
    from hetrun.cli.options import placed_model

    typed = Settings.resolve(environ={}, **changes)
    values = {name: getattr(typed, name) for name in changes}
    if values.get("model"):
        values["model"] = placed_model(str(values["model"]), settings.offline)
    origins = {**settings.origins, **dict.fromkeys(changes, "explicit")}
    return replace(settings, **values, origins=origins)
