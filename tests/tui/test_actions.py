"""Everything that can be written after a slash, and the keys that no other test presses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from textual.widgets import OptionList, Static

from hetrun.client.engine_client import LocalClient
from hetrun.tui.commands import COMMANDS
from hetrun.tui.host import Doors, HostModel, Opening
from hetrun.tui.screens.dialogs import Choose, TextDialog
from hetrun.tui.screens.help import HelpScreen
from hetrun.tui.screens.settings import SettingsScreen
from hetrun.tui.screens.template import TemplateScreen
from hetrun.tui.screens.tokens import TokensScreen
from hetrun.tui.screens.whatif import Knob, WhatIfScreen
from hetrun.tui.widgets.sidebar import Titles
from tests.support.fakes import FakeEngine
from tests.tui.driver import Driver, chatting

Script = Callable[[Driver, Path], Awaitable[None]]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(pace_s=0.001)
    yield fake
    fake.close()


def doors(engine: FakeEngine) -> Doors:
    def reopen(options: object, tell: object) -> Opening:
        return lambda: LocalClient(engine)

    return Doors(reopen, lambda: [HostModel("one", "/m/one", "1 MB")])


# --- slash commands, each behind one exchange


async def new(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.asked == [])


async def system(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.screen.talk.system == "Be brief.")


async def set_(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.screen.talk.sampling == {"temperature": 0.2})


async def regenerate(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.entries("assistant")[0].place == "version 2 of 2")


async def edit(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.screen.parts.draft.editing and chat.prompt.text == "say hello")


async def fork(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: len(chat.screen.talk.store.conversations()) == 2)
    assert chat.answers == ["hello"]


async def copy(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.app.clipboard == "hello")


async def attach(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: list(chat.screen.parts.draft.files) == ["notes.txt"])


async def rename(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: [c.title for c in chat.screen.talk.store.conversations()] == ["Greetings"])


async def delete(chat: Driver, folder: Path) -> None:
    await chat.opened(Choose)
    await chat.press("y")
    await chat.until(lambda: chat.asked == [])
    assert list(chat.screen.talk.store.conversations()) == []


async def export(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.said != [])
    written = (folder / "out.md").read_text(encoding="utf-8")
    assert "hello" in written.partition("say hello")[2]


async def import_(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.asked == ["Guten Tag"])


async def preset(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.screen.talk.sampling == {"top_k": 5})


async def settings(chat: Driver, folder: Path) -> None:
    await chat.opened(SettingsScreen)


async def model(chat: Driver, folder: Path) -> None:
    await chat.until(
        lambda: (
            chat.screen.parts.engine.options == {"model": "/m/one"}
            and chat.screen.parts.engine.info is not None
        )
    )


async def whatif(chat: Driver, folder: Path) -> None:
    await chat.opened(WhatIfScreen)


async def template(chat: Driver, folder: Path) -> None:
    await chat.opened(TemplateScreen)


async def tokens(chat: Driver, folder: Path) -> None:
    await chat.opened(TokensScreen)


async def machine(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.screen.query_one("#machine").display)


async def conversations(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.screen.query_one("#sidebar").display and chat.titles == ["say hello"])


async def theme(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.app.theme == "nord")


async def help_(chat: Driver, folder: Path) -> None:
    await chat.opened(HelpScreen)


async def quit_(chat: Driver, folder: Path) -> None:
    await chat.until(lambda: chat.app._exit)


WRITTEN: dict[str, tuple[str, Script]] = {
    "new": ("", new),
    "system": ("Be brief.", system),
    "set": ("temperature 0.2", set_),
    "regenerate": ("", regenerate),
    "edit": ("", edit),
    "fork": ("", fork),
    "copy": ("", copy),
    "attach": ("{folder}/notes.txt", attach),
    "rename": ("Greetings", rename),
    "delete": ("", delete),
    "export": ("{folder}/out.md", export),
    "import": ("{folder}/in.json", import_),
    "settings": ("", settings),
    "preset": ("narrow", preset),
    "model": ("/m/one", model),
    "whatif": ("", whatif),
    "template": ("", template),
    "tokens": ("", tokens),
    "machine": ("", machine),
    "conversations": ("", conversations),
    "theme": ("nord", theme),
    "help": ("", help_),
    "quit": ("", quit_),
}


def test_every_command_is_tried() -> None:
    assert list(WRITTEN) == [command.name for command in COMMANDS]


@pytest.mark.parametrize("name", WRITTEN)
async def test_a_command_does_what_it_says(name: str, engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("some notes", encoding="utf-8")
    (tmp_path / "in.json").write_text('[{"role": "user", "content": "Guten Tag"}]', encoding="utf-8")
    argument, check = WRITTEN[name]
    async with chatting(engine, doors=doors(engine)) as chat:
        chat.screen.talk.store.save_preset("narrow", "", {"top_k": 5})
        await chat.exchange("say hello")
        await chat.send(f"/{name} {argument.format(folder=tmp_path)}".strip())
        await check(chat, tmp_path)
        assert chat.errors == []


# --- keys


async def test_turns_are_walked_through_by_keys(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        for word in ("one", "two"):
            await chat.exchange(f"say {word}")
        await chat.press("ctrl+up")
        await chat.until(lambda: chat.transcript.has_focus and chat.transcript.selected == 3)
        await chat.press("up", "up", "up", "up")
        await chat.until(lambda: chat.transcript.selected == 0)
        await chat.press("down")
        await chat.until(lambda: chat.transcript.selected == 1)
        await chat.do_with_turn(1, "r")
        await chat.until(lambda: chat.asked == ["say one"] and chat.screen.parts.answers.current is None)
        assert chat.entries("assistant")[0].place == "version 2 of 2"


async def test_one_goes_to_the_turns_with_tab_and_comes_back_by_writing(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.press("tab")  # there are none yet
        await chat.exchange("say one")
        await chat.press("tab")
        await chat.until(lambda: chat.transcript.selected == 1)
        await chat.until(lambda: {"Back", "Menu"} <= set(chat.keys))
        await chat.press("escape")
        await chat.until(lambda: chat.prompt.has_focus and chat.transcript.selected is None)
        await chat.press("tab")
        await chat.until(lambda: chat.transcript.selected == 1)
        await chat.press("h")
        await chat.until(lambda: chat.prompt.has_focus and chat.prompt.text == "h")
        await chat.press("e")  # which would edit a turn
        await chat.until(lambda: chat.prompt.text == "he")
        assert chat.transcript.selected is None
        assert not chat.screen.parts.draft.editing
        await chat.press("f2")
        await chat.until(lambda: isinstance(chat.app.focused, Titles))
        await chat.press("w")
        await chat.until(lambda: chat.prompt.has_focus and chat.prompt.text == "hew")
        await chat.press("ctrl+f", "escape")
        await chat.until(lambda: chat.prompt.has_focus)


async def test_another_version_is_selected_as_the_first_was(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say one")
        await chat.press("ctrl+r")
        await chat.until(lambda: [e.place for e in chat.entries("assistant")] == ["version 2 of 2"])
        await chat.until(lambda: chat.screen.parts.answers.current is None)
        await chat.select(1)
        await chat.press("left")
        await chat.until(lambda: [e.place for e in chat.entries("assistant")] == ["version 1 of 2"])
        assert chat.transcript.selected == 1
        await chat.press("right")
        await chat.until(lambda: [e.place for e in chat.entries("assistant")] == ["version 2 of 2"])
        assert chat.transcript.selected == 1


async def test_a_screen_that_becomes_narrow_shows_one_side(engine: FakeEngine) -> None:
    async with chatting(engine, size=(130, 30)) as chat:
        for name in ("sidebar", "machine"):
            await chat.screen.run_action(f"pane('{name}')")
            await chat.screen.run_action(f"pane('{name}')")
        await chat.pilot.resize_terminal(80, 24)
        panes = [chat.screen.query_one(f"#{name}") for name in ("sidebar", "machine")]
        await chat.until(lambda: [pane.display for pane in panes] == [False, True])


async def test_what_was_stopped_counts(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.send("forever")
        await chat.until(lambda: "ha ha ha" in "".join(chat.answers))
        await chat.press("escape")
        await chat.answered()
        used = chat.screen.parts.figures.used
        assert used > 2
        await chat.until(lambda: f"{used} of 2048 tokens" in chat.status[1])


async def test_home_and_end_are_the_first_line_and_the_last(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say " + "\n\n".join(map(str, range(60))))
        await chat.until(lambda: chat.transcript.scroll_y == chat.transcript.max_scroll_y > 0)
        await chat.press("ctrl+up")
        await chat.until(lambda: chat.transcript.has_focus)
        await chat.press("home")
        await chat.until(lambda: chat.transcript.scroll_y == 0)
        await chat.press("end")
        await chat.until(lambda: chat.transcript.scroll_y == chat.transcript.max_scroll_y > 0)


async def test_lines_begin_with_the_keys_that_terminals_can_send(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.press("a", "shift+enter", "b", "alt+enter", "c")
        await chat.until(lambda: chat.prompt.text == "a\nb\nc")


async def test_colours_are_chosen_by_a_key(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.press("f8")
        await chat.opened(Choose)
        before = chat.front.query_one(OptionList).highlighted
        assert chat.options[before or 0] == chat.app.theme
        await chat.press("down", "enter")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)
        await chat.until(lambda: chat.app.theme == chat.screen.talk.store.choice("theme", ""))


async def test_a_conversation_is_deleted_with_the_key_of_that_name(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say hello")
        await chat.press("f2")
        await chat.until(lambda: isinstance(chat.app.focused, Titles))
        await chat.press("delete")
        await chat.opened(Choose)
        await chat.press("escape")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)
        assert chat.titles == ["say hello"]
        await chat.press("delete")
        await chat.opened(Choose)
        await chat.press("down", "enter")
        await chat.until(lambda: chat.titles == [])


async def test_a_dialog_is_left_by_its_button(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.press("ctrl+o")
        await chat.opened(TextDialog)
        await chat.pilot.click("#cancel")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)
        assert chat.screen.parts.draft.files == {}


async def test_knobs_are_turned_up_and_down(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.press("f4")
        await chat.opened(WhatIfScreen)
        knobs = {knob.id: knob for knob in chat.front.query(Knob)}
        await chat.until(lambda: knobs["ctx"].now == "2048")
        await chat.press("up")
        await chat.until(lambda: knobs["ctx"].value == "4096")
        await chat.press("tab", "up")
        await chat.until(lambda: knobs["kv_type"].value == "q8_0")
        await chat.pilot.click("#close")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)


async def test_unlikely_tokens_are_found_by_keys(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say one two three")
        await chat.do_with_turn(1, "i")
        await chat.opened(TokensScreen)

        def shown() -> str:
            return str(chat.front.query_one("#token", Static).content)

        await chat.until(lambda: shown().startswith("token 1 of"))
        await chat.press("right", "left", "ctrl+right")
        await chat.until(lambda: shown() != "")
        await chat.press("ctrl+left", "escape")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)


async def test_a_prompt_is_copied_and_help_is_closed(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say hello")
        await chat.press("f7")
        await chat.opened(TemplateScreen)
        await chat.press("y")
        await chat.until(lambda: "[user]say hello" in chat.app.clipboard)
        await chat.press("escape")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)
        await chat.press("f1")
        await chat.opened(HelpScreen)
        await chat.press("q")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)
