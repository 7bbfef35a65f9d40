"""A conversation with SmolLM2 in a real terminal, from the first key to the last, and one that is killed."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from hetrun.cli.chat import KEPT
from tests.tui.terminal import TMUX, Terminal

pytestmark = pytest.mark.skipif(TMUX is None, reason="there is no tmux here")
GREEDY = ("--temp", "0", "-n", "60")


def test_a_conversation_with_smollm2(tmp_path: Path) -> None:
    with Terminal(tmp_path, *GREEDY, size=(140, 40)) as terminal:
        terminal.until("tokens of context")  # the model is there
        terminal.type("Say hello.")
        terminal.keys("Enter")
        screen = terminal.until("tokens/s")
        for word in ("layers  30", "decode", "prefill", "memory", "llamacpp"):
            assert word in screen
        first = terminal.until("first token after")
        assert "Error" not in first
        terminal.type("/template")
        terminal.keys("Enter")
        assert "Say hello.<|im_end|>" in terminal.until("<|im_start|>user")
        terminal.keys("Escape")
        terminal.until("Write a message")
        terminal.keys("C-q")
        ended(terminal)
    with Terminal(tmp_path, "-n", "4000", "--ignore-eos", size=(140, 40)) as terminal:
        terminal.until("tokens of context")
        assert "Say hello." in terminal.screen  # among the conversations
        terminal.type("Count to a thousand.")
        terminal.keys("Enter")
        terminal.until("Esc Stop")
        until_kept(tmp_path, 2)
        os.kill(terminal.pid, signal.SIGKILL)
        ended(terminal)
    with Terminal(tmp_path, *GREEDY, size=(140, 40)) as terminal:
        terminal.until("tokens of context")
        assert "Say hello." in terminal.screen
        assert "Count to a thousand." in terminal.screen
        terminal.keys("C-f", "Enter")
        terminal.until("→ Menu")
        terminal.keys("Down", "Enter")
        terminal.until("broken off")
        terminal.keys("C-q")
        ended(terminal)


def test_a_running_server_shows_its_machine(tmp_path: Path) -> None:
    place = tmp_path / "sock"
    with Terminal(tmp_path, "--url", f"unix:{place}", *GREEDY, size=(140, 40)) as terminal:
        terminal.until("no model")
        with serving(place):
            terminal.type("Say hello.")
            terminal.keys("Enter")
            screen = terminal.until("cache hits")  # it came late, and the model is there with its first words
            for word in ("layers  30", "decode", "memory", "llamacpp", "of 8,192"):
                assert word in screen
            terminal.keys("F4")
            # Tests do not measure: what is not known has no rows.
            assert "unknown" not in terminal.until("Speeds cannot be predicted here")
            terminal.keys("Escape")
            terminal.until_gone("Esc closes")
            terminal.type("/tokens")
            terminal.keys("Enter")
            assert "%" in terminal.until("token 1 of")
            terminal.keys("C-q")
            ended(terminal)


@contextmanager
def serving(place: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "hetrun", "serve", "--uds", str(place)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not listens(place):
            assert time.monotonic() < end
            assert server.poll() is None
            time.sleep(0.05)
        yield
    finally:
        server.terminate()
        server.wait(30)


def listens(place: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(place)) == 0


def until_kept(folder: Path, answers: int) -> None:
    """Wait until the beginnings of this many answers were kept."""
    end = time.monotonic() + 30
    while True:
        with closing(sqlite3.connect(folder / "data" / "hetrun" / KEPT)) as db:
            (found,) = db.execute(
                "SELECT count(*) FROM turn WHERE role = 'assistant' AND text != ''"
            ).fetchone()
        if found == answers:
            return
        assert time.monotonic() < end
        time.sleep(0.05)


def ended(terminal: Terminal) -> None:
    end = time.monotonic() + 30
    while not terminal.ended():
        assert time.monotonic() < end
        time.sleep(0.05)
