"""Keys, commands, clicks and new sizes in random order, over a scripted engine."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

from textual.geometry import Region
from textual.message_pump import MessagePump
from textual.widgets import Footer

from hetrun.client.engine_client import LocalClient
from hetrun.tui.app import ChatApp
from hetrun.tui.commands import COMMANDS
from hetrun.tui.host import Doors, HostModel, Opening
from hetrun.tui.store.store import ConversationStore
from hetrun.tui.store.tree import Turn
from tests.support.fakes import FakeEngine
from tests.tui.driver import Driver

SIZES = ((60, 15), (80, 24), (140, 45))
LETTERS = "abcdefghijklmnopqrstuvwxyzYNR 0123456789/?.:é漢"
PLAIN = (
    "enter",
    "escape",
    "tab",
    "shift+tab",
    "up",
    "down",
    "left",
    "right",
    "home",
    "end",
    "pageup",
    "pagedown",
)
OTHERS = (
    *(
        "backspace",
        "delete",
        "space",
        "ctrl+j",
        "shift+enter",
        "alt+enter",
        "ctrl+n",
        "ctrl+f",
        "ctrl+o",
        "ctrl+r",
    ),
    *(
        "ctrl+up",
        "ctrl+s",
        "ctrl+left",
        "ctrl+right",
        "ctrl+u",
        "ctrl+k",
        "ctrl+w",
        "ctrl+a",
        "ctrl+e",
        "ctrl+z",
    ),
    *(
        "ctrl+y",
        "ctrl+v",
        "ctrl+x",
        "ctrl+down",
        "shift+left",
        "shift+up",
        "ctrl+home",
        "ctrl+end",
        "f9",
        "f10",
        "ctrl+q",
        "ctrl+c",
    ),
    *(f"f{n}" for n in range(1, 9)),
)
MESSAGES = (
    *(
        "say hello",
        "say one two three",
        "muse hm</think>so",
        "forever",
        "silence",
        "fail",
        "refuse",
        "stop",
    ),
    *(
        "say ```py\nx = 1\n```",
        "say # T\n\n- a\n- b\n\n| a | b |\n|---|---|\n| 1 | 2 |",
        "say \x1b[31mred",
        "//help",
    ),
    *("say " + "word " * 200, "unfit regex"),
)
EVERY = 40  # keys, between two looks whether all is well


class Kept(ConversationStore):
    """Knows what was said, and what was taken away because the user wanted that."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.users_said: dict[int, str] = {}

    def add(self, *args: object, **options: object) -> Turn:
        turn = super().add(*args, **options)  # type: ignore[arg-type]
        if turn.role == "user":
            self.users_said[turn.id] = turn.text
        return turn

    def remove(self, turn: Turn) -> None:
        super().remove(turn)
        self.users_said.pop(turn.id, None)

    def delete(self, number: int) -> None:
        found = self.conversation(number)
        gone = list(self.tree(found)) if found else []
        super().delete(number)
        for turn in gone:
            self.users_said.pop(turn.id, None)


class Presses:
    """Any number of them, the same for a seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.pressed: list[str] = []
        self.count: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._folder = folder
        (folder / "notes.txt").write_text("some notes", encoding="utf-8")
        (folder / "in.json").write_text('[{"role": "user", "content": "Guten Tag"}]', encoding="utf-8")

    async def run(self, chat: Driver, presses: int) -> None:
        """Press, and look now and then whether the chat is what it should be."""
        while len(self.pressed) < presses:
            for key in self._some(chat):
                self.pressed.append(key)
                await chat.press(key)
            if len(self.pressed) // EVERY != (len(self.pressed) - 1) // EVERY:
                await self._look(chat)
            if self._chance.random() < 0.002:
                width, height = self._chance.choice(SIZES)
                await chat.pilot.resize_terminal(width, height)
        await self._look(chat)

    async def each(self, chat: Driver, fronts: Sequence[str]) -> None:
        """Every key, with the focus on the box and behind each of these keys; and every command."""
        await chat.exchange("say hello")
        rounds: list[tuple[str, ...]] = [(key,) for key in (*PLAIN, *OTHERS)]
        rounds += [(front, key) for front in fronts for key in (*PLAIN, *OTHERS)]
        rounds += [("escape", *self._typed(f"/{command.name}"), "enter") for command in COMMANDS]
        for keys in rounds:
            self.pressed += [*keys, "escape", "escape"]
            await chat.press(*keys, "escape", "escape")
            if len(self.pressed) % 5 == 0:
                await self._look(chat)
        await self._look(chat)

    def _some(self, chat: Driver) -> Iterator[str]:
        """One key, or a text with what belongs to it."""
        chance = self._chance.random()
        if chance < 0.3:
            yield self._chance.choice(LETTERS)
        elif chance < 0.6:
            yield self._chance.choice(PLAIN)
        elif chance < 0.85:
            yield self._chance.choice(OTHERS)
        elif chance < 0.93:
            yield from ("escape", *self._typed(self._command()), "enter")
        else:
            yield from ("escape", "escape", *self._typed(self._chance.choice(MESSAGES)), "enter")

    def _typed(self, text: str) -> Iterator[str]:
        return iter(["ctrl+j" if char == "\n" else char for char in text])

    def _command(self) -> str:
        command = self._chance.choice(COMMANDS)
        folder, chance = self._folder, self._chance
        arguments = {
            "system": ["Be brief.", ""],
            "set": ["temperature 0.2", "top_k 5", "temperture 1", "top_p 7", "", "max_tokens 5"],
            "attach": [f"{folder}/notes.txt", "/nowhere"],
            "rename": ["Greetings", ""],
            "export": [f"{folder}/out{chance.random()}.md", f"{folder}/{chance.random()}.json", "/nowhere/x"],
            "import": [f"{folder}/in.json", "/nowhere"],
            "preset": ["narrow", "x"],
            "model": ["/m/one", "nowhere", ""],
            "theme": ["nord", "textual-dark", "x", ""],
        }
        name = chance.choice([command.name, command.name, command.name[:2], "foo", "", "clear", "?"])
        return f"/{name} {chance.choice(arguments.get(command.name, ['', '', '', 'x']))}".rstrip()

    async def _look(self, chat: Driver) -> None:
        """Everything has been done that was asked for, and the app still runs."""
        pumps: list[MessagePump] = [chat.app, chat.screen]
        await chat.until(lambda: all(pump.message_queue_size == 0 for pump in pumps))
        assert chat.app.is_running, f"it has ended: {self.pressed[-60:]}"
        assert not chat.app._notifications, "nothing is said in a corner"
        if chat.front is not chat.screen:
            return  # those behind it have their place when they are seen again
        await chat.until(lambda: _has_room(chat, chat.prompt.region))


def _has_room(chat: Driver, box: Region) -> bool:
    """Whether the box is on the screen with at least a line, above the keys."""
    below = chat.screen.query_one(Footer).region.y
    return box.height >= 3 and box.bottom <= below and box.right <= chat.app.size.width


async def press_at_random(seed: int, presses: int, size: tuple[int, int], folder: Path) -> None:
    """Press this many keys at random."""
    keys = Presses(seed, folder)
    await _press(keys, lambda chat: keys.run(chat, presses), size, folder)


async def press_each(fronts: Sequence[str], size: tuple[int, int], folder: Path) -> None:
    """Press every key, and send every command."""
    keys = Presses(1, folder)
    await _press(keys, lambda chat: keys.each(chat, fronts), size, folder)


async def _press(
    keys: Presses, run: Callable[[Driver], Awaitable[None]], size: tuple[int, int], folder: Path
) -> None:
    """An AssertionError says what went wrong, and after which keys."""
    place = folder / "conversations.db"
    engine = FakeEngine(pace_s=0.0005)

    def reopen(options: object, tell: object) -> Opening:
        return lambda: LocalClient(engine)

    doors = Doors(reopen, lambda: [HostModel("one", "/m/one", "1 MB"), HostModel("two", "/m/two", "2 MB")])
    app = ChatApp(LocalClient(engine), place=place, doors=doors, reports=folder / "reports")
    app._store.close()
    app._store = app._screen.talk.store = kept = Kept(place)
    kept.save_preset("narrow", "", {"top_k": 5})
    app.exit = Mock()  # type: ignore[method-assign]  # what leaves is pressed, too
    try:
        async with app.run_test(size=size) as pilot:
            chat = Driver(app, pilot)
            await chat.until(lambda: chat.screen.parts.engine.info is not None)
            await run(chat)
            said = dict(kept.users_said)
            del app.exit  # it leaves now
    except BaseException as error:
        raise AssertionError(f"after {keys.pressed[-80:]}: {_reports(folder)}") from error
    finally:
        await asyncio.to_thread(engine.close)
    beside = ConversationStore(place)
    found = {
        turn.id: turn.text
        for conversation in beside.conversations()
        for turn in beside.tree(conversation)
        if turn.role == "user"
    }
    beside.close()
    assert said.items() <= found.items(), f"lost: {said.items() - found.items()}"
    assert not (reports := _reports(folder)), f"beside an answer, after {keys.pressed[-80:]}: {reports}"


def _reports(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in (folder / "reports").glob("*")]
