"""Text on standard input beside a prompt, and standard inputs that have none."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetrun.cli import standard_input
from hetrun.cli.run import read_prompt
from tests.cli.conftest import Run


def test_piped_text_comes_before_the_prompt(answer: Run) -> None:
    alone = answer("a story\n\nSum it up.", "-n", "4", stdin=b"")
    assert alone.code == 0
    assert answer("Sum it up.", "-n", "4", stdin=b"a story\n").out == alone.out
    assert answer("Sum", "it", "up.", "-n", "4", stdin=b"a story\n\n").out == alone.out
    assert answer("Sum it up.", "-n", "4", stdin=b"").out != alone.out


@pytest.mark.parametrize("stdin", [b"", b" \n"])
def test_an_empty_prompt_is_refused_wherever_it_stands(answer: Run, stdin: bytes) -> None:
    assert "the prompt is empty" in answer("", stdin=stdin).sentence
    assert "the prompt is empty" in answer(" ", stdin=stdin).sentence
    assert "no prompt was given, and standard input is empty; try:" in answer(stdin=stdin).sentence


def test_an_empty_prompt_leaves_what_is_piped(answer: Run) -> None:
    assert answer("", "-n", "2", stdin=b"hello\n").out == answer("hello", "-n", "2", stdin=b"").out


def test_text_that_is_none_is_refused_beside_a_prompt_too(answer: Run) -> None:
    assert "is not UTF-8 text: byte 1" in answer("hi", stdin=b"a\xff").sentence


@pytest.mark.parametrize("redirection", ["</dev/null", "<&-"])
def test_a_prompt_needs_no_standard_input(tmp_path: Path, redirection: str) -> None:
    code = "from hetrun.cli.run import read_prompt; print(read_prompt('hello'), end='')"
    command = f'{sys.executable} -c "{code}" {redirection}'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert (done.stdout, done.stderr) == ("hello", "")


def test_a_pipe_to_which_nothing_is_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        os.close(writing)  # as a user who reads this ends the program that left the pipe open

    monkeypatch.setattr(standard_input, "PATIENCE_S", 0.01)
    monkeypatch.setattr(standard_input, "say", say)
    with open(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert read_prompt("hello") == "hello"
    assert said == ["waiting for text on standard input; run it with < /dev/null if there is none"]


def test_no_limit_is_minus_one_as_elsewhere(answer: Run) -> None:
    done = json.loads(answer("hello", "-n", "-1", "-c", "64", "--json", "--ignore-eos", stdin=b"").out)
    assert done["usage"]["prompt_tokens"] + done["usage"]["completion_tokens"] >= 63


def test_more_than_there_is_is_remarked_on(answer: Run) -> None:
    said = answer("hello", "-n", "1", "--threads", "4000", "--ram", "900TiB", stdin=b"").err.splitlines()
    assert "--threads 4000 is more than the " in said[0]
    assert "--ram 921,600.0 GiB is more than the " in said[1]
    assert answer("hello", "-n", "1", "--ram", "50%", stdin=b"").err == ""


def test_a_context_beyond_the_trained_one_is_remarked_on(
    answer: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    answer("hello", "-n", "1", "-c", "20000", stdin=b"")
    assert warnings() == []
    answer("hello", "-n", "1", "-c", "20001", stdin=b"")
    (said,) = warnings()
    assert said.startswith("--ctx 20001 is more than the 20000 tokens that the model was trained for")


def test_a_full_disk_is_no_bug(tiny: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "hetrun", "inspect", tiny]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "hetrun: the output cannot be written: No space left on device\n"
