"""Pictures of the chat for its tests, from a scripted engine: `python -m tests.tools.pictures` draws them.
Those of the documents, with a real model, are drawn by `python -m tests.tools.guide_pictures`."""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from textual.widgets import Input, TextArea

from hetrun.client.engine_client import LocalClient, WorkerClient
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings
from hetrun.tui import streaming
from hetrun.tui.app import ChatApp
from hetrun.tui.host import Doors, HostModel, Opening
from hetrun.tui.screens.dialogs import Choose, TextDialog
from hetrun.tui.screens.help import HelpScreen
from hetrun.tui.screens.settings import SettingsScreen
from hetrun.tui.screens.template import TemplateScreen
from hetrun.tui.screens.tokens import TokensScreen
from hetrun.tui.screens.whatif import WhatIfScreen
from hetrun.tui.widgets.command_list import CommandList
from tests.support.fakes import ENDLESS, FakeEngine
from tests.support.pictures import png
from tests.tui.driver import Driver
from tests.tui.looks import looks

FOLDER = Path(__file__).parents[1] / "tui" / "pictures"
STILL = 3  # pictures in a row that are alike
LOOK_S = 0.3  # between two of them, where it is not known what is to be seen; or else
SHORT_LOOK_S = 0.05
WIDE, SMALL = (130, 36), (80, 24)
ANSWER = (
    "say ## Two ways\n\nA **list** and some `code`:\n\n- one\n- two\n\n```python\ndef double(x):\n"
    "    return 2 * x\n```\n\n| model | tokens/s |\n|---|---|\n| small | 150 |\n"
)


async def loading(chat: Driver) -> None:
    await chat.until(lambda: chat.status[0] == "loading 50 %")


async def conversation(chat: Driver) -> None:
    await chat.exchange("say <think>They want to be greeted.</think>\n\nGood morning!")
    await chat.exchange(ANSWER)


async def empty(chat: Driver) -> None:
    """Nothing was said."""


async def light(chat: Driver) -> None:
    await conversation(chat)
    await chat.command("/theme textual-light")
    await chat.until(lambda: chat.app.theme == "textual-light")


async def turn(chat: Driver) -> None:
    await conversation(chat)
    await chat.select(3)
    await chat.press("enter")
    await chat.opened(Choose)


async def failed(chat: Driver) -> None:
    await chat.send("fail")
    await chat.until(lambda: chat.errors != [])


async def machine(chat: Driver) -> None:
    await chat.exchange("say hello")
    await chat.press("f3")
    await chat.until(lambda: chat.screen.query_one("#machine").display)


async def what_if(chat: Driver) -> None:
    await chat.press("f4")
    await chat.opened(WhatIfScreen)
    chat.front.query_one("#ctx", Input).value = "8192"


async def tokens(chat: Driver) -> None:
    await chat.exchange("say one two three")
    await chat.do_with_turn(1, "i")
    await chat.opened(TokensScreen)


async def template(chat: Driver) -> None:
    await chat.exchange("say one two three")
    await chat.press("f7")
    await chat.opened(TemplateScreen)


async def settings(chat: Driver) -> None:
    await chat.press("f5")
    await chat.opened(SettingsScreen)


async def models(chat: Driver) -> None:
    await chat.press("f6")
    await chat.opened(Choose)


async def help_(chat: Driver) -> None:
    await chat.press("f1")
    await chat.opened(HelpScreen)


async def search(chat: Driver) -> None:
    for word in ("apples", "pears"):
        await chat.exchange(f"say {word}")
        await chat.new()
    await chat.press("ctrl+f", *"pear")
    await chat.until(lambda: chat.titles == ["say pears"])


async def delete(chat: Driver) -> None:
    await chat.exchange("say hello")
    await chat.command("/delete")
    await chat.opened(Choose)


async def attach(chat: Driver) -> None:
    chat.screen.parts.draft.files["notes.txt"] = "some notes"
    chat.screen.parts.draft.show()
    await chat.press("ctrl+o")
    await chat.opened(TextDialog)


async def pictures(chat: Driver) -> None:
    """Two pictures in a message, and one that goes with the next."""
    with tempfile.TemporaryDirectory() as folder:
        for name, size in (("field.png", (96, 64)), ("tower.png", (30, 60))):
            Path(folder, name).write_bytes(png(*size))
        await chat.exchange(f"say Both are red and blue. {folder}/field.png {folder}/tower.png")
        await chat.send(f"/attach {folder}/field.png")
        await chat.until(lambda: len(chat.screen.parts.draft.pictures) == 1)
    shown = [card for entry in chat.transcript.entries for card in entry.cards]
    await chat.until(lambda: all(card.small is not None for card in shown))


async def edit(chat: Driver) -> None:
    await chat.exchange("say hello")
    await chat.send("/edit")
    await chat.until(lambda: chat.screen.parts.draft.editing)


async def commands(chat: Driver) -> None:
    """The list above the box."""
    await conversation(chat)
    await chat.command("/system You are brief.")
    await chat.press(*"/")
    await chat.until(lambda: chat.screen.query_one(CommandList).display)


async def wrong(chat: Driver) -> None:
    """A command that could not be done, below a turn that is selected."""
    await chat.exchange("say hello")
    await chat.send("/set temperture 0.2")
    await chat.until(lambda: chat.said != [])
    await chat.select(1)


async def themes(chat: Driver) -> None:
    await chat.press("f8")
    await chat.opened(Choose)


async def what_if_light(chat: Driver) -> None:
    await chat.command("/theme textual-light")
    await chat.until(lambda: chat.app.theme == "textual-light")
    await what_if(chat)


Scene = Callable[[Driver], Awaitable[None]]
SCENES: dict[str, tuple[Scene, tuple[int, int]]] = {
    "loading": (loading, SMALL),
    "empty": (empty, SMALL),
    "chat": (conversation, WIDE),
    "chat-80x24": (conversation, SMALL),
    "chat-light": (light, WIDE),
    "turn": (turn, SMALL),
    "error": (failed, SMALL),
    "search": (search, SMALL),
    "delete": (delete, SMALL),
    "attach": (attach, SMALL),
    "pictures": (pictures, SMALL),
    "pictures-40x24": (pictures, (40, 24)),
    "edit": (edit, SMALL),
    "themes": (themes, SMALL),
    "commands": (commands, SMALL),
    "commands-60x15": (commands, (60, 15)),
    "wrong": (wrong, SMALL),
    "settings-60x15": (settings, (60, 15)),
    "what-if-light": (what_if_light, SMALL),
    "machine-80x24": (machine, SMALL),
    "machine-gpu": (machine, (80, 50)),
    "what-if": (what_if, SMALL),
    "tokens": (tokens, SMALL),
    "template": (template, SMALL),
    "settings": (settings, SMALL),
    "models": (models, SMALL),
    "help": (help_, SMALL),
}


async def picture(name: str, kept: str | None = None) -> str:
    """A scene as SVG, once nothing moves any more; if there is a kept one, once it looks like that."""
    scene, size = SCENES[name]
    engine = FakeEngine(pace_s=0.001, vram=4 << 30) if name == "machine-gpu" else FakeEngine(pace_s=0.001)

    engine.info = replace(engine.info, pictures=scene is pictures)

    def reopen(changes: object, tell: object) -> Opening:
        return lambda: LocalClient(engine)

    offered = [
        HostModel("SmolLM2-135M-Instruct", "/a.gguf", "94 MiB"),
        HostModel("Qwen3-4B", "/b.gguf", "2.3 GiB"),
    ]
    client = unready() if scene is loading else LocalClient(engine)
    app = ChatApp(client, SamplingParams(seed=1), doors=Doors(reopen, lambda: offered))
    # On a busy machine figures come before an answer ends, too: only those of its end are drawn.
    with patch.object(streaming, "TELL_S", math.inf):
        drawn = await _drawn(app, scene, size, kept)
    await client.close()
    engine.close()
    return drawn


async def _drawn(app: ChatApp, scene: Scene, size: tuple[int, int], kept: str | None) -> str:
    async with app.run_test(size=size) as pilot:
        chat = Driver(app, pilot)
        await chat.until(lambda: scene is loading or chat.screen.parts.engine.info is not None)
        await scene(chat)
        return await settled(chat, looks(kept) if kept else None)


def unready() -> WorkerClient:
    """An engine that is half loaded, for ever."""
    return WorkerClient(Settings.resolve(environ={}, model=ENDLESS), engine="tests.support.fakes:FakeEngine")


async def settled(chat: Driver, wanted: list[str] | None = None) -> str:
    """The picture once nothing moves any more; what is wanted is waited for, however busy the machine is."""
    seen: list[list[str]] = []
    drawn = ""
    for _ in range(60 if wanted is None else 400):
        chat.app.clear_notifications()
        for writing in (*chat.front.query(Input), *chat.front.query(TextArea)):
            writing.cursor_blink = False
        chat.transcript.catch_up()
        await asyncio.sleep(SHORT_LOOK_S if wanted else LOOK_S)
        seen.append(looks(drawn := chat.app.export_screenshot()))
        last = seen[-STILL:] if wanted is None else [*seen[-STILL:], wanted]
        if len(seen) > STILL and all(one == seen[-1] for one in last):
            return drawn
    if wanted is None:
        raise AssertionError("it does not come to rest")
    return drawn


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name in SCENES:
        print(name, file=sys.stderr)
        drawn, place = asyncio.run(picture(name)), FOLDER / f"{name}.svg"
        if not place.exists() or looks(place.read_text(encoding="utf-8")) != looks(drawn):
            place.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
