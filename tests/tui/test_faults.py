"""Faults of the chat's own: a sentence, and a file to report that has nothing of the conversation."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import pytest

from hetrun.cli import chat as command
from hetrun.cli.exit_codes import OUR_FAULT
from hetrun.client.engine_client import LocalClient
from hetrun.config import Settings
from hetrun.tui.app import ChatApp
from hetrun.tui.screens.chat import ChatScreen
from hetrun.tui.store.store import ConversationStore
from hetrun.tui.store.tree import Tree, Turn
from hetrun.tui.widgets.sidebar import Titles
from tests.support.fakes import FakeEngine
from tests.tui.driver import Driver

SECRET = "my heart is a secret"


def fail(*arguments: object) -> NoReturn:
    raise ValueError(f"{SECRET} is not in list")


async def ended(app: ChatApp) -> None:
    """Something is said, an answer comes, and then a handler fails."""
    async with app.run_test() as pilot:
        chat = Driver(app, pilot)
        await chat.until(lambda: chat.screen.parts.engine.info is not None)
        await chat.exchange(f"say {SECRET}")
        await chat.send("forever")
        await chat.until(lambda: "ha ha" in "".join(chat.answers))
        with patch.object(ChatScreen, "action_page", fail):
            await chat.press("pageup")
            await chat.until(lambda: False)


async def test_a_fault_is_a_sentence_and_a_file_without_the_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(pace_s=0.001)
    reports, place = tmp_path / "state" / "reports", tmp_path / "c.db"
    app = ChatApp(LocalClient(engine), place=place, reports=reports)
    with pytest.raises(ValueError, match="not in list"):
        await ended(app)
    app._print_error_renderables()
    (report,) = reports.iterdir()
    assert report.stat().st_mode & 0o777 == 0o600
    text = report.read_text(encoding="utf-8")
    assert "ValueError" in text
    assert "in action_page" in text or "in fail" in text
    assert str(report) in app.fault
    out = capsys.readouterr()
    for said in (text, app.fault, out.out, out.err):
        assert SECRET not in said
    assert "Traceback" not in out.out + out.err
    store = ConversationStore(place)
    (conversation,) = store.conversations()
    turns = store.tree(conversation).path
    store.close()
    assert [turn.text for turn in turns[:3]] == [f"say {SECRET}", SECRET, "forever"]
    assert (turns[3].text[:5], turns[3].note) == ("ha ha", "stopped")  # what had come by then is kept
    await asyncio.to_thread(engine.close)


def test_the_command_ends_with_that_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(pace_s=0.001)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(command, "_client", lambda settings, log: LocalClient(engine))

    def run(app: ChatApp) -> None:
        app.fault = "something went wrong in the chat"

    monkeypatch.setattr(ChatApp, "run", run)
    assert command.talk(Settings.resolve(environ={}), {}) == OUR_FAULT
    said = capsys.readouterr().err
    assert said == "hetrun: something went wrong in the chat. Every conversation was saved\n"


async def test_what_fails_beside_an_answer_ends_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(pace_s=0.001)
    app = ChatApp(LocalClient(engine), reports=tmp_path)
    async with app.run_test(size=(140, 30)) as pilot:
        chat = Driver(app, pilot)
        await chat.until(lambda: chat.screen.parts.engine.info is not None)
        await chat.exchange("say hello")
        with patch.object(ConversationStore, "conversation", fail):
            chat.screen.post_message(Titles.Wanted("rename", 1))
            await chat.until(lambda: any("ValueError" in said for said in chat.said))
        assert SECRET not in chat.said[0]
        assert len(list(tmp_path.iterdir())) == 1
        await chat.exchange("say on")
    await asyncio.to_thread(engine.close)


def test_a_turn_of_another_conversation_has_no_versions_here() -> None:
    assert Tree([Turn(1, None, "user", "one")]).beside(Turn(7, None, "user", "seven"), 1) is None
