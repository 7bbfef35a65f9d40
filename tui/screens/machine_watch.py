"""The machine's pane, kept up to date."""

from __future__ import annotations

from textual.screen import Screen

from hetrun.client.events import ModelInfo
from hetrun.tui.machine import look
from hetrun.tui.screens.answer_writer import AnswerWriter
from hetrun.tui.screens.engine_control import EngineControl
from hetrun.tui.screens.figures import AnswerFigures
from hetrun.tui.widgets.machine import MachinePane
from hetrun.tui.workers import begin_work

LOOK_S = 1.0  # between two looks at the machine while it answers: each draws its pane again
IDLE_LOOKS = 3  # this many times as long while it does not


class MachineWatch:
    """Asks the engine what it does: often while it answers, else now and then."""

    def __init__(
        self, screen: Screen[None], engine: EngineControl, answers: AnswerWriter, figures: AnswerFigures
    ) -> None:
        self._screen = screen
        self._engine = engine
        self._answers = answers
        self._figures = figures
        self._num_looks = 0

    def begin(self) -> None:
        """Look from now on."""
        self._screen.set_interval(LOOK_S, self.look)

    def begin_model(self, info: ModelInfo) -> None:
        """There is another model."""
        self._figures.begin_model(info)
        self.update_model(info)

    def update_model(self, info: ModelInfo) -> None:
        """More is known of the model."""
        self._figures.update_model(info)
        self.look(at_once=True)

    def look(self, at_once: bool = False) -> None:
        """Often while it answers, else now and then; what is not shown is not asked for."""
        self._num_looks += 1
        busy = self._answers.current is not None
        if busy:
            self._answers.say_loading()
        if self._engine.info is None or not self._screen.query_one(MachinePane).display:
            return
        if at_once or busy or self._num_looks % IDLE_LOOKS == 0:
            begin_work(self._screen, self._look, group="look", exclusive=True)

    async def _look(self) -> None:
        self._figures.facts.used = self._figures.used + self._answers.num_tokens
        await look(self._figures.facts, self._engine.client)
        self.show()

    def show(self) -> None:
        """What is known."""
        self._screen.query_one(MachinePane).show(self._figures.facts)
