"""What plugins may hook into: pluggy's contract, and the marker that their functions carry.

A plugin is a module, or an object, that a package registers in the entry point group `hetrun.plugins`. Its
functions may take some of the arguments that stand here, under these names. They are called in the process of
the front (the command, the server, the chat, or a program with an `LLM`), one after the other on a thread of
their own: what they do costs no token, and what they raise ends no answer. Who raises is left out from then
on.
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
        """Somebody asks for an answer, which may have to wait for its turn."""

    @hookspec
    def hetrun_answered(self, request: GenerateRequest, last: Event, info: ModelInfo | None) -> None:
        """An answer is complete, was stopped (`finish_reason` is cancelled) or failed (`error`): its last
        event, with what it used and how long that took. `info`: the model, if it was ever loaded."""

    @hookspec
    def hetrun_routes(self, client: ChatClient) -> Sequence[BaseRoute]:
        """Endpoints that the server shall have besides its own; `client` answers what they ask. Called once,
        when the server starts; ours go first where paths are the same."""
        return ()
