"""`hetrun run -i`: a conversation line by line, piped or typed, and going on with it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hetrun.cli import conversation
from hetrun.cli.chat import KEPT
from hetrun.config import dirs
from hetrun.tui.store.store import ConversationStore
from tests.cli.conftest import Result, Run

PATIENCE_S = 60


@pytest.fixture
def talk(answer: Run) -> Run:
    """`hetrun run -i` with lines on stdin."""

    def talk(*lines: str, options: tuple[str, ...] = ("-i",)) -> Result:
        return answer(*options, "-n", "4", stdin="".join(f"{line}\n" for line in lines).encode())

    return talk


def kept() -> list[tuple[str, list[tuple[str, str]]]]:
    """The conversations in the store, the newest first: their titles, and who said what."""
    store = ConversationStore(dirs().data / KEPT)
    found = [(c.title, [(str(t.role), t.text) for t in store.tree(c).path]) for c in store.conversations()]
    store.close()
    return found


def test_each_line_is_answered_with_those_before_it(talk: Run, answer: Run) -> None:
    result = talk("hello", "", "and more")
    assert (result.code, result.err) == (0, "")
    ((title, turns),) = kept()
    assert title == "hello"
    assert [role for role, _ in turns] == ["user", "assistant"] * 2
    assert [text for role, text in turns if role == "user"] == ["hello", "and more"]
    assert result.out.split() == "".join(text + "\n" for role, text in turns if role == "assistant").split()
    assert turns[1][1].strip() == answer("hello", "-n", "4", stdin=b"").out.strip()
    assert turns[3][1].strip() != answer("and more", "-n", "4", stdin=b"").out.strip()


def test_bye_ends_and_commands_are_not_asked(talk: Run) -> None:
    result = talk("/help", "/nothing", "hello", "/bye", "never")
    assert result.code == 0
    assert [line.partition(":")[2].strip()[:20] for line in result.err.splitlines()] == [
        conversation.HELP[:20],
        "there is no /nothing"[:20],
    ]
    ((_, turns),) = kept()
    assert turns[0] == ("user", "hello")
    assert len(turns) == 2


def test_clear_begins_anew(talk: Run) -> None:
    talk("one", "/clear", "two")
    assert [title for title, _ in kept()] == ["two", "one"]


def test_a_message_of_several_lines(talk: Run) -> None:
    talk('"""one', "two", 'three"""', "four")
    ((_, turns),) = kept()
    assert [text for role, text in turns if role == "user"] == ["one\ntwo\nthree", "four"]


def test_the_words_are_the_first_message(talk: Run) -> None:
    talk("second", options=("-i", "the", "first"))
    ((_, turns),) = kept()
    assert [text for role, text in turns if role == "user"] == ["the first", "second"]


def test_going_on_with_the_last_one(talk: Run, run: Run, answer: Run) -> None:
    assert "start one with hetrun run -i" in talk(options=("--continue", "hi")).sentence
    talk("first")
    talk("other")
    # The model is remembered as well.
    options = ("--backend", "reference", "--temp", "0", "-n", "4")
    assert run("run", "--continue", "more", *options, stdin=b"").code == 0
    assert run("run", "--continue", *options, stdin=b"and more\n").code == 0
    assert run("run", "-i", "--continue", *options, stdin=b"most\n").code == 0
    (title, turns), (other, _) = kept()
    assert (title, other) == ("other", "first")
    assert [text for role, text in turns if role == "user"] == ["other", "more", "and more", "most"]


def test_it_goes_on_from_another_folder(
    run: Run, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here.gguf").symlink_to(tiny)
    (tmp_path / "folder").mkdir()
    options = ("--backend", "reference", "--temp", "0", "-n", "2")
    monkeypatch.chdir(tmp_path)
    assert run("run", "-i", "-m", "here.gguf", *options, stdin=b"first\n").code == 0
    monkeypatch.chdir(tmp_path / "folder")
    assert run("run", "--continue", "more", *options, stdin=b"").code == 0


def test_an_error_keeps_nothing_that_was_not_answered(talk: Run) -> None:
    result = talk("long " * 9000)
    assert result.code == 2
    assert "shorten it" in result.sentence
    assert kept() == []


@pytest.mark.parametrize("option", ["--raw", "--json"])
def test_what_makes_no_conversation_is_refused(talk: Run, option: str) -> None:
    assert f"{option} cannot be combined with -i" in talk("hi", options=("-i", option)).sentence


def test_a_store_that_cannot_be_used_is_no_reason_not_to_talk(talk: Run) -> None:
    dirs().data.parent.mkdir(parents=True)
    Path(dirs().data).touch()
    result = talk("hello")
    assert result.code == 0
    assert "this conversation will not be saved" in result.sentence
    assert result.out.strip()


# --- in a terminal


class Terminal:
    """A command in a terminal: what it shows, and what is typed."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self._descriptor, self.process = descriptor, process
        self.seen = b""

    def wait_for(self, text: bytes) -> bytes:
        """Read until it shows the text; what came before that, which is forgotten."""
        until = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"never saw {text!r} in {self.seen[-2000:]!r}"
            self.seen += os.read(self._descriptor, 65536)
        before, _, self.seen = self.seen.partition(text)
        return before

    def wait_for_text(self, characters: int) -> None:
        """Read until so much was written, spaces not counted."""
        until = time.monotonic() + PATIENCE_S
        while len(b"".join(self.seen.split())) < characters:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"no more than {self.seen!r}"
            self.seen += os.read(self._descriptor, 65536)

    def stop(self) -> int:
        """Press Ctrl-C until it ends; the exit code. Readline overlooks it just after it wrote the prompt."""
        while self.process.poll() is None:
            self.write(b"\x03")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        return self.process.returncode

    def write(self, text: bytes) -> None:
        os.write(self._descriptor, text)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "COLUMNS": "200", "LINES": "24"}
    command = [sys.executable, "-m", "hetrun", "run", *arguments, "--backend", "reference", "--temp", "0"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it becomes the session's own
    ) as process:  # fmt: skip
        os.close(theirs)
        try:
            yield Terminal(ours, process)
        finally:
            process.kill()
            os.close(ours)


def test_a_conversation_that_is_typed(tiny: str) -> None:
    """The first word is the model; Ctrl-C stops an answer, twice ends, and what was written is kept."""
    with terminal(tiny, "--ignore-eos", "-c", "20000") as screen:
        screen.wait_for(b"tiny: /bye or Ctrl-D ends")
        screen.wait_for(b"> ")
        screen.write(b"hello\n")
        screen.wait_for(b"hello\r\n")
        screen.wait_for_text(30)
        screen.write(b"\x03")
        screen.wait_for(b"press Ctrl-C again or Ctrl-D to end")
        screen.wait_for(b"> ")
        assert screen.stop() == 130
    ((_, turns),) = kept()
    assert [role for role, _ in turns] == ["user", "assistant"]
    assert turns[1][1]


def test_ctrl_d_ends(tiny: str) -> None:
    with terminal("-i", "-m", tiny) as screen:
        screen.wait_for(b"> ")
        screen.write(b"\x04")
        assert screen.process.wait(PATIENCE_S) == 0
