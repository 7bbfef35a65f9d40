"""The conversation that is open: its turns, what the model is told of them, and the store that keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetrun.client.events import PICTURE, Event, GenerateRequest, Message, accepted
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import UserError
from hetrun.system.files import open_regular
from hetrun.system.units import format_bytes
from hetrun.tui.store import export
from hetrun.tui.store.store import ConversationStore
from hetrun.tui.store.tree import Conversation, Tree, Turn, TurnPicture, fork_title, title_of
from hetrun.tui.transcript.turn import divided

LINGER_S = 0.04  # tokens come together within a frame: each message costs the engine's core and ours
UNFINISHED = "broken off"  # of an answer that was kept while it was written, and nothing came after it
MOST_ATTACHED = 1 << 20  # bytes of a file; far more than any context holds
FULL = "stopped: the context is full. Ctrl+N begins a new conversation, F4 shows what a longer one would take"
LIMITED = "stopped at the limit of {n} tokens: -n or /set max_tokens changes it"


class Talk:
    """One conversation of the store, or a new one, which is kept from its first message on."""

    def __init__(self, store: ConversationStore, params: SamplingParams, system: str) -> None:
        self.store = store
        self.usual = params
        self._usual_system = system
        self.conversation: Conversation | None = None
        self.tree = Tree()
        self.system = system
        self.sampling: Mapping[str, Any] = {}

    # --- which one

    def new(self) -> None:
        """Nothing was said yet; sampling and system prompt are the command line's."""
        self.conversation, self.tree = None, Tree()
        self.system, self.sampling = self._usual_system, {}

    def open(self, number: int) -> None:
        """One that was kept."""
        found = self.store.conversation(number)
        if found is None:
            raise UserError("this conversation has been deleted")
        self.conversation, self.tree = found, self.store.tree(found)
        self.system, self.sampling = found.system, found.sampling

    @property
    def number(self) -> int | None:
        return self.conversation.id if self.conversation else None

    @property
    def title(self) -> str:
        return self.conversation.title if self.conversation else ""

    # --- what the model is told

    @property
    def params(self) -> SamplingParams:
        """Sampling of this conversation."""
        return with_sampling(self.usual, self.sampling)

    def choose(self, system: str, sampling: Mapping[str, Any]) -> None:
        """Another system prompt and other sampling, from now on; an OptionError if they make no sense."""
        with_sampling(self.usual, sampling)
        self.system, self.sampling = system, dict(sampling)
        if self.conversation:
            self.store.choose(self.conversation.id, system, sampling)

    def messages(self, end: int | None) -> tuple[Message, ...]:
        """The turns up to this one, without what was thought."""
        told: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.tree.path_to(end):
            text = divided(turn.text, turn.opened).answer if turn.role == "assistant" else turn.text
            told.append({"role": turn.role, "content": with_pictures(text, len(turn.pictures))})
        return tuple(told)

    def pictures(self, end: int | None) -> tuple[bytes, ...]:
        """The files of the turns up to this one, in the order of their places in the messages."""
        shown = [picture for turn in self.tree.path_to(end) for picture in turn.pictures]
        files = {digest: self.store.picture(digest) for digest in {picture.digest for picture in shown}}
        return tuple(files[picture.digest] for picture in shown)

    def request(self, end: int | None) -> GenerateRequest:
        """What is asked for an answer to this turn."""
        return GenerateRequest(
            self.params, messages=self.messages(end), linger_s=LINGER_S, pictures=self.pictures(end)
        )

    # --- turns

    def say(self, text: str, parent: int | None, pictures: Sequence[tuple[TurnPicture, bytes]] = ()) -> Turn:
        """What the user says after a turn, with pictures; kept before the model is asked."""
        begun = self.conversation or self.store.begin(title_of(text), self.system, self.sampling)
        try:
            turn = self.store.add(begun.id, parent, "user", text, pictures=pictures)
        except UserError:
            if self.conversation is None:
                self.store.delete(begun.id)
            raise
        self.conversation = begun
        self.tree.add(turn)
        return turn

    def answer(self, parent: int | None, text: str = "") -> Turn:
        """The beginning of an answer; it counts as broken off until `ended`."""
        assert self.conversation is not None, "a message was sent before"
        turn = self.store.add(self.conversation.id, parent, "assistant", text, UNFINISHED)
        self.tree.add(turn)
        return turn

    def ended(self, turn: Turn, note: str, last: Event | None) -> None:
        """What became of an answer."""
        turn.note = note
        if last is not None:
            turn.figures = figures_of(last)
        self.store.write(turn)

    def retract(self, turn: Turn) -> None:
        """A turn that nothing follows is as if it had not been said; so is a conversation without turns."""
        self.store.remove(turn)
        self.tree.drop(turn.id)
        if not self.tree.turns and self.conversation is not None:
            self.store.delete(self.conversation.id)
            self.conversation = None

    def lead_to(self, turn: Turn) -> None:
        """Show the path through this turn."""
        assert self.conversation is not None, "it has turns"
        self.tree.leaf = self.tree.end_of(turn)
        self.store.lead_to(self.conversation.id, self.tree.leaf)

    def lead_back(self, turn: int | None) -> None:
        """Show the path up to this turn and nothing after it."""
        assert self.conversation is not None, "it has turns"
        self.tree.leaf = turn
        self.store.lead_to(self.conversation.id, turn)

    def fork(self, turn: Turn) -> None:
        """A new conversation that begins as this one did, up to this turn; it is open then."""
        assert self.conversation is not None, "it has turns"
        path = self.tree.path_to(turn.id)
        title = fork_title(self.conversation.title, (c.title for c in self.store.conversations()))
        copy = replace(
            self.conversation, title=title, leaf=turn.id, system=self.system, sampling=self.sampling
        )
        self.open(self.store.keep(copy, path).id)

    def bring_in(self, path: Path) -> int:
        """Conversations from a file; the last one is open then. How many there were."""
        kept = [self.store.keep(one.conversation, one.turns, one.pictures) for one in export.read(path)]
        self.open(kept[-1].id)
        return len(kept)


def with_sampling(params: SamplingParams, sampling: Mapping[str, Any]) -> SamplingParams:
    """The same with what differs; an OptionError if that makes no sense."""
    SamplingParams.from_mapping(sampling)  # which knows the names
    return replace(params, **sampling)


def note_of(last: Event, limit: int | None) -> str:
    """Why an answer ended, if not by the model's own end or at this limit, and what became of guesses."""
    limited = limit is not None and last.usage.completion_tokens >= limit
    why = "" if last.finish_reason != "length" else LIMITED.format(n=limit) if limited else FULL
    return "; ".join(filter(None, (why, accepted(last.timings))))


def figures_of(last: Event) -> dict[str, Any]:
    """What was measured of an answer, to be kept with it."""
    return {
        "prompt_tokens": last.usage.prompt_tokens,
        "cached_tokens": last.usage.cached_tokens,
        "tokens": last.usage.completion_tokens,
        "first_token_s": round(last.timings.ttft_s, 4),
        "prompt_tok_s": round(last.timings.prompt_tok_s, 1),
        "decode_tok_s": round(last.timings.decode_tok_s, 1),
    }


def attached(path: Path) -> tuple[str, str]:
    """The name and the text of a file that goes with a message."""
    try:
        with open(open_regular(path.expanduser()), "rb") as file:
            raw = file.read(MOST_ATTACHED + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > MOST_ATTACHED:
        raise UserError(f"{path} is larger than {format_bytes(MOST_ATTACHED)}: attach a part of it")
    try:
        return path.name, raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text") from error


def with_pictures(text: str, n: int) -> str | list[Message]:
    """The content of a message with this many pictures, which stand before what is asked about them."""
    return [*[{"type": PICTURE}] * n, {"type": "text", "text": text}] if n else text


def with_files(text: str, files: Mapping[str, str]) -> str:
    """A message and what goes with it, each in a fence that is longer than any within."""
    parts = [text] if text else []
    for name, content in files.items():
        fence = "```"
        while fence in content:
            fence += "`"
        parts.append(f"{fence}{name}\n{content.rstrip()}\n{fence}")
    return "\n\n".join(parts)


def parsed_value(text: str) -> object:
    """A number where it is one, else the text."""
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
