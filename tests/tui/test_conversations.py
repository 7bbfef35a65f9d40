"""Conversations in the chat: kept, found again, changed, and brought in and out."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.widgets import Input

from hetrun.client.sampling_params import SamplingParams
from hetrun.tui.conversation import UNFINISHED
from hetrun.tui.screens.dialogs import Choose, TextDialog
from hetrun.tui.screens.settings import SettingsScreen
from hetrun.tui.store.store import ConversationStore
from hetrun.tui.widgets.sidebar import Sidebar, Titles
from tests.support.fakes import FakeEngine
from tests.tui.driver import Driver, chatting


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(pace_s=0.002)
    yield fake
    fake.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "data" / "conversations.db"


async def test_what_was_said_is_there_the_next_time(engine: FakeEngine, place: Path) -> None:
    async with chatting(engine, place=place, size=(140, 30)) as chat:
        await chat.exchange("say hello world")
        assert chat.titles == ["say hello world"]
    async with chatting(engine, place=place, size=(140, 30)) as chat:
        assert chat.answers == []  # a new one begins
        assert chat.titles == ["say hello world"]
        chat.screen.query_one(Titles).focus()
        await chat.press("down", "enter")
        await chat.until(lambda: chat.answers == ["hello world"])
        assert chat.status[1] == "150 tokens/s · first after 0.12 s · 9 of 2048 tokens"
        await chat.exchange("say more")
    assert engine.requests[-1].messages == (
        {"role": "user", "content": "say hello world"},
        {"role": "assistant", "content": "hello world"},
        {"role": "user", "content": "say more"},
    )
    assert place.stat().st_mode & 0o077 == 0  # no other user may read it


async def test_a_question_is_kept_before_it_is_answered(engine: FakeEngine, place: Path) -> None:
    async with chatting(engine, place=place) as chat:
        await chat.send("silence")
        await chat.until(lambda: engine.requests != [])
        beside = ConversationStore(place)  # as if the file were opened after this program was killed
        kept = beside.tree(beside.conversations()[0])
        beside.close()
        assert [(turn.role, turn.text) for turn in kept.path] == [("user", "silence")]


async def test_an_answer_is_kept_while_it_comes(engine: FakeEngine, place: Path) -> None:
    async with chatting(engine, place=place) as chat:
        await chat.send("forever")
        beside: list[tuple[str, str, str]] = []

        def kept() -> bool:
            store = ConversationStore(place)
            beside[:] = [
                (turn.role, turn.text[:2], turn.note)
                for conversation in store.conversations()
                for turn in store.tree(conversation).path
            ]
            store.close()
            return len(beside) == 2

        await chat.until(kept)
        assert beside[1] == ("assistant", "ha", UNFINISHED)
        await chat.press("escape")
        await chat.answered()
        kept()
        assert beside[1] == ("assistant", "ha", "stopped")


async def test_search_rename_delete_and_export(engine: FakeEngine, place: Path, tmp_path: Path) -> None:
    async with chatting(engine, place=place, size=(140, 30)) as chat:
        await chat.exchange("say apples")
        await chat.new()
        await chat.exchange("say PEARS")
        assert chat.titles == ["say PEARS", "say apples"]
        await chat.press("ctrl+f")
        await chat.until(lambda: chat.screen.query_one(Sidebar).query_one(Input).has_focus)
        await chat.press(*"pears")
        await chat.until(lambda: chat.titles == ["say PEARS"])
        await chat.press("enter")
        await chat.until(lambda: chat.screen.query_one(Titles).has_focus)
        await chat.press("down", "right")
        await chat.opened(Choose)
        await chat.press("r")
        await chat.opened(TextDialog)
        await chat.press("!", "enter")
        await chat.until(lambda: chat.titles == ["say PEARS!"])
        await chat.press("right")
        await chat.opened(Choose)
        await chat.press("x")
        await chat.opened(TextDialog)
        chat.front.query_one(Input).value = str(tmp_path / "out.md")
        await chat.press("enter")
        await chat.until((tmp_path / "out.md").exists)
        assert (
            tmp_path / "out.md"
        ).read_text() == "# say PEARS!\n\n**You**\n\nsay PEARS\n\n**Answer**\n\nPEARS\n"
        chat.screen.query_one(Sidebar).query_one(Input).value = ""
        await chat.until(lambda: len(chat.titles) == 2)
        chat.screen.query_one(Titles).focus()
        await chat.press("delete")
        await chat.opened(Choose)
        await chat.press("y")
        await chat.until(lambda: chat.titles == ["say apples"])
        assert chat.answers == []  # it was open


async def test_json_out_and_in_again_has_everything(engine: FakeEngine, place: Path, tmp_path: Path) -> None:
    async with chatting(engine, place=place, size=(140, 30)) as chat:
        await chat.exchange("say one")
        await chat.command("/system Be brief.")
        await chat.command("/set temperature 0.25")
        await chat.command("/regenerate")
        await chat.until(lambda: "version 2 of 2" in chat.shown and chat.screen.parts.answers.current is None)
        out = tmp_path / "out.json"
        await chat.command(f"/export {out}")
        await chat.until(out.exists)
        await chat.command(f"/import {out}")
        await chat.until(lambda: len(chat.titles) == 2)
        assert chat.answers == ["one"]
        assert "version 2 of 2" in chat.shown
        assert chat.screen.talk.system == "Be brief."
        assert chat.screen.talk.params.temperature == 0.25
    facts = json.loads(out.read_text())
    assert [turn["content"] for turn in facts["turns"]] == ["say one", "one", "one"]


async def test_messages_as_others_have_them_are_imported(engine: FakeEngine, tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "say hi"}]},
        {"role": "assistant", "content": "hi"},
    ]
    (tmp_path / "in.json").write_text(json.dumps({"messages": messages}))
    async with chatting(engine) as chat:
        await chat.command(f"/import {tmp_path / 'in.json'}")
        await chat.until(lambda: chat.answers == ["hi"])
        await chat.exchange("say more")
    assert engine.requests[0].messages == (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "say hi"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "say more"},
    )


async def test_edit_makes_another_version(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say one")
        await chat.exchange("say two")
        await chat.do_with_turn(0, "e")
        await chat.until(lambda: chat.prompt.has_focus)
        assert chat.prompt.text == "say one"
        chat.prompt.clear()
        await chat.send("say three")
        await chat.until(lambda: chat.answers == ["three"] and chat.screen.parts.answers.current is None)
        assert engine.requests[-1].messages == ({"role": "user", "content": "say three"},)
        await chat.select(0)
        await chat.press("left")
        await chat.until(lambda: chat.answers == ["one", "two"])
        await chat.select(0)
        await chat.press("right")
        await chat.until(lambda: chat.answers == ["three"])


async def test_escape_gives_editing_up(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say one")
        await chat.send("/edit")
        await chat.until(lambda: chat.screen.parts.draft.editing)
        await chat.press("escape")
        await chat.until(lambda: not chat.screen.parts.draft.editing)
        assert chat.prompt.text == ""
        await chat.exchange("say two")
        assert chat.answers == ["one", "two"]


async def test_regenerate_asks_the_same_again(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say one")
        await chat.press("ctrl+r")
        await chat.until(lambda: len(engine.requests) == 2 and chat.screen.parts.answers.current is None)
        assert engine.requests[0].messages == engine.requests[1].messages
        assert chat.answers == ["one"]
        assert "version 2 of 2" in chat.shown


async def test_fork_leaves_the_first_conversation_alone(engine: FakeEngine) -> None:
    async with chatting(engine, size=(140, 30)) as chat:
        await chat.exchange("say one")
        await chat.exchange("say two")
        await chat.do_with_turn(1, "f")
        await chat.until(lambda: chat.answers == ["one"])
        assert chat.titles == ["say one (fork)", "say one"]
        await chat.exchange("say three")
        assert chat.answers == ["one", "three"]
        chat.screen.query_one(Titles).focus()
        await chat.press("down", "enter")
        await chat.until(lambda: chat.answers == ["one", "two"])


async def test_the_menu_of_a_turn_offers_what_can_be_done(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say ```py\nx = 1\n```")
        await chat.select(1)
        await chat.press("enter")
        await chat.opened(Choose)
        assert chat.options == ["regenerate", "fork", "copy", "code", "tokens"]
        await chat.press("c")
        await chat.until(lambda: chat.app.clipboard == "x = 1")
        await chat.do_with_turn(0, "y")
        await chat.until(lambda: chat.app.clipboard == "say ```py\nx = 1\n```")


async def test_the_mouse_does_the_same(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say ```py\nx = 1\n```")
        await chat.until(lambda: chat.transcript.region.height > 0)
        head = next(i for i, line in enumerate(chat.shown.splitlines()) if line.endswith("copy"))
        await chat.pilot.click(chat.transcript, offset=(60, head))
        await chat.until(lambda: chat.app.clipboard == "x = 1")
        await chat.pilot.click(chat.transcript, offset=(5, 0))
        await chat.until(lambda: chat.transcript.selected == 0)
        await chat.pilot.click(chat.transcript, offset=(5, 0))
        await chat.opened(Choose)
        await chat.press("escape")
        await chat.until(lambda: chat.front is chat.screen)


async def test_thoughts_are_folded_away(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say <think>let me see</think>\n\nforty two")
        assert "▸ Thought, 3 words" in chat.shown
        assert chat.shown.count("let me see") == 1  # as it was asked for
        assert "\nforty two" in chat.shown
        await chat.do_with_turn(1, "t")
        await chat.until(lambda: chat.shown.count("let me see") == 2)
        await chat.exchange("say on")
    messages = engine.requests[-1].messages
    assert messages is not None
    assert messages[1] == {"role": "assistant", "content": "forty two"}  # what was thought is not told again


async def test_thoughts_in_a_channel_are_folded_away_too(engine: FakeEngine) -> None:
    thought, answer = "<|channel|>analysis<|message|>let me see", "<|channel|>final<|message|>forty two"
    async with chatting(engine) as chat:
        await chat.exchange(f"say {thought}<|end|><|start|>assistant{answer}")
        assert "▸ Thought, 3 words" in chat.shown
        assert "\nforty two" in chat.shown
        await chat.exchange("say on")
    messages = engine.requests[-1].messages
    assert messages is not None
    assert messages[1] == {"role": "assistant", "content": "forty two"}


async def test_gemmas_thoughts_are_folded_away_wherever_they_are(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say forty <|channel>thought\nlet me see\n<channel|>two")
        assert "▸ Thought, 3 words" in chat.shown
        assert "\nforty\n\ntwo\n" in chat.shown
        await chat.exchange("say on")
    messages = engine.requests[-1].messages
    assert messages is not None
    assert messages[1] == {"role": "assistant", "content": "forty\n\ntwo"}


async def test_a_thought_that_the_prompt_began(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("muse hm</think>so")
        assert "▸ Thought, 1 words" in chat.shown
        assert chat.shown.rstrip().endswith("so")


async def test_history_comes_back_with_the_arrow_keys(engine: FakeEngine, place: Path) -> None:
    async with chatting(engine, place=place) as chat:
        await chat.exchange("say one")
        await chat.exchange("say two")
    async with chatting(engine, place=place) as chat:
        chat.prompt.insert("draft")
        await chat.press("up")
        await chat.until(lambda: chat.prompt.text == "say two")
        await chat.press("up")
        await chat.until(lambda: chat.prompt.text == "say one")
        await chat.press("down", "down")
        await chat.until(lambda: chat.prompt.text == "draft")


async def test_a_text_file_goes_with_the_next_message(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("three ``` ticks\n")
    async with chatting(engine) as chat:
        await chat.press("ctrl+o")
        await chat.opened(TextDialog)
        chat.front.query_one(Input).value = str(tmp_path / "notes.txt")
        await chat.press("enter")
        await chat.until(lambda: chat.screen.parts.draft.files != {})
        await chat.exchange("say hello")
        await chat.exchange("say more")
    first = engine.requests[0].messages
    assert first == ({"role": "user", "content": "say hello\n\n````notes.txt\nthree ``` ticks\n````"},)
    assert engine.requests[1].messages is not None
    assert engine.requests[1].messages[-1] == {"role": "user", "content": "say more"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/nothing", "there is no command /nothing"),
        ("/themes", "did you mean /theme?"),
        ("/new now", "/new takes no argument"),
        ("/rename", "/rename needs an argument: /rename TITLE"),
        ("/rename x", "this conversation is empty"),
        ("/set temprature 1", "did you mean temperature?"),
        ("/set top_p 7", "top_p must be"),
        ("/attach /nowhere", "/nowhere cannot be read"),
        ("/import /nowhere", "/nowhere cannot be read"),
        ("/preset x", "there is no preset x; known: none"),
        ("/theme x", "there is no theme x"),
        ("/copy", "there is no message yet to do that with"),
        ("/model x", "another --url"),
    ],
)
async def test_a_command_that_makes_no_sense_is_said(engine: FakeEngine, text: str, said: str) -> None:
    async with chatting(engine) as chat:
        await chat.send(text)
        await chat.until(lambda: any(said in notice for notice in chat.said))
        assert chat.prompt.text == text  # to be mended
        assert engine.requests == []


async def test_two_slashes_are_one_that_is_sent(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("//help")
    assert engine.requests[0].messages == ({"role": "user", "content": "/help"},)


async def test_commands_are_completed(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        chat.prompt.insert("/rege")
        await chat.press("tab")
        await chat.until(lambda: chat.prompt.text == "/regenerate")


async def test_sampling_and_presets_belong_to_the_conversation(engine: FakeEngine, place: Path) -> None:
    async with chatting(engine, SamplingParams(seed=3), place=place) as chat:
        await chat.press("f5")
        await chat.opened(SettingsScreen)
        await _fill(chat, temperature="0.5", top_k="7")
        await chat.pilot.click("#keep")
        await chat.opened(TextDialog)
        await chat.press(*"calm", "enter")
        await chat.opened(SettingsScreen)
        await chat.press("ctrl+s")
        await chat.until(lambda: chat.front is chat.screen)
        await chat.exchange("say one")
        await chat.new()
        await chat.exchange("say two")
        await chat.command("/preset calm")
        await chat.exchange("say three")
    told = [(r.params.temperature, r.params.top_k, r.params.seed) for r in engine.requests]
    assert told == [(0.5, 7, 3), (None, 40, 3), (0.5, 7, 3)]


async def test_sampling_that_makes_no_sense_stays_in_the_form(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.press("f5")
        await chat.opened(SettingsScreen)
        await _fill(chat, temperature="hot")
        await chat.press("ctrl+s")
        await chat.pilot.pause()
        assert isinstance(chat.front, SettingsScreen)
        await chat.press("escape")
        await chat.until(lambda: chat.front is chat.screen)


async def _fill(chat: Driver, **values: str) -> None:
    for name, value in values.items():
        chat.front.query_one(f"#{name}", Input).value = value
    await asyncio.sleep(0)


async def test_a_file_that_cannot_be_used_is_a_notice(engine: FakeEngine, tmp_path: Path) -> None:
    place = tmp_path / "conversations.db"
    place.write_bytes(b"this is no database, and someone may still want it" * 100)
    async with chatting(engine, place=place) as chat:
        await chat.until(lambda: any("Conversations will not be saved" in notice for notice in chat.said))
        await chat.exchange("say hello")
        assert chat.answers == ["hello"]
    assert place.read_bytes().startswith(b"this is no database")


async def test_what_cannot_be_kept_is_said_and_the_chat_goes_on(engine: FakeEngine, place: Path) -> None:
    async with chatting(engine, place=place) as chat:
        await chat.exchange("say one")
        beside = sqlite3.connect(place)
        beside.execute(
            "CREATE TRIGGER full BEFORE INSERT ON turn BEGIN SELECT RAISE(FAIL, 'disk is full'); END"
        )
        beside.commit()
        await chat.send("say two")
        await chat.until(lambda: any("disk is full" in error for error in chat.errors))
        assert chat.answers == ["one"]
        await chat.until(lambda: chat.prompt.text == "say two")  # it is not lost
        chat.prompt.clear()
        beside.execute("DROP TRIGGER full")
        beside.commit()
        beside.close()
        await chat.exchange("say three")
        assert chat.answers == ["one", "three"]
