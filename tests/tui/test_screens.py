"""The other screens of the chat: the machine, what if, tokens, the template, models, colours, help."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from unittest.mock import Mock, PropertyMock, patch

import pytest
from textual.widgets import Button, Input, Static, TextArea

from hetrun.client.engine_client import LocalClient, WorkerClient
from hetrun.client.interface import ChatClient, Health
from hetrun.client.queries import EngineState, LayerPlace, PlanForecast, StateQuery
from hetrun.config import Settings
from hetrun.errors import OptionError
from hetrun.tui.app import ChatApp
from hetrun.tui.host import Doors, HostModel, Opening, Tell
from hetrun.tui.machine import Facts, draw, look
from hetrun.tui.screens.dialogs import Choose, Dialog, DialogChoice, TextDialog, TextView
from hetrun.tui.screens.engine_control import ANOTHER, EXCHANGING
from hetrun.tui.screens.figures import AnswerFigures
from hetrun.tui.screens.help import HelpScreen
from hetrun.tui.screens.template import TemplateScreen
from hetrun.tui.screens.tokens import TokensScreen
from hetrun.tui.screens.whatif import WhatIfScreen, compared, turned, typed_size
from hetrun.tui.widgets.machine import MachinePane
from tests.support.fakes import INFO, REFUSED, FakeEngine
from tests.tui.driver import Driver, chatting


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(pace_s=0.002)
    yield fake
    fake.close()


def machine(chat: Driver) -> str:
    return str(chat.screen.query_one(MachinePane).query_one(Static).content)


async def test_the_machine_is_shown_while_it_works(engine: FakeEngine) -> None:
    async with chatting(engine, size=(140, 40)) as chat:
        await chat.exchange("say hello world")
        await chat.until(lambda: "first token after 0.12 s" in machine(chat))
        lines = machine(chat).splitlines()
    assert "layers  6 + embedding + output" in lines
    assert "█ llamacpp  █ amx" in "\n".join(lines)
    assert any(line.startswith("decode") and line.endswith("150") for line in lines)
    assert any(line.startswith("prefill") and line.endswith("800") for line in lines)
    assert "context  9 of 2,048" in lines
    assert any(line.startswith("cache hits ") and line.endswith(" 3 of 7 (43 %)") for line in lines)
    assert "memory  200 MiB of 1.0 GiB" in lines
    assert "two threads instead of one (9 ms -> 6 ms)" in lines[-1]


async def test_weights_that_come_from_disk_are_shown() -> None:
    engine = FakeEngine(ram=1 << 30)
    async with chatting(engine, size=(140, 40)) as chat:
        await chat.until(lambda: "from disk  2.00 GB/s" in machine(chat))
        assert "▓" in machine(chat)
        assert "25 % of the time" in machine(chat)
    engine.close()


async def test_a_gpu_is_shown_with_its_memory_and_its_link() -> None:
    engine = FakeEngine(vram=4 << 30)
    async with chatting(engine, size=(140, 40)) as chat:
        await chat.exchange("say hello")
        await chat.until(lambda: "to cuda" in machine(chat))
        lines = machine(chat).splitlines()
    assert "▒▒▒▒▒▒" in "".join(lines)
    assert "▒ over the link" in lines  # the key has two lines
    assert "memory of cuda  3.0 GiB of 4.0 GiB" in lines
    assert any(line.startswith("to cuda") and line.endswith("3.00 GB/s") for line in lines)
    engine.close()


def test_figures_of_another_process_are_no_rates() -> None:
    engine = FakeEngine(vram=1 << 30)
    before = engine.ask(StateQuery())
    facts = Facts(state=before, links={"cuda": 1.0})
    asyncio.run(look(facts, LocalClient(engine)))
    assert facts.links["cuda"] == pytest.approx(3e9, rel=0.01)
    facts.state = replace(before, at=before.at + 1e6)
    asyncio.run(look(facts, LocalClient(engine)))
    assert facts.links == {}
    engine.close()


async def test_panes_come_and_go(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        panes = [chat.screen.query_one(name) for name in ("#sidebar", "#machine")]
        assert [pane.display for pane in panes] == [False, False]
        await chat.press("f3")
        await chat.until(lambda: [pane.display for pane in panes] == [False, True])
        await chat.press("f2")
        await chat.until(lambda: [pane.display for pane in panes] == [True, False])
        await chat.press("f2")
        await chat.until(lambda: [pane.display for pane in panes] == [False, False])
        await chat.until(lambda: chat.prompt.has_focus)


def test_a_machine_of_which_nothing_is_known() -> None:
    assert "waiting" in draw(Facts(), 30).plain
    facts = Facts(why_not="it is no hetrun", context=2048, used=7)
    assert draw(facts, 30).plain.startswith("it is no hetrun\n\ncontext  7 of 2,048")  # known without it


class Engines:
    """Engines behind a door: those that were opened, with their options, and what became of them."""

    def __init__(self) -> None:
        self.fakes: list[FakeEngine] = []
        self.options: list[Mapping[str, object]] = []
        self.log: list[str] = []
        self.may_close = Event()
        self.may_close.set()

    def reopen(self, changes: Mapping[str, object], tell: Tell) -> Opening:
        if changes.get("model") == "nowhere":
            raise OptionError("nowhere does not exist")
        return lambda: self._open(dict(changes))

    def _open(self, changes: Mapping[str, object]) -> ChatClient:
        self.options.append(changes)
        if changes.get("model") == REFUSED:
            return WorkerClient(
                Settings.resolve(environ={}, model=REFUSED), engine="tests.support.fakes:FakeEngine"
            )
        fake = FakeEngine(pace_s=0.002)
        self.fakes.append(fake)
        self.log.append("open")
        return Closing(fake, self.log, self.may_close)

    @property
    def doors(self) -> Doors:
        return Doors(
            self.reopen, lambda: [HostModel("big", "/m/big", "4 GB"), HostModel("small", "/m/s", "1 GB")]
        )

    def close(self) -> None:
        for fake in self.fakes:
            fake.close()


class Closing(LocalClient):
    """Says when it ends, and ends when it may; the engine stays the test's."""

    def __init__(self, engine: FakeEngine, log: list[str], may: Event) -> None:
        super().__init__(engine)
        self._log = log
        self._may = may

    async def close(self) -> None:
        await asyncio.to_thread(self._may.wait)
        self._log.append("closed")


@pytest.fixture
def engines() -> Iterator[Engines]:
    found = Engines()
    yield found
    found.close()


async def test_what_if(engine: FakeEngine, engines: Engines) -> None:
    async with chatting(engine, doors=engines.doors, size=(110, 40)) as chat:
        await chat.press("f4")
        await chat.opened(WhatIfScreen)
        await chat.until(lambda: "32 MiB" in foreseen(chat))
        chat.front.query_one("#ctx", Input).value = "4096"
        await chat.until(lambda: "64 MiB" in foreseen(chat))
        chat.front.query_one("#threads", Input).focus()
        await chat.press("down")
        await chat.until(lambda: "75.0" in foreseen(chat))
        chat.front.query_one("#ram", Input).value = "1kB"
        await chat.until(lambda: "too little" in foreseen(chat))
        chat.front.query_one("#ram", Input).value = ""
        await chat.press("ctrl+s")
        await chat.until(lambda: engines.options != [] and chat.screen.parts.engine.info is not None)
        # The new engine may have said something since.
        assert "you: ctx 4096, threads 1" in [why for _, why in chat.screen.parts.figures.facts.reasons]
    assert engines.options == [{"ctx": "4096", "threads": "1"}]


async def test_memory_alone_is_changed_while_it_runs_and_remembered(
    engine: FakeEngine, engines: Engines
) -> None:
    async with chatting(engine, doors=engines.doors, size=(110, 40)) as chat:
        await chat.press("f4")
        await chat.opened(WhatIfScreen)
        chat.front.query_one("#ram", Input).value = "5MiB"
        await chat.press("ctrl+s")
        await chat.until(lambda: engine.options.get("ram") == 5 << 20)
        await chat.until(lambda: "Applied" in chat.said)
        assert engines.options == []
        await chat.command("/model /m/s")
        await chat.until(lambda: engines.options == [{"ram": "5MiB", "model": "/m/s"}])


def foreseen(chat: Driver) -> str:
    return str(chat.front.query_one("#foreseen", Static).content)


@pytest.mark.parametrize(
    ("value", "how", "step", "then"),
    [
        ("4096", "double", 1, "8192"),
        ("4096", "double", -1, "2048"),
        ("2GiB", "double", 1, "4GiB"),
        ("1", "double", -1, "1"),
        ("2", "one", 1, "3"),
        ("1", "one", -1, "1"),
        ("f16", "f16 q8_0", 1, "q8_0"),
        ("", "f16 q8_0", 1, "q8_0"),
        ("", "one", 1, "1"),
        ("18.6GiB", "double", -1, "9.3GiB"),
        ("1GiB", "double", -1, "512MiB"),
        ("512MiB", "double", 1, "1GiB"),
    ],
)
def test_knobs(value: str, how: str, step: int, then: str) -> None:
    assert turned(value, how, step) == then


async def test_tokens_and_what_else_might_have_come(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.exchange("say aa bb cc")
        await chat.do_with_turn(1, "i")
        await chat.opened(TokensScreen)
        await chat.until(lambda: "token 1 of 3" in token(chat))
        await chat.press("right", "right")
        await chat.until(lambda: token(chat) == "token 3 of 3: 'cc'  81.9 %")
        await chat.press("down", "enter")
        await chat.until(lambda: len(engine.requests) == 3 and chat.screen.parts.answers.current is None)
        assert engine.requests[2].text == "[user]say aa bb cc{}aa bb B"
        assert chat.answers[0].startswith("aa bb B")
        await chat.until(lambda: "version 2 of 2" in chat.shown)


def token(chat: Driver) -> str:
    return str(chat.front.query_one("#token", Static).content)


async def test_the_exact_prompt_and_the_template(engine: FakeEngine) -> None:
    async with chatting(engine, system="Be brief.") as chat:
        await chat.exchange("say hello")
        for draft, head, end in (
            ("", "The prompt of the last answer, 35 tokens", "[system]Be brief.[user]say hello{}"),
            ("and", "The prompt that Enter would send", "[assistant]hello[user]and{}"),
        ):
            chat.prompt.insert(draft)
            await chat.press("f7")
            await chat.opened(TemplateScreen)
            text = chat.front.query_one(TextArea)
            await chat.until(partial(_ends, text, end))
            assert str(chat.front.query_one(".title", Static).content).startswith(head)
            await chat.press("tab")
            await chat.until(partial(_ends, text, "{{ messages }}"))
            await chat.press("escape")
            await chat.until(lambda: chat.front is chat.screen)


def _ends(text: TextArea, end: str) -> bool:
    return text.text.endswith(end)


async def test_a_prompt_that_cannot_be_made_is_said(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        chat.screen.talk.say("refuse", None)
        await chat.press("f7")
        await chat.opened(TemplateScreen)
        await chat.until(lambda: chat.front.query_one(TextArea).text == "no render")


async def test_another_model(engine: FakeEngine, engines: Engines) -> None:
    async with chatting(engine, doors=engines.doors) as chat:
        await chat.exchange("say one")
        await chat.press("f6")
        await chat.opened(Choose)
        assert chat.options == ["/m/big", "/m/s", ANOTHER]
        await chat.press("down", "enter")
        await chat.until(
            lambda: engines.options == [{"model": "/m/s"}] and chat.screen.parts.engine.info is not None
        )
        await chat.exchange("say two")
        await chat.send("/model nowhere")
        await chat.until(lambda: any("nowhere does not exist" in notice for notice in chat.said))
        await chat.until(lambda: chat.prompt.text == "/model nowhere")  # to be mended
        chat.prompt.clear()
        await chat.exchange("say three")  # the one before goes on
    assert len(engines.fakes[0].requests) == 2


async def test_a_model_that_is_not_in_the_list(engine: FakeEngine, engines: Engines) -> None:
    async with chatting(engine, doors=engines.doors) as chat:
        await chat.press("f6")
        await chat.opened(Choose)
        await chat.press("up", "enter")
        await chat.opened(TextDialog)
        await chat.press(*"/m/x", "enter")
        await chat.until(lambda: engines.options == [{"model": "/m/x"}])


async def test_one_engine_ends_before_the_next_begins(engines: Engines) -> None:
    app = ChatApp(engines.reopen({}, print)(), doors=engines.doors)
    async with app.run_test() as pilot:
        chat = Driver(app, pilot)
        await chat.until(lambda: chat.screen.parts.engine.info is not None)
        engines.may_close.clear()
        await chat.command("/model /m/s")
        await chat.until(lambda: chat.screen.parts.engine.exchanging)
        await chat.send("say too early")
        await chat.until(lambda: EXCHANGING in chat.said)
        assert chat.prompt.text == "say too early"  # it is not lost
        engines.may_close.set()
        await chat.until(lambda: chat.screen.parts.engine.info is not None)
    assert engines.log == ["open", "closed", "open"]


async def test_a_model_that_cannot_be_loaded_gives_way_to_the_one_before(engines: Engines) -> None:
    app = ChatApp(engines.reopen({}, print)(), doors=engines.doors)
    async with app.run_test() as pilot:
        chat = Driver(app, pilot)
        await chat.until(lambda: chat.screen.parts.engine.info is not None)
        await chat.command(f"/model {REFUSED}")
        await chat.until(lambda: chat.errors == [f"{REFUSED}: it is not a model"])
        await chat.until(lambda: chat.screen.parts.engine.info is not None)
        assert engines.options == [{}, {"model": REFUSED}, {}]
        await chat.exchange("say hello")
        assert app.load_error is None


async def test_a_model_is_brought_and_may_be_given_up(engine: FakeEngine) -> None:
    came = Event()

    def reopen(changes: Mapping[str, object], tell: Tell) -> Opening:
        for done in count():
            tell(min(done, 42), 100, "hf:user/repo")
            if came.wait(0.01):
                return lambda: LocalClient(engine)
        raise AssertionError

    async with chatting(engine, doors=Doors(reopen, lambda: [])) as chat:
        for end in ("escape", "came"):
            await chat.command("/model hf:user/repo")
            await chat.until(lambda: chat.status[0] == "hf:user/repo: 42 %")
            await chat.until(lambda: "Stop" in chat.keys)
            await chat.exchange("say hello")  # the one before answers meanwhile
            if end == "escape":
                await chat.press("escape")
                await chat.until(lambda: any("was cancelled" in notice for notice in chat.said))
                assert chat.status[0] == "fake"
                chat.app.clear_notifications()
            else:
                came.set()
                await chat.until(lambda: not chat.screen.parts.engine.bringing and chat.status[0] == "fake")


async def test_colours_are_kept(engine: FakeEngine, tmp_path: Path) -> None:
    place = tmp_path / "c.db"
    async with chatting(engine, place=place) as chat:
        await chat.command("/theme textual-light")
        await chat.until(lambda: chat.app.theme == "textual-light")
    async with chatting(engine, place=place) as chat:
        assert chat.app.theme == "textual-light"


async def test_help_names_every_command(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        await chat.press("f1")
        await chat.opened(HelpScreen)
        text = "".join(str(part.content) for part in chat.front.query(Static))
        for word in ("/export FILE", "Ctrl+N", "why the plan changed"):
            assert word in text
        await chat.press("escape")
        await chat.until(lambda: chat.front is chat.screen)


async def test_models_are_listed_and_another_may_be_written_with_a_hint(
    engine: FakeEngine, engines: Engines
) -> None:
    async with chatting(engine, doors=engines.doors) as chat:
        await chat.press("f6")
        await chat.opened(Choose)
        await chat.press("up", "enter")
        await chat.opened(TextDialog)
        hint = str(chat.front.query_one(".hint", Static).content)
        assert "hf:user/repo" in hint
        assert "ollama:NAME" in hint


async def test_a_server_offers_its_models_and_no_others(engine: FakeEngine, engines: Engines) -> None:
    doors = replace(engines.doors, is_server=True)
    async with chatting(engine, doors=doors) as chat:
        await chat.press("f6")
        await chat.opened(Choose)
        assert chat.options == ["/m/big", "/m/s"]
        await chat.press("enter")
        await chat.until(
            lambda: engines.options == [{"model": "/m/big"}] and chat.screen.parts.engine.info is not None
        )
        await chat.press("f4")
        await chat.opened(WhatIfScreen)
        assert chat.front.query_one("#apply", Button).disabled


async def test_an_answer_that_waits_for_its_model_says_so(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        loading = PropertyMock(return_value=Health("loading", 0.42))
        with patch.object(LocalClient, "health", loading):
            await chat.send("silence")
            await chat.until(lambda: "… loading the model, 42 %" in chat.shown)
        await chat.until(lambda: chat.shown.endswith("…\n"))


async def test_a_dialog_is_as_high_as_its_content(engine: FakeEngine) -> None:
    for size in ((60, 15), (80, 24), (140, 45)):
        async with chatting(engine, size=size) as chat:
            for key in ("f4", "f5"):
                await chat.press(key)
                await chat.until(lambda: chat.front is not chat.screen and chat.front.is_mounted)
                dialog = chat.front.query_one(".dialog")
                buttons = chat.front.query_one(".buttons")
                body = chat.front.query_one(".body")
                await chat.until(lambda b=buttons, d=dialog: 0 < b.region.bottom <= d.region.bottom - 1)  # type: ignore[misc]
                await chat.until(lambda b=body: b.region.height > 0)  # type: ignore[misc]
                assert dialog.region.height <= min(size[1], 24)
                await chat.press("escape")
                await chat.until(lambda: chat.front is chat.screen)


def test_unknown_speeds_are_a_sentence() -> None:
    now = PlanForecast(2048, None, None, None, {"limit": 19010 << 20}, {}, 0, False, 2, "f16")
    text = compared(now, replace(now, context=4096), 60, 53.0).plain
    assert "unknown" not in text
    assert "Speeds cannot be predicted here" in text
    assert "18.6 GiB" in text
    known = compared(replace(now, decode_tok_s=29.8, measured=True), now, 60, 53.0).plain
    assert "Speeds are predictions" in known
    assert "The last answer ran at 53 tokens/s" in known
    assert typed_size(19010 << 20) == "18.6GiB"


async def test_going_back_to_an_earlier_plan_is_told() -> None:
    facts, said = (
        Facts(),
        ["1 thread instead of 2", "1 thread instead of 2", "cores are free again: 2 threads"],
    )
    engine = FakeEngine()
    state = engine.ask(StateQuery())
    for reason in [*said, said[0]]:
        with patch.object(FakeEngine, "ask", partial(_state, replace(state, reason=reason))):
            await look(facts, LocalClient(engine))
    assert [why for _, why in facts.reasons] == [said[0], said[2], said[0]]
    assert "decode   1 thread\n" in draw(facts, 30).plain
    engine.close()


def test_what_was_measured_before_the_model_was_known_stays_and_goes_with_another_model() -> None:
    figures = AnswerFigures(Mock(), Mock())  # neither is asked here
    figures.facts.prompt, figures.facts.cached = 20, 5
    figures.begin_model(INFO)
    assert (figures.facts.model, figures.facts.prompt, figures.facts.cached) == (INFO.id, 20, 5)
    figures.begin_model(replace(INFO, path="/models/another.gguf"))
    assert (figures.facts.model, figures.facts.prompt) == ("another", 0)


async def test_threads_that_the_engine_gives_no_reason_for_are_told() -> None:
    facts, engine = Facts(), FakeEngine()
    state = engine.ask(StateQuery())
    for decode in (1, 2, 2, 1):
        with patch.object(FakeEngine, "ask", partial(_state, replace(state, threads={"decode": decode}))):
            await look(facts, LocalClient(engine))
    said = [why for _, why in facts.reasons]
    assert said == [state.reason, "decode: 2 threads instead of 1", "decode: 1 thread instead of 2"]
    engine.close()


async def test_an_old_reason_is_not_told_again_after_what_the_user_changed() -> None:
    facts, engine = Facts(), FakeEngine()
    await look(facts, LocalClient(engine))
    facts.note("you: ram 1GiB")
    await look(facts, LocalClient(engine))
    assert [why for _, why in facts.reasons] == ["two threads instead of one (9 ms -> 6 ms)", "you: ram 1GiB"]
    engine.close()


async def test_a_dialog_may_be_left_before_there_is_anything_in_it(engine: FakeEngine) -> None:
    async with chatting(engine) as chat:
        for make in (
            lambda: Choose("Which?", [DialogChoice("a", "A")]),
            lambda: TextDialog("What?"),
            lambda: TextView("", "x"),
        ):
            dialog: Dialog[str | None] | Dialog[None] = make()
            chat.app.push_screen(dialog)
            dialog.leave()  # as by Escape right after the key that opens it
            await chat.until(lambda: chat.front is chat.screen)


@pytest.mark.parametrize("size", [(60, 15), (80, 24)])
async def test_lines_of_the_help_are_not_broken_again(engine: FakeEngine, size: tuple[int, int]) -> None:
    async with chatting(engine, size=size) as chat:
        await chat.press("f1")
        await chat.opened(HelpScreen)
        text = chat.front.query_one(".body Static", Static)
        await chat.until(lambda: text.size.height == str(text.content).count("\n") + 1)


def _state(state: EngineState, question: object) -> object:
    return state if isinstance(question, StateQuery) else (LayerPlace("blk.0", 1, 0, 0, {"a": 1}, {"a": 1}),)
