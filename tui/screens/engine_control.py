"""The engine that the chat talks to: its loading, and another one in its place."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event

from textual.screen import Screen
from textual.timer import Timer

from hetrun.client.events import ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.client.queries import SetRam
from hetrun.errors import HetrunError, UserError
from hetrun.option_types import parse_size
from hetrun.tui.host import Doors, HostModel, Opening
from hetrun.tui.notices import ChatNotices
from hetrun.tui.screens.dialogs import Choose, DialogChoice, TextDialog
from hetrun.tui.screens.whatif import WhatIfScreen
from hetrun.tui.widgets.status import StatusLine
from hetrun.tui.widgets.welcome import Welcome
from hetrun.tui.workers import begin_work

EXCHANGING = "one moment: the engine before the next one ends"
ANOTHER = "another"  # all other names are whole paths
WHICH = "a .gguf file, a folder, ollama:NAME, or hf:user/repo:TYPE, which is downloaded"


def percent(part: float, before: str) -> str:
    """How far it has come, after this; nothing where it has not begun, or a server does not say."""
    return f"{before}{100 * part:.0f} %" if part else ""


class EngineControl:
    """The client in use, the model it has loaded, and the way to other options or another model."""

    def __init__(
        self,
        screen: Screen[None],
        client: ChatClient,
        doors: Doors,
        notices: ChatNotices,
        *,
        on_loaded: Callable[[ModelInfo], None],
        on_known: Callable[[ModelInfo], None],
        on_failure: Callable[[str], None],
        note: Callable[[str], None],
        free: Callable[[], None],
    ) -> None:
        """`on_loaded`: there is a model; `on_known`: more is known of the same one; `note` writes down why
        something changed; `free` ends what is being written."""
        self.client = client
        self.doors = doors
        self.options: Mapping[str, object] = {}  # of the engine, that are not as the command line has them
        self.bringing = False  # a model is on its way from elsewhere
        self.exchanging = False  # one engine ends, and the next has not begun
        self.info: ModelInfo | None = None  # None: there is no model yet
        self.load_error: Exception | None = None
        self._screen = screen
        self._notices = notices
        self._on_loaded, self._on_known, self._on_failure = on_loaded, on_known, on_failure
        self._note = note
        self._free = free
        self._sound: Mapping[str, object] | None = None  # those of the last engine that could be loaded
        self._unwanted = Event()
        self._brought = ""  # what was said of it last
        self._ticking: Timer | None = None

    @property
    def context(self) -> int:
        """Tokens; 0 where there is no model."""
        return self.info.context if self.info else 0

    def try_options(self, rate: float) -> None:
        """The what-if screen; `rate`: tokens per second of the last answer."""
        begin_work(self._screen, partial(self._try_options, rate), group="dialog")

    async def _try_options(self, rate: float) -> None:
        can_apply = self.doors.reopen is not None and not self.doors.is_server
        screen = WhatIfScreen(self.client, can_apply, rate)
        if changes := await self._screen.app.push_screen_wait(screen):
            await self._apply(changes)

    def choose_model(self, name: str = "") -> None:
        """Another model: this one, or the one that the user chooses."""
        if self.doors.models is None:
            raise UserError(
                "the server chooses the model: for another model, start the chat with another --url"
            )
        choose = partial(self._choose_model, name, self.doors.models)
        begin_work(self._screen, choose, group="dialog")

    async def _choose_model(self, name: str, models: Callable[[], Sequence[HostModel]]) -> None:
        if found := name or await self._chosen_model(models):
            try:
                await self._apply({"model": found})
            except HetrunError:
                self._notices.give_back(f"/model {found}")
                raise

    async def _chosen_model(self, models: Callable[[], Sequence[HostModel]]) -> str | None:
        choices = [DialogChoice(m.path, f"{m.label}  {m.size}") for m in await to_thread(models)]
        if not self.doors.is_server:
            choices.append(DialogChoice(ANOTHER, "another one …"))
        chosen: str | None = await self._screen.app.push_screen_wait(Choose("Which model?", choices))
        if chosen == ANOTHER:
            chosen = await self._screen.app.push_screen_wait(
                TextDialog("Which model?", "", "model.gguf", WHICH)
            )
        return chosen

    # --- loading

    def load(self) -> None:
        """Wait for the model, with a progress bar."""
        self.info = None
        self._stop_ticking()
        for welcome in self._screen.query(Welcome):
            welcome.begin()
        self._ticking = self._screen.set_interval(0.1, self._show_progress)
        begin_work(self._screen, self._load, group="load", exclusive=True)
        self.say_model()

    @property
    def awaited(self) -> bool:
        """A model is on its way into memory."""
        return self._ticking is not None

    async def _load(self) -> None:
        try:
            info = await self.client.info()
        except HetrunError as error:
            self._stop_ticking()
            self.load_error = error
            self.say_model()
            self._on_failure(str(error))
            begin_work(self._screen, self._go_back, group="dialog")
            return
        self._stop_ticking()
        self.load_error = None
        self._show_known(info)
        self._on_loaded(info)

    def _show_known(self, info: ModelInfo) -> None:
        self.info = info
        self.say_model()
        for welcome in self._screen.query(Welcome):  # there is none any more when the app ends
            welcome.loaded(info)

    def _look_again(self) -> None:
        """A server knows more of a model that it has loaded for an answer, and may have another one."""
        begin_work(self._screen, self._see_again, group="load", exclusive=True)

    async def _see_again(self) -> None:
        before, info = self.info, await self.client.info()
        if before is None or info == before:
            return
        self._show_known(info)
        if info.id == before.id:
            self._on_known(info)
        else:
            self._on_loaded(info)

    def catch_up(self) -> None:
        """The model was not there before, and now it answers; or a server has loaded it for this answer."""
        if self.awaited or self.exchanging:
            return
        if self.info is None:
            self.load()
        elif self.doors.is_server:
            self._look_again()

    def _show_progress(self) -> None:
        for welcome in self._screen.query(Welcome):
            welcome.progressed(self.client.progress)
        self.say_model()

    def _stop_ticking(self) -> None:
        if self._ticking is not None:
            self._ticking.stop()
            self._ticking = None

    def say_model(self, what: str = "") -> None:
        """What runs, or what else there is to say of it."""
        for line in self._screen.query(StatusLine):
            coming = f"loading{percent(self.client.progress, ' ')}" if self.awaited else "no model"
            line.say(what or (self.info.id if self.info else coming))

    # --- another engine

    async def _apply(self, changes: Mapping[str, object]) -> None:
        """Memory is given and taken while the engine runs; for all else it is restarted."""
        wanted = {**self.options, **changes}
        if set(changes) == {"ram"}:
            await self.client.ask(SetRam(parse_size(changes["ram"], "ram")))
            self.options = wanted
            self._note(f"you: ram {changes['ram']}")
            self._notices.say("Applied")
            return
        opening = await self._opening(wanted)  # which may refuse; then the old one goes on
        if self.info is not None:
            self._sound = self.options
        await self._exchange(opening, wanted)

    async def _opening(self, options: Mapping[str, object]) -> Opening:
        if self.doors.reopen is None:
            raise UserError("this engine was started elsewhere: its options cannot be changed here")
        self._unwanted.clear()
        self.bringing = True
        self._screen.refresh_bindings()
        try:
            return await to_thread(self.doors.reopen, options, self._tell_brought)
        finally:
            self.bringing = False
            self._screen.refresh_bindings()
            self.say_model()

    def _tell_brought(self, done: int, whole: int, what: str) -> None:
        """Called on another thread."""
        if self._unwanted.is_set():
            raise UserError(f"{what} was cancelled; it continues from here the next time")
        if (now := f"{what}: {100 * done // max(whole, 1)} %") != self._brought:
            self._brought = now
            self._screen.app.call_from_thread(self.say_model, now)

    def give_up_bringing(self) -> None:
        """The model that is on its way is not wanted any more."""
        self._unwanted.set()

    async def _exchange(self, opening: Opening, options: Mapping[str, object]) -> None:
        """One after the other: there may be memory for one model only."""
        self._free()
        self._note("you: " + (", ".join(f"{name} {value}" for name, value in options.items()) or "as it was"))
        self.options, self.info = options, None
        self.say_model("ending")
        self.exchanging = True
        try:
            await self.client.close()
            self.client = opening()
        finally:
            self.exchanging = False
        self.load()

    async def _go_back(self) -> None:
        """The options with which the last engine ran, after some that could not be loaded."""
        options, self._sound = self._sound, None
        if options is not None:
            await self._exchange(await self._opening(options), options)
