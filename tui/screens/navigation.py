"""Other screens that the chat opens, and what becomes of what is chosen there."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from textual import on, work
from textual.screen import Screen
from textual.timer import Timer
from textual.worker import Worker, WorkerState

from hetrun.client.events import Message, ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.client.queries import SetRam
from hetrun.errors import HetrunError, UserError
from hetrun.option_types import parse_size
from hetrun.tui.conversation import Talk
from hetrun.tui.crash_report import explained
from hetrun.tui.host import Doors, Offered, Opening
from hetrun.tui.machine import Facts
from hetrun.tui.messages import Failed
from hetrun.tui.screens.dialogs import Ask, Choice, Choose
from hetrun.tui.screens.help import HelpScreen
from hetrun.tui.screens.settings import Chosen, SettingsScreen
from hetrun.tui.screens.template import TemplateScreen
from hetrun.tui.screens.whatif import WhatIfScreen
from hetrun.tui.widgets.status import StatusLine
from hetrun.tui.widgets.welcome import Welcome

EXCHANGING = "one moment: the engine before the next one ends"
ANOTHER = "another"  # all other names are whole paths
WHICH = "a .gguf file, a folder, ollama:NAME, or hf:user/repo:TYPE, which is downloaded"


def percent(part: float, before: str) -> str:
    """How far it has come, after this; nothing where it has not begun, or a server does not say."""
    return f"{before}{100 * part:.0f} %" if part else ""


class Sights(Screen[None]):
    """The part of the chat screen that looks at the engine and changes it."""

    client: ChatClient
    talk: Talk
    doors: Doors
    reports: Path | None  # the folder for reports of the chat's own faults

    def __init__(self) -> None:
        super().__init__()
        self.options: Mapping[str, object] = {}  # of the engine, that are not as the command line has them
        self.bringing = False  # a model is on its way from elsewhere
        self.exchanging = False  # one engine ends, and the next has not begun
        self._sound: Mapping[str, object] | None = None  # those of the last engine that could be loaded
        self._unwanted = Event()
        self._brought = ""  # what was said of it last
        self.info: ModelInfo | None = None  # None: there is no model yet
        self.load_error: Exception | None = None
        self._facts = Facts()  # of the machine, for its pane
        self._ticking: Timer | None = None

    def loaded(self, info: ModelInfo) -> None: ...
    def known(self, info: ModelInfo) -> None: ...
    def complain(self, text: str) -> None: ...
    def say(self, text: str, error: bool = False) -> None: ...
    def give_back(self, text: str) -> None: ...
    def show_system(self) -> None: ...
    def free(self) -> None: ...
    def next_prompt(self) -> tuple[str, tuple[Message, ...]]:
        raise NotImplementedError

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What cannot be done is said above the box."""
        try:
            yield
        except HetrunError as error:
            self.say(str(error), error=True)

    def words_of(self, error: BaseException) -> str:
        """An error as people read it; an unexpected one is written down, to be reported."""
        return str(error) if isinstance(error, HetrunError) else explained(error, self.reports)

    @on(Worker.StateChanged)
    def _failed_aside(self, message: Worker.StateChanged) -> None:
        if message.worker.group != "answer" and message.state is WorkerState.ERROR and message.worker.error:
            self.app.post_message(Failed(message.worker.error))

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen(self.app.size.width))

    @work(group="dialog", exit_on_error=False)
    async def action_settings(self) -> None:
        screen = SettingsScreen(self.talk)
        chosen: Chosen | None = await self.app.push_screen_wait(screen)
        if chosen is not None:
            self.talk.choose(chosen.system, chosen.sampling)
            self.show_system()

    def action_template(self) -> None:
        heading, messages = self.next_prompt()
        self.app.push_screen(TemplateScreen(self.client, heading, messages))

    @work(group="dialog", exit_on_error=False)
    async def action_what_if(self) -> None:
        decode = self._facts.decode
        can_apply = self.doors.reopen is not None and not self.doors.is_server
        screen = WhatIfScreen(self.client, can_apply, decode[-1] if decode else 0.0)
        if changes := await self.app.push_screen_wait(screen):
            await self._apply(changes)

    def action_model(self) -> None:
        with self.telling():
            self.choose_model()

    def choose_model(self, name: str = "") -> None:
        """Another model: this one, or the one that the user chooses."""
        if self.doors.models is None:
            raise UserError(
                "the server chooses the model: for another model, start the chat with another --url"
            )
        self._choose_model(name, self.doors.models)

    @work(group="dialog", exit_on_error=False)
    async def _choose_model(self, name: str, models: Callable[[], Sequence[Offered]]) -> None:
        if found := name or await self._chosen_model(models):
            try:
                await self._apply({"model": found})
            except HetrunError:
                self.give_back(f"/model {found}")
                raise

    async def _chosen_model(self, models: Callable[[], Sequence[Offered]]) -> str | None:
        choices = [Choice(m.path, f"{m.label}  {m.size}") for m in await to_thread(models)]
        if not self.doors.is_server:
            choices.append(Choice(ANOTHER, "another one …"))
        chosen: str | None = await self.app.push_screen_wait(Choose("Which model?", choices))
        if chosen == ANOTHER:
            chosen = await self.app.push_screen_wait(Ask("Which model?", "", "model.gguf", WHICH))
        return chosen

    # --- loading

    def load(self) -> None:
        """Wait for the model, with a progress bar."""
        self.info = None
        self._stop_ticking()
        for welcome in self.query(Welcome):
            welcome.begin()
        self._ticking = self.set_interval(0.1, self._show_progress)
        self._load()
        self.say_model()

    @property
    def awaited(self) -> bool:
        """A model is on its way into memory."""
        return self._ticking is not None

    @work(group="load", exclusive=True, exit_on_error=False)
    async def _load(self) -> None:
        try:
            info = await self.client.info()
        except HetrunError as error:
            self._stop_ticking()
            self.load_error = error
            self.say_model()
            self.complain(str(error))
            self.go_back()
            return
        self._stop_ticking()
        self.load_error = None
        self._show_known(info)
        self.loaded(info)

    def _show_known(self, info: ModelInfo) -> None:
        self.info = info
        self.say_model()
        for welcome in self.query(Welcome):  # there is none any more when the app ends
            welcome.loaded(info)

    @work(group="load", exclusive=True, exit_on_error=False)
    async def see_again(self) -> None:
        """A server knows more of a model that it has loaded for an answer, and may have another one."""
        before, info = self.info, await self.client.info()
        if before is None or info == before:
            return
        self._show_known(info)
        if info.id == before.id:
            self.known(info)
        else:
            self.loaded(info)

    def _show_progress(self) -> None:
        for welcome in self.query(Welcome):
            welcome.progressed(self.client.progress)
        self.say_model()

    def _stop_ticking(self) -> None:
        if self._ticking is not None:
            self._ticking.stop()
            self._ticking = None

    def say_model(self, what: str = "") -> None:
        """What runs, or what else there is to say of it."""
        for line in self.query(StatusLine):
            coming = f"loading{percent(self.client.progress, ' ')}" if self.awaited else "no model"
            line.say(what or (self.info.id if self.info else coming))

    # --- another engine

    async def _apply(self, changes: Mapping[str, object]) -> None:
        """Memory is given and taken while the engine runs; for all else it is restarted."""
        wanted = {**self.options, **changes}
        if set(changes) == {"ram"}:
            await self.client.ask(SetRam(parse_size(changes["ram"], "ram")))
            self.options = wanted
            self._facts.note(f"you: ram {changes['ram']}")
            self.say("Applied")
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
        self.refresh_bindings()
        try:
            return await to_thread(self.doors.reopen, options, self._tell_brought)
        finally:
            self.bringing = False
            self.refresh_bindings()
            self.say_model()

    def _tell_brought(self, done: int, whole: int, what: str) -> None:
        """Called on another thread."""
        if self._unwanted.is_set():
            raise UserError(f"{what} was cancelled; it continues from here the next time")
        if (now := f"{what}: {100 * done // max(whole, 1)} %") != self._brought:
            self._brought = now
            self.app.call_from_thread(self.say_model, now)

    def give_up_bringing(self) -> None:
        """The model that is on its way is not wanted any more."""
        self._unwanted.set()

    async def _exchange(self, opening: Opening, options: Mapping[str, object]) -> None:
        """One after the other: there may be memory for one model only."""
        self.free()
        self._facts.note(
            "you: " + (", ".join(f"{name} {value}" for name, value in options.items()) or "as it was")
        )
        self.options, self.info = options, None
        self.say_model("ending")
        self.exchanging = True
        try:
            await self.client.close()
            self.client = opening()
        finally:
            self.exchanging = False
        self.load()

    @work(group="dialog", exit_on_error=False)
    async def go_back(self) -> None:
        """The options with which the last engine ran, after some that could not be loaded."""
        options, self._sound = self._sound, None
        if options is not None:
            await self._exchange(await self._opening(options), options)

    @work(group="dialog", exit_on_error=False)
    async def action_theme(self) -> None:
        choices = [Choice(theme, theme) for theme in sorted(self.app.available_themes)]
        chosen: str | None = await self.app.push_screen_wait(Choose("Colours", choices, self.app.theme))
        if chosen:
            self.choose_theme(chosen)

    def choose_theme(self, name: str) -> None:
        """These colours, from now on; without a name the user chooses."""
        if not name:
            self.action_theme()
        elif name not in self.app.available_themes:
            known = ", ".join(sorted(self.app.available_themes))
            raise UserError(f"there is no theme {name}; known: {known}")
        else:
            self.app.theme = name
            self.talk.store.save_choice("theme", name)
