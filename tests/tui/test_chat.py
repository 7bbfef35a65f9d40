"""The terminal chat with a scripted engine, driven by the keyboard."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from tempfile import TemporaryFile

import pytest
from textual import events
from textual.widgets import Footer, ProgressBar

from hetrun.client.engine_client import LocalClient, WorkerClient
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings
from hetrun.system.terminal_text import visible
from hetrun.tui.app import ChatApp
from hetrun.tui.transcript.widget import Transcript
from hetrun.tui.widgets.prompt import Prompt
from hetrun.tui.widgets.status import StatusLine
from hetrun.tui.widgets.welcome import Welcome
from tests.support.fakes import ENDLESS, REFUSED, FakeEngine
from tests.tui.driver import Driver, chatting

FAKE = "tests.support.fakes:FakeEngine"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(pace_s=0.005)
    yield fake
    fake.close()


async def test_a_message_is_answered(engine: FakeEngine) -> None:
    async with chatting(engine, SamplingParams(seed=7), system="Be brief.") as chat:
        assert chat.status == ("fake", "0 of 2048 tokens")
        await chat.send("say hello world")
        await chat.answered()
        assert chat.answers == ["hello world"]
        assert chat.asked == ["say hello world"]
        assert chat.prompt.text == ""
        assert not chat.screen.query_one(Welcome).display
        await chat.until(lambda: chat.status[1] == "150 tokens/s · first after 0.12 s · 9 of 2048 tokens")
        await chat.send("say more")
        await chat.answered(2)
    first, second = engine.requests
    assert first.params.seed == 7
    system = {"role": "system", "content": "Be brief."}
    asked = {"role": "user", "content": "say hello world"}
    assert first.messages == (system, asked)
    answered = {"role": "assistant", "content": "hello world"}
    assert second.messages == (system, asked, answered, {"role": "user", "content": "say more"})


async def test_the_disk_shows_where_weights_come_from_it() -> None:
    engine = FakeEngine(pace_s=0.005, ram=1 << 30)
    async with chatting(engine) as chat:
        await chat.send("say hello")
        await chat.answered()
        figures = "150 tokens/s · first after 0.12 s · disk 2.0 GB/s · 8 of 2048 tokens"
        await chat.until(lambda: chat.status[1] == figures)
    engine.close()


async def test_text_shows_while_it_comes(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.send("forever")
        await chat.until(lambda: chat.answers != [] and "ha ha ha" in chat.answers[0])
        await chat.until(lambda: "tokens/s" in chat.status[1])
        assert chat.screen.parts.answers.current is not None
        await chat.until(lambda: "Stop" in chat.keys)


async def test_escape_stops_and_what_was_said_stays(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        assert "Stop" not in chat.keys
        await chat.send("forever")
        await chat.until(lambda: "ha ha" in "".join(chat.answers))
        await chat.press("escape")
        await chat.answered()
        await chat.until(lambda: engine.cancelled == [1])
        assert await asyncio.to_thread(engine.idle.wait, 5)
        said = chat.answers[0]
        assert chat.entries("assistant")[0].note == "stopped"
        assert "Stop" not in chat.keys
        await chat.send("say go on")
        await chat.answered(2)
        messages = engine.requests[1].messages
        assert messages is not None
        assert messages[1] == {"role": "assistant", "content": said}


async def test_escape_with_nothing_to_stop_does_nothing(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.press("escape")
        await chat.send("say hello")
        await chat.answered()
        assert chat.answers == ["hello"]


async def test_one_answer_at_a_time(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.send("forever")
        await chat.until(lambda: chat.answers != [])
        await chat.send("say hello")
        await chat.until(lambda: chat.said != [])
        assert len(engine.requests) == 1
        assert chat.prompt.text == "say hello"  # it is not lost


async def test_a_failure_is_a_message_and_the_conversation_goes_on(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.send("fail")
        await chat.until(lambda: chat.errors != [])
        assert chat.errors == ["the fake backend failed"]
        assert chat.answers == ["one two "]
        await chat.send("say hello")
        await chat.answered(2)
        assert chat.answers == ["one two ", "hello"]


async def test_a_refused_message_can_be_changed_and_sent_again(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.send("refuse")
        await chat.until(lambda: chat.errors != [] and chat.screen.parts.answers.current is None)
        assert chat.prompt.text == "refuse"
        assert chat.errors == ["the prompt has 5000 tokens and the context 2048: shorten it"]
        assert chat.answers == []
        chat.prompt.clear()
        await chat.send("say hello")
        await chat.answered()
        assert engine.requests[0].messages == ({"role": "user", "content": "say hello"},)


async def test_a_full_context_is_said(engine: FakeEngine) -> None:
    async with chatting(engine, SamplingParams(max_tokens=3)) as chat:
        await chat.send("forever")
        await chat.answered()
        assert "limit of 3 tokens" in chat.entries("assistant")[0].note


async def test_a_new_conversation_forgets_the_old_one(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.send("say hello")
        await chat.answered()
        await chat.send("forever")
        await chat.until(lambda: len(chat.answers) == 2)
        await chat.press("ctrl+n")
        await chat.until(lambda: chat.answers == [])
        assert await asyncio.to_thread(engine.idle.wait, 5)
        assert chat.status[1] == "0 of 2048 tokens"
        await chat.send("say again")
        await chat.answered()
        assert engine.requests[-1].messages == ({"role": "user", "content": "say again"},)


async def test_lines_and_empty_messages(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.pilot.press("enter", "space", "enter")
        assert engine.requests == []
        chat.prompt.clear()
        await chat.pilot.press("s", "a", "y", "space", "a", "ctrl+j", "b", "enter")
        await chat.answered()
        assert chat.answers == ["a\nb"]


async def test_keys_that_come_all_at_once_keep_their_order(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        for key in (*"hello", "enter"):
            chat.app.simulate_key(key)
        await chat.answered()
    assert engine.requests[0].messages == ({"role": "user", "content": "hello"},)


async def test_markdown_is_whole_in_the_end(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.send("say # Title\n\n```python\nx = 1\n```\n")
        await chat.answered()
        assert chat.answers == ["# Title\n\n```python\nx = 1\n```"]
        assert chat.entries("assistant")[0].codes == ["x = 1"]
        lines = chat.shown.splitlines()
        assert "# Title" in lines
        assert "x = 1" in lines
        assert [line.split() for line in lines if line.endswith("copy")] == [["python", "copy"]]


async def test_it_follows_the_end_until_the_user_scrolls_away() -> None:
    # Slow enough for the page keys to catch up with it.
    engine = FakeEngine(pace_s=0.03)
    async with chatting(engine, SamplingParams(max_tokens=1000)) as chat:
        view = chat.transcript
        await chat.send("forever \n\nnew")
        await chat.until(lambda: view.max_scroll_y > 20 and view.scroll_y == view.max_scroll_y)
        await chat.press("pageup")
        await chat.until(lambda: view.scroll_y < view.max_scroll_y - 5)
        at, end = view.scroll_y, view.max_scroll_y
        await chat.until(lambda: view.max_scroll_y > end + 5)
        assert view.scroll_y == at
        while view.scroll_y < view.max_scroll_y:
            await chat.press("pagedown")
            await asyncio.sleep(0.05)
        end = view.max_scroll_y
        await chat.until(lambda: view.max_scroll_y > end + 5 and view.scroll_y == view.max_scroll_y)
    engine.close()


async def test_everything_fits_into_80_columns_and_24_lines(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        chat.prompt.insert("line\n" * 30)
        await chat.pilot.pause()
        await chat.until(lambda: chat.prompt.region.height == 8)
        chat.transcript.display = True
        chat.screen.query_one(Welcome).display = False
        panes = [chat.screen.query_one(w) for w in (Transcript, StatusLine, Prompt, Footer)]
        await chat.until(lambda: [pane.region.height for pane in panes] == [13, 1, 8, 1])
        regions = [pane.region for pane in panes]
        assert all(r.x <= 1 and r.right == 80 for r in regions)
        assert regions[-1].bottom == 24


async def test_loading_shows_its_progress() -> None:
    client = WorkerClient(Settings.resolve(model=ENDLESS), engine=FAKE)
    app = ChatApp(client)
    async with app.run_test(size=(80, 24)) as pilot:
        chat = Driver(app, pilot)
        await chat.until(lambda: client.progress >= 0.5)
        await chat.until(lambda: chat.screen.query_one(ProgressBar).percentage == 0.5)
        assert chat.status[0] == "loading 50 %"
    await client.close()


async def test_a_model_that_cannot_be_loaded_is_a_message() -> None:
    client = WorkerClient(Settings.resolve(model=REFUSED), engine=FAKE)
    app = ChatApp(client)
    async with app.run_test(size=(80, 24)) as pilot:
        chat = Driver(app, pilot)
        await chat.until(lambda: chat.errors != [])
        assert chat.errors == [f"{REFUSED}: it is not a model"]
        assert str(app.load_error) == chat.errors[0]
    await client.close()


async def test_a_first_message_may_be_sent_while_the_model_loads() -> None:
    client = WorkerClient(Settings(), engine=FAKE)
    app = ChatApp(client)
    async with app.run_test(size=(80, 24)) as pilot:
        chat = Driver(app, pilot)
        await chat.send("say hello")
        await chat.answered()
        assert chat.answers == ["hello"]
    await client.close()


async def test_the_conversation_goes_on_when_the_engine_crashed() -> None:
    with TemporaryFile() as log:
        client = WorkerClient(Settings(), engine=FAKE, log=log)
        app = ChatApp(client)
        async with app.run_test(size=(80, 24)) as pilot:
            chat = Driver(app, pilot)
            await chat.send("crash")
            await chat.until(lambda: chat.errors != [])
            assert "SIGABRT" in chat.errors[0]
            assert chat.answers[0].startswith("one ")  # what was said a moment before may be lost with it
            await chat.send("say hello")
            await chat.until(lambda: chat.answers[1:] == ["hello"])
        await client.close()


async def test_ctrl_q_quits(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.send("forever")
        await chat.until(lambda: engine.requests != [])  # the turn is on the screen before the engine has it
        await chat.until(lambda: "Quit" in chat.keys)
        await chat.press("ctrl+q")
        await chat.until(lambda: not chat.app.is_running)
    assert await asyncio.to_thread(engine.idle.wait, 5)
    assert engine.cancelled == [1]


async def test_escape_sequences_of_a_model_are_shown_not_obeyed(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.send("say \x1b]52;c;aGk=\x07")
        await chat.answered()
        await chat.until(lambda: "\n␛]52;c;aGk=␇" in chat.shown)
        assert "say ␛]52;c;aGk=␇" in chat.shown
        assert not {"\x1b", "\x07"} & set(chat.shown)


def test_visible() -> None:
    assert visible("plain text, 漢字") == "plain text, 漢字"
    assert visible("a\n\tb") == "a\n\tb"
    assert visible("\r\x7f\x9b\0") == "␍␡\ufffd␀"


async def test_what_is_typed_while_the_screen_is_made_is_not_lost() -> None:
    class EarlyTyper(ChatApp):
        def on_load(self) -> None:
            for letter in "say early":
                self.post_message(events.Key("space" if letter == " " else letter, letter))
            self.post_message(events.Key("enter", "\r"))

    app = EarlyTyper(LocalClient(FakeEngine()), place=None)
    async with app.run_test() as pilot:
        chat = Driver(app, pilot)
        await chat.answered()
        assert chat.answers == ["early"]
