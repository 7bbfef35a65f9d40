"""`hetrun run -i`: a conversation line by line, for a shell, ssh or a script.

It is kept where `hetrun chat` keeps its own, so each of them can go on with it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hetrun.api.local_model import LocalModel
from hetrun.cli.chat import KEPT
from hetrun.cli.exit_codes import STOPPED
from hetrun.cli.output import say
from hetrun.cli.run import described, make_params, open_llm, read_prompt, say_if_cut, shown, summary
from hetrun.client.events import Event, GenerateRequest
from hetrun.config import Settings, dirs
from hetrun.errors import UserError, printable

if TYPE_CHECKING:
    from hetrun.tui.conversation import Talk
    from hetrun.tui.store.store import ConversationStore

PROMPT, MORE = "> ", ". "
MARK = '"""'  # before and after a message of several lines
LAST = "run -i"  # under which the store knows the last conversation of this kind
GREETING = "/bye or Ctrl-D ends, /? lists the commands"
HELP = (
    "/bye or Ctrl-D ends, Ctrl-C stops an answer, /clear starts over, "
    f"{MARK} begins and ends a message of several lines"
)
ENDS, CLEARS, HELPS = ("/bye", "/exit", "/quit"), ("/clear", "/new"), ("/help", "/?")

Answers = Callable[[GenerateRequest], Iterator[Event]]


def converse(
    settings: Settings,
    first: str | None,
    sampling: Mapping[str, object],
    *,
    go_on: bool,
    once: bool,
    verbose: bool,
) -> int:
    """Answer message after message, beginning with `first`; the exit code. `go_on`: with the last
    conversation; `once`: with one message, `first` or what is piped, unless a person types at a terminal."""
    with closing(_store()) as store:
        last: dict[str, Any] = _last(store) if go_on else {}
        if last.get("model") and settings.origin("model") != "explicit":
            settings = replace(settings, model=last["model"], origins={**settings.origins, "model": "kept"})
        params = make_params(settings, sampling)
        with open_llm(settings, chatting=True) as llm:
            from hetrun.tui.conversation import Talk  # before an answer is wanted: textual comes with it

            talk = Talk(store, params, settings.system or "")
            talk.new()
            if go_on:
                talk.open(last["conversation"])
                if settings.system is not None:
                    talk.choose(settings.system, talk.sampling)
            plain = PlainConversation(talk, llm, settings, verbose)
            if once and not (first is None and sys.stdin is not None and sys.stdin.isatty()):
                plain.answer(read_prompt(first))
                return 0
            return plain.run(first)


def _store() -> ConversationStore:
    from hetrun.tui.store.store import ConversationStore  # on use: most commands keep nothing

    try:
        return ConversationStore(dirs().data / KEPT)
    except UserError as error:
        say(f"{error}; this conversation will not be saved")
        return ConversationStore(None)


def _last(store: ConversationStore) -> dict[str, Any]:
    """The last conversation and its model."""
    match json.loads(store.choice(LAST, "{}")):
        case {"conversation": int(number), "model": str() | None as model}:
            if store.conversation(number) is not None:
                return {"conversation": number, "model": model}
    raise UserError("there is no conversation to continue; start one with hetrun run -i")


class PlainConversation:
    """Lines in, answers out."""

    def __init__(self, talk: Talk, llm: LocalModel, settings: Settings, verbose: bool) -> None:
        self._talk = talk
        self._llm = llm
        self._settings = settings
        self._verbose = verbose
        self._at_a_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._stopped = False  # the last thing that happened was Ctrl-C

    def run(self, first: str | None) -> int:
        """Until the input ends; the exit code."""
        if self._at_a_terminal:
            self._prepare_the_terminal()
        text = first
        while True:
            try:
                text = self._message() if text is None else text
                if text is None or text.strip() in ENDS:
                    return 0
                self._take(text)
                self._stopped = False
            except KeyboardInterrupt:
                if self._stopped or not self._at_a_terminal:
                    return STOPPED
                self._stopped = True
                print(file=sys.stderr)
                say("press Ctrl-C again or Ctrl-D to end")
            text = None

    def _prepare_the_terminal(self) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401  (input() then edits lines, and remembers them)
        say(f"{self._llm.info.id}: {GREETING}")
        if count := len(self._talk.tree.path):
            say(f"{printable(self._talk.title)}: continued after {count} messages")

    def _message(self) -> str | None:
        """The next one; None where there is none any more."""
        line = self._line(PROMPT)
        if line is None or not line.lstrip().startswith(MARK):
            return line
        lines = [line.lstrip().removeprefix(MARK)]
        while MARK not in lines[-1]:
            more = self._line(MORE)
            if more is None:
                break
            lines.append(more)
        return "\n".join(lines).partition(MARK)[0]

    def _line(self, prompt: str) -> str | None:
        if self._at_a_terminal and sys.stdout.isatty():
            try:
                return input(prompt)
            except EOFError:
                print()
                return None
        if self._at_a_terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None

    def _take(self, text: str) -> None:
        """A message, or a command."""
        word = text.strip()
        if not word:
            return
        if word in CLEARS:
            self._talk.new()
        elif word in HELPS:
            say(HELP)
        elif word.startswith("/") and word[1:].isalpha():
            say(f"there is no {word}; {HELP}")
        else:
            try:
                self.answer(text)
            except UserError as error:
                if not self._at_a_terminal:
                    raise
                say(str(error))

    def answer(self, text: str) -> None:
        """Ask, and write the answer as it comes; what was written of it is kept however it ends."""
        talk = self._talk
        asked = talk.say(text, talk.tree.leaf)
        request = talk.request(asked.id)
        if self._verbose and len(talk.tree.path) == 1:
            print(described(self._llm, request), file=sys.stderr)
        turn, last = None, None
        try:
            for event in shown(self._llm.stream_request(request), True):
                if turn is None:
                    turn = talk.answer(asked.id)
                    turn.opened = event.opened
                turn.text += event.text
                last = event
        finally:
            if turn is None:
                talk.retract(asked)
            else:
                talk.ended(turn, _note(last, request.params.max_tokens), last if last and last.last else None)
                self._remember()
        closed = self._verbose or (sys.stderr.isatty() and not self._at_a_terminal)
        if last is not None and turn is not None:
            say_if_cut(turn.text, last, request.params, closed=closed)
        if last is not None and closed:
            print(summary(last, request.params), file=sys.stderr)

    def _remember(self) -> None:
        model = self._settings.model
        if model and os.path.exists(path := os.path.expanduser(model)):
            model = os.path.abspath(path)  # it may be continued from another folder
        kept = {"conversation": self._talk.number, "model": model}
        self._talk.store.save_choice(LAST, json.dumps(kept))


def _note(last: Event | None, limit: int | None) -> str:
    from hetrun.tui.conversation import note_of

    return note_of(last, limit) if last is not None and last.last else "stopped"
