"""Other screens that the chat opens, and what becomes of what is chosen there."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Mapping

from textual import on, work
from textual.screen import Screen
from textual.worker import Worker, WorkerState

from hetrun.client import ChatClient
from hetrun.config.values import parse_size
from hetrun.errors import UserError
from hetrun.questions import SetRam
from hetrun.tui.doors import Doors
from hetrun.tui.screens.dialogs import Choice, Choose
from hetrun.tui.screens.help import HelpScreen
from hetrun.tui.screens.settings import Chosen, SettingsScreen
from hetrun.tui.screens.template import TemplateScreen
from hetrun.tui.screens.whatif import WhatIfScreen
from hetrun.tui.talk import Talk


class Sights(Screen[None]):
    """The part of the chat screen that looks at the engine and changes it."""

    client: ChatClient
    talk: Talk
    doors: Doors

    def load(self) -> None: ...
    def free(self) -> None: ...

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    @work(group="dialog", exit_on_error=False)
    async def action_settings(self) -> None:
        screen = SettingsScreen(self.talk)
        chosen: Chosen | None = await self.app.push_screen_wait(screen)
        if chosen is not None:
            self.talk.choose(chosen.system, chosen.sampling)

    def action_template(self) -> None:
        self.app.push_screen(TemplateScreen(self.client, self.talk.messages(self.talk.tree.leaf)))

    @work(group="dialog", exit_on_error=False)
    async def action_what_if(self) -> None:
        screen = WhatIfScreen(self.client, self.doors.reopen is not None)
        if changes := await self.app.push_screen_wait(screen):
            await self._apply(changes)

    @work(group="dialog", exit_on_error=False)
    async def action_model(self, name: str = "") -> None:
        if self.doors.models is None:
            raise UserError("the model is the server's: start the chat with another --url for another one")
        if not name:
            models = await to_thread(self.doors.models)
            choices = [Choice(m.path, f"{m.label}  {m.size}") for m in models]
            chosen = await self.app.push_screen_wait(Choose("Which model?", choices))
            name = chosen or ""
        if name:
            await self._apply({"model": name})

    async def _apply(self, changes: Mapping[str, object]) -> None:
        """Memory is given and taken while the engine runs; for all else it begins anew."""
        self.free()
        if set(changes) == {"ram"}:
            await self.client.ask(SetRam(parse_size(changes["ram"], "ram")))
            self.notify("Applied", timeout=2)
            return
        if self.doors.reopen is None:
            raise UserError("this engine is not ours to change")
        client = self.doors.reopen(changes)  # which may refuse; then the old one goes on
        old, self.client = self.client, client
        self.load()
        await old.close()

    @work(group="dialog", exit_on_error=False)
    async def action_theme(self, name: str = "") -> None:
        known = sorted(self.app.available_themes)
        if not name:
            choices = [Choice(theme, theme) for theme in known]
            chosen = await self.app.push_screen_wait(Choose("Colours", choices, self.app.theme))
            name = chosen or ""
        if name and name not in known:
            raise UserError(f"there is no theme {name}; known: {', '.join(known)}")
        if name:
            self.app.theme = name
            self.talk.store.save_choice("theme", name)

    @on(Worker.StateChanged)
    def _dialog_failed(self, message: Worker.StateChanged) -> None:
        if message.worker.group == "dialog" and message.state is WorkerState.ERROR:
            self.notify(str(message.worker.error), severity="error", timeout=6)
