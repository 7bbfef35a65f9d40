"""What is measured of answers, and where it is shown."""

from __future__ import annotations

from collections.abc import Sequence

from textual.screen import Screen

from hetrun.client.events import Event, ModelInfo
from hetrun.tui.machine import Facts
from hetrun.tui.messages import AnswerRates
from hetrun.tui.screens.engine_control import EngineControl
from hetrun.tui.store.tree import Turn
from hetrun.tui.widgets.status import StatusLine

RATED = 4  # tokens of a prompt; fewer cost as much as one does


class AnswerFigures:
    """Tokens of the context in use and the last rates, for the status line and the machine's pane."""

    def __init__(self, screen: Screen[None], engine: EngineControl) -> None:
        self.facts = Facts()  # of the machine, for its pane
        self.used = 0  # tokens of the context, as of the last complete answer
        self._screen = screen
        self._engine = engine
        self._measured = AnswerRates()

    def begin_model(self, info: ModelInfo) -> None:
        """There is another model: nothing was measured of it yet, unless it is the first that is known. A
        server that comes late may have answered before it said what it has."""
        before = self.facts
        if not before.model:
            before.model = info.id
            return
        self.facts = Facts(model=info.id, used=self.used, reasons=before.reasons, told=before.told)

    def update_model(self, info: ModelInfo) -> None:
        """More is known of the model; what was measured of it stays."""
        self.facts.context, self.facts.state = info.context, None  # its layers may lie elsewhere by now
        self.show()

    def note(self, reason: str) -> None:
        """Why something changed."""
        self.facts.note(reason)

    def show_path(self, path: Sequence[Turn]) -> None:
        """Those of the last answer in a conversation."""
        last = next((t.figures for t in reversed(path) if t.figures), {})
        self.used = int(last.get("prompt_tokens", 0)) + int(last.get("tokens", 0))
        self._measured = AnswerRates(
            float(last.get("decode_tok_s", 0.0)), float(last.get("first_token_s", 0.0))
        )
        self.facts.used = self.used
        self.show()

    def show(self) -> None:
        """In the status line."""
        self._screen.query_one(StatusLine).show(self._measured, self.used, self._engine.context)

    def observe(self, message: AnswerRates, num_tokens: int) -> None:
        """New rates, with the tokens of an answer that is being written."""
        streaming = self._engine.client.health.streaming
        message.disk_bytes_s = streaming.disk_bytes_s if streaming else 0.0
        self._measured = message
        used = self.used + num_tokens
        self._screen.query_one(StatusLine).show(message, used, self._engine.context)
        self.facts.used, self.facts.first_token_s = used, message.first_token_s
        if message.tokens_per_s:
            self.facts.decode.append(message.tokens_per_s)

    def finish(self, last: Event) -> None:
        """An answer is complete."""
        self.used = last.usage.prompt_tokens + last.usage.completion_tokens
        self.facts.prompt, self.facts.cached = last.usage.prompt_tokens, last.usage.cached_tokens
        computed = last.usage.prompt_tokens - last.usage.cached_tokens
        if last.timings.prompt_tok_s and computed >= RATED:
            self.facts.prefill.append(last.timings.prompt_tok_s)
        self.observe(AnswerRates(last.timings.decode_tok_s, last.timings.ttft_s), 0)

    def finish_without_usage(self, num_tokens: int) -> None:
        """An answer that was stopped comes without its figures."""
        self.used += num_tokens
        self.facts.prompt = 0
        self.show()
