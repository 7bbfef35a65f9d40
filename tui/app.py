"""The terminal chat."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

from textual import events, on
from textual.app import App
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.notifications import SeverityLevel

from hetrun.client.interface import ChatClient
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import HetrunError, UserError
from hetrun.tui.conversation import Talk
from hetrun.tui.host import Doors
from hetrun.tui.messages import ScreenMade, SideTaskFailed
from hetrun.tui.screens.chat import ChatScreen
from hetrun.tui.screens.dialogs import LOW, Dialog
from hetrun.tui.store.store import ConversationStore

THEME = "textual-dark"
AGAIN_S = 3.0  # within which a second Ctrl+C leaves


class ChatApp(App[None]):
    """Conversations with the model behind a client, kept in `place`, or in memory alone where it is None."""

    CSS_PATH = Path(__file__).with_name("app.tcss")
    TITLE = "hetrun"
    ENABLE_COMMAND_PALETTE = False
    VERTICAL_BREAKPOINTS = [(0, "-low"), (LOW, "-high")]  # noqa: RUF012 - as Textual declares it
    # Textual has this binding too, but keeps it out of the footer.
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "quit", "Quit", priority=True)]

    def __init__(
        self,
        client: ChatClient,
        params: SamplingParams | None = None,
        system: str | None = None,
        place: Path | None = None,
        doors: Doors | None = None,
        reports: Path | None = None,
    ) -> None:
        """`reports`: the folder for reports of the chat's own faults."""
        super().__init__()
        self.fault = ""  # why it ended, if that was not wanted
        self._asked_to_quit = 0.0  # when Ctrl+C was pressed
        self._trouble = ""
        self._early: list[events.Event] = []  # typed before there was a box for it
        try:
            self._store = ConversationStore(place)
        except UserError as error:
            # The chat works without the file; it says that nothing is kept.
            self._store, self._trouble = ConversationStore(None), str(error)
        talk = Talk(self._store, params or SamplingParams(), system or "")
        self._screen = ChatScreen(client, talk, doors or Doors(), reports)

    def get_driver_class(self) -> type[Driver]:
        """Our own where Textual would take its usual one."""
        found = super().get_driver_class()
        if found.__name__ != "LinuxDriver":
            return found
        try:
            from hetrun.tui.keyboard import QuickDriver  # which no other system has
        except ImportError:  # it stands on modules that Textual may move; then Escape is heard 0.1 s later
            return found
        return QuickDriver

    def get_default_screen(self) -> ChatScreen:
        return self._screen

    def on_mount(self) -> None:
        theme = self._store.choice("theme", THEME)
        if theme in self.available_themes:
            self.theme = theme
        if self._trouble:
            said = f"{self._trouble}. Conversations will not be saved this time"
            self._screen.call_after_refresh(self._screen.parts.notices.say, said, error=True)

    def on_unmount(self) -> None:
        self._screen.parts.answers.leave()
        self._screen.parts.cards.close()
        self._store.close()

    # --- what goes wrong, and the way out

    def _handle_exception(self, error: Exception) -> None:
        """Leave with a sentence and a report: Textual prints all that there was on the screen, and more."""
        if self._exit:  # a key that came while the screens were closing finds none
            return
        if not self.fault:
            self.fault = self._screen.parts.notices.words_of(error)
            self._keep_all()
        super()._handle_exception(error)
        self._exit_renderables.clear()

    def _keep_all(self) -> None:
        try:
            self._screen.parts.answers.leave()
        except Exception:  # what was kept a second ago has to do
            return

    @on(SideTaskFailed)
    def _failed_aside(self, message: SideTaskFailed) -> None:
        """What fails beside the answer ends nothing."""
        self._screen.parts.notices.say(self._screen.parts.notices.words_of(message.error), error=True)

    async def on_event(self, event: events.Event) -> None:
        """A letter that is typed where nothing is written begins a message: the box has the focus before the
        key is sent on, so that letters keep their order however fast they come. What is typed while the
        screen is being made waits for its box."""
        if _is_text(event) and not self._screen.is_made:
            self._early.append(event)
            return
        await self._take_early()
        await self._take(event)

    @on(ScreenMade)
    async def _take_early(self) -> None:
        """What was typed before goes where it would go now."""
        while self._early and self._screen.is_made:
            await self._take(self._early.pop(0))

    async def _take(self, event: events.Event) -> None:
        if isinstance(event, events.Key) and not event.is_forwarded and event.is_printable:
            if self.screen_stack[-1:] == [self._screen]:
                self._screen.begin_message()
        await super().on_event(event)

    async def run_action(self, *args: Any, **options: Any) -> bool:  # noqa: ANN401 - as Textual has them
        """An action that cannot be done says so."""
        try:
            return await super().run_action(*args, **options)
        except HetrunError as error:
            self._screen.parts.notices.say(str(error), error=True)
            return True

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,
    ) -> None:
        """Above the box, where one looks, instead of in a corner."""
        self._screen.parts.notices.say(message, error=severity != "information")

    def action_help_quit(self) -> None:
        """Ctrl+C: copy what is selected (the widget does); else leave, if it is meant."""
        if monotonic() < self._asked_to_quit + AGAIN_S:
            self.exit()
            return
        self._asked_to_quit = monotonic()
        if isinstance(self.screen, Dialog):
            self.screen.leave()
        self._screen.parts.notices.say("Press Ctrl+C again to quit; every conversation is saved")

    @property
    def client(self) -> ChatClient:
        """The engine in use; it stays the caller's to close."""
        return self._screen.parts.engine.client

    @property
    def load_error(self) -> Exception | None:
        """Why there is no model, if there is none."""
        return self._screen.parts.engine.load_error


def _is_text(event: events.Event) -> bool:
    """Whether it is for the box: a letter, or what ends or erases one."""
    if isinstance(event, events.Paste):
        return not event.is_forwarded
    if not isinstance(event, events.Key) or event.is_forwarded:
        return False
    return event.is_printable or event.key in ("enter", "backspace")
