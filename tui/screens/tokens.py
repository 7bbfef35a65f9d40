"""What the model thought of each token of an answer: how likely it was, and what else might have come.

The probabilities are computed when the user asks, from the text that is there: no answer is slower for it.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from math import exp
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.style import Style
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from hetrun.client.events import GenerateRequest, TokenLogprob
from hetrun.client.interface import ChatClient
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import HetrunError
from hetrun.system.terminal_text import visible
from hetrun.tui.pictures import as_text
from hetrun.tui.screens.dialogs import Dialog

ALTERNATIVES = 8
AROUND = 120  # tokens that are shown before and after the selected one
LIKELY, POSSIBLE = 0.7, 0.2  # from here on a token is shown as likely, or as possible


@dataclass(frozen=True)
class Continue:
    """Answer again, beginning so."""

    beginning: str


@dataclass(frozen=True)
class ScoredTokens:
    """The tokens of an answer, with the bytes each stands for."""

    tokens: tuple[TokenLogprob, ...]
    shared: int = 0  # bytes at the beginning of the first token that are the prompt's

    def before(self, at: int) -> bytes:
        """The answer's bytes up to a token."""
        return b"".join([token.piece or b"" for token in self.tokens[:at]])[self.shared :]


class TokensScreen(Dialog[Continue | None]):
    """Left and right choose a token, up and down an alternative, Enter goes on from there."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Close", key_display="Esc"),
        Binding("left", "move(-1)", "Previous token", priority=True),
        Binding("right", "move(1)", "Next token", priority=True),
        Binding("ctrl+left", "unlikely(-1)", "Previous unlikely", priority=True),
        Binding("ctrl+right", "unlikely(1)", "Next unlikely", priority=True),
    ]

    def __init__(self, client: ChatClient, asked: GenerateRequest, answer: str) -> None:
        super().__init__()
        self._client = client
        self._asked = asked
        self._answer = answer
        self._scored = ScoredTokens(())
        self._at = 0

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide"):
            yield Static("Tokens", classes="title", markup=False)
            with VerticalScroll(classes="body"):
                yield Static("computing the probabilities …", id="tokens", markup=False)
            yield Static("", id="token", markup=False)
            yield OptionList()
            yield Static(
                "Left, Right: token · Ctrl+Right: unlikely one · Enter: go on from here",
                classes="keys",
                markup=False,
            )

    def on_mount(self) -> None:
        self.set_focus(self.query_one(OptionList), scroll_visible=False)
        self._compute()

    @work(exit_on_error=False)
    async def _compute(self) -> None:
        try:
            self._scored = await scored(self._client, self._asked, self._answer)
        except HetrunError as error:
            self.query_one("#tokens", Static).update(visible(str(error)))
            return
        self._show()

    def _show(self) -> None:
        tokens = self._scored.tokens
        if not tokens:
            self.query_one("#tokens", Static).update("there are no probabilities for this answer")
            return
        begin = max(self._at - AROUND, 0)
        shown = [self._token(i) for i in range(begin, min(self._at + AROUND, len(tokens)))]
        before, behind = "… " * (begin > 0), " …" * (self._at + AROUND < len(tokens))
        self.query_one("#tokens", Static).update(Content("").join([Content(before), *shown, Content(behind)]))
        token = tokens[self._at]
        self.query_one("#token", Static).update(
            f"token {self._at + 1} of {len(tokens)}: {written(token.piece)}  {_percent(token.logprob)}"
        )
        found = self.query_one(OptionList)
        found.set_options(
            [
                Option(f"{_percent(logprob):>8}  {written(piece)}", str(i))
                for i, ((_, logprob), piece) in enumerate(zip(token.top, token.top_pieces, strict=False))
            ]
        )
        found.highlighted = 0 if token.top else None

    def _token(self, i: int) -> Content:
        token = self._scored.tokens[i]
        text = visible((token.piece or b"").decode("utf-8", "replace")).replace("\n", "⏎\n")
        p = exp(token.logprob)
        colour = "$text-success" if p >= LIKELY else "$text-warning" if p >= POSSIBLE else "$text-error"
        look = f"{colour} reverse" if i == self._at else colour
        return Content.styled(text, look).stylize(Style.from_meta({"@click": f"screen.go({i})"}))

    def action_go(self, at: int) -> None:
        """Look at this token."""
        self._at = at
        self._show()

    def action_move(self, step: int) -> None:
        if self._scored.tokens:
            self.action_go(min(max(self._at + step, 0), len(self._scored.tokens) - 1))

    def action_unlikely(self, step: int) -> None:
        """To the next token that was not likely."""
        at = self._at + step
        while 0 <= at < len(self._scored.tokens):
            if exp(self._scored.tokens[at].logprob) < POSSIBLE:
                self.action_go(at)
                return
            at += step

    @on(OptionList.OptionSelected)
    def _continue(self, message: OptionList.OptionSelected) -> None:
        piece = self._scored.tokens[self._at].top_pieces[int(message.option_id or 0)]
        self.leave(Continue((self._scored.before(self._at) + piece).decode("utf-8", "ignore")))


async def scored(client: ChatClient, asked: GenerateRequest, answer: str) -> ScoredTokens:
    """The tokens of an answer to what was asked; raises why there are none."""
    prompt = await as_text(client, asked)
    params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=ALTERNATIVES)
    request = GenerateRequest(params, text=prompt + answer, echo=True, pictures=asked.pictures)
    scores: list[TokenLogprob] = []
    async with aclosing(client.stream(request)) as events:
        async for event in events:
            scores += event.prompt_logprobs
            if event.error is not None:
                raise event.error
            if event.last:
                break
    left, begin = len(answer.encode()), len(scores)
    while begin > 0 and left > 0:
        begin -= 1
        left -= len(scores[begin].piece or b"")
    return ScoredTokens(tuple(scores[begin:]), max(-left, 0))


def written(piece: bytes | None) -> str:
    """A token's text, so that spaces and line ends can be seen."""
    return repr((piece or b"").decode("utf-8", "replace"))


def _percent(logprob: float) -> str:
    return f"{100 * exp(logprob):.1f} %"
