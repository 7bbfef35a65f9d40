"""The hooks for plugins, as pluggy specifications, and the marker for their functions.

A plugin is a module or object that a package registers in the entry point group `hetrun.plugins`. Its
functions may take any of the arguments listed here, by name. They are called in the front end's process (the
command, the server, the chat, or a program with an `LLM`), one after the other on a thread of their own, so
they delay no token, and an exception ends no answer. A plugin that raises is disabled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

from hetrun.client.events import Event, GenerateRequest, ModelInfo
from hetrun.system.entry_points import OURS

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from hetrun.client.interface import ChatClient

hookspec = pluggy.HookspecMarker(OURS)
hookimpl = pluggy.HookimplMarker(OURS)


class Hooks:
    """The hooks."""

    @hookspec
    def hetrun_asked(self, request: GenerateRequest) -> None:
        """An answer is requested; it may have to wait for its turn."""

    @hookspec
    def hetrun_answered(self, request: GenerateRequest, last: Event, info: ModelInfo | None) -> None:
        """An answer is complete, was stopped (`finish_reason` is cancelled) or failed (`error`): its last
        event, with what it used and how long that took. `info`: the model, if it was ever loaded."""

    @hookspec
    def hetrun_routes(self, client: ChatClient) -> Sequence[BaseRoute]:
        """Additional endpoints of the server; they use `client` to reach the engine. Called once, when the
        server starts. If paths are the same, the server's own endpoint wins."""
        return ()
