"""Commands as they are written: the list above the box, what is said there, and what stays in the box."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from textual.widgets import Static

from hetrun.tui.screens.dialogs import Choose
from hetrun.tui.screens.help import HelpScreen
from hetrun.tui.widgets.command_list import CommandList
from hetrun.tui.widgets.notice import Notice
from tests.support.fakes import FakeEngine
from tests.tui.driver import Driver, chatting


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(pace_s=0.001)
    yield fake
    fake.close()


def listed(chat: Driver) -> list[str]:
    """The list as it is shown."""
    found = chat.screen.query_one(CommandList)
    return [str(option.prompt).split()[0] for option in found.options] if found.display else []


async def test_a_slash_opens_a_list_that_follows_what_is_typed(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.press("/")
        await chat.until(lambda: "/new" in listed(chat) and "/quit" in listed(chat))
        above, box = chat.screen.query_one(CommandList), chat.prompt
        await chat.until(lambda: 0 < above.region.height <= 8 and above.region.bottom <= box.region.y)
        words = [str(option.prompt) for option in above.options]
        assert any("begin a new conversation" in line for line in words)
        await chat.press("s", "e")
        await chat.until(lambda: listed(chat) == ["/set", "/settings"])
        await chat.press("x")
        await chat.until(lambda: listed(chat) == [])
        await chat.press("backspace")
        await chat.until(lambda: listed(chat) == ["/set", "/settings"])
        await chat.press("escape")
        await chat.until(lambda: listed(chat) == [])
        assert chat.prompt.text == "/se"


async def test_tab_completes_what_is_chosen_and_enter_sends_it(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.press(*"/se", "tab")
        await chat.until(lambda: chat.prompt.text == "/set ")
        await chat.press(*"tem", "tab", *"0.2", "enter")
        await chat.until(lambda: chat.screen.talk.sampling == {"temperature": 0.2})
        await chat.until(lambda: chat.said == ["temperature = 0.2"])
        await chat.press(*"/h", "enter")  # nothing has to follow it
        await chat.opened(HelpScreen)
        await chat.press("escape")
        await chat.until(lambda: chat.front is chat.screen)
        await chat.press(*"/se", "down", "tab")
        await chat.until(lambda: chat.prompt.text == "/settings")


async def test_enter_behind_a_slash_alone_does_nothing_yet(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say hello")
        await chat.press("/", "enter")
        await chat.until(lambda: chat.screen.query_one(CommandList).highlighted == 0)
        assert chat.answers == ["hello"]


async def test_history_is_walked_through_past_commands(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say hello")
        await chat.command("/system Be brief.")
        await chat.command("/fork")
        await chat.press("up", "up", "up")
        await chat.until(lambda: chat.prompt.text == "say hello")


async def test_what_is_said_stands_above_the_box_and_does_not_pile_up(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.send("/set temperture 0.2")
        await chat.until(lambda: any("did you mean temperature?" in said for said in chat.said))
        notice = chat.screen.query_one(Notice)
        await chat.until(lambda: 0 < notice.region.height and notice.region.bottom == chat.prompt.region.y)
        assert chat.prompt.text == "/set temperture 0.2"
        chat.prompt.put("/foo")
        await chat.press("enter")
        await chat.until(lambda: any("no command /foo" in said for said in chat.said))
        assert len(chat.said) == 1
        await chat.press("x")  # it was read
        await chat.until(lambda: chat.said == [])


@pytest.mark.parametrize("word", ["exit", "bye", "q", "quit"])
async def test_words_of_other_programs_leave(engine: FakeEngine, word: str) -> None:
    async with chatting(engine) as chat:
        await chat.send(f"/{word}")
        await chat.until(lambda: chat.app._exit)


async def test_clear_begins_a_new_conversation(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say hello")
        await chat.command("/clear")
        await chat.until(lambda: chat.answers == [])
        assert len(chat.screen.talk.store.conversations()) == 1


async def test_ctrl_c_says_how_to_leave_and_leaves(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.press("ctrl+c")
        await chat.until(lambda: any("again to quit" in said for said in chat.said))
        assert not chat.app._exit
        await chat.press("ctrl+c")
        await chat.until(lambda: chat.app._exit)


async def test_a_system_prompt_stays_in_sight(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        line = chat.screen.query_one("#told-first", Static)
        assert not line.display
        await chat.command("/system You are brief.")
        await chat.exchange("say hello")
        await chat.until(lambda: line.display and str(line.content) == "system: You are brief.")
        await chat.new()
        await chat.until(lambda: not line.display)


async def test_letters_on_a_turn_begin_a_message(engine: FakeEngine) -> None:
    async with chatting(engine, size=(80, 30)) as chat:
        await chat.exchange("say hello")
        await chat.press("ctrl+up")
        await chat.until(lambda: chat.transcript.has_focus)
        bottom = chat.transcript._top + chat.transcript.size.height
        lines = [chat.transcript._strip(y, 78).text for y in range(min(bottom, chat.transcript._starts[-1]))]
        assert any("Esc: back to your message" in line for line in lines)
        await chat.press(*"really for thanks")
        await chat.until(lambda: chat.prompt.text == "really for thanks")
        assert len(engine.requests) == 1
        assert len(chat.screen.talk.store.conversations()) == 1


@pytest.mark.parametrize(("key", "asked", "kept"), [("f", 1, 2), ("r", 2, 1), ("y", 1, 1)])
async def test_a_key_of_the_menu_is_taken_once(engine: FakeEngine, key: str, asked: int, kept: int) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say hello")
        await chat.press("ctrl+up", "enter")
        await chat.opened(Choose)
        await chat.press(key)
        await chat.until(lambda: chat.front is chat.screen and chat.screen.parts.answers.current is None)
        await chat.until(lambda: len(engine.requests) == asked)
        await chat.until(lambda: len(chat.screen.talk.store.conversations()) == kept)
        assert chat.answers == ["hello"]
        assert [entry.note for entry in chat.entries("assistant")] == [""]


async def test_an_answer_that_is_stopped_before_it_begins_has_ended(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say hello")
        chat.screen.parts.answers.begin(chat.screen.talk.tree.path[0])
        chat.screen.action_stop()  # before its worker had a turn
        assert chat.screen.parts.answers.current is None
        await chat.exchange("say on")
        assert chat.answers[-1] == "on"


async def test_forks_of_forks_are_numbered(engine: FakeEngine) -> None:
    async with chatting(engine, size=(140, 30)) as chat:
        await chat.exchange("say hello")
        for title in ("say hello (fork)", "say hello (fork 2)", "say hello (fork 3)"):
            await chat.command("/fork")
            await chat.until(lambda title=title: chat.titles[0] == title)  # type: ignore[misc]
