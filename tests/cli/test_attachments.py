"""`hetrun run -a`: files beside a prompt."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from hetrun.cli import attachments, run
from hetrun.client.events import PICTURE_MARK, GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings
from hetrun.errors import OptionError, UserError
from tests.support.hostile_pictures import png

FILES = [png(4, 4, 8, 0, bytes([0, i, 9, 9, 9] * 4)) for i in range(2)]
PLACE = {"type": "image"}


class Piped:
    """Standard input with these bytes."""

    def __init__(self, data: bytes, tty: bool = False) -> None:
        self.buffer, self._tty = io.BytesIO(data), tty

    def isatty(self) -> bool:
        return self._tty


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, file in zip("ab", FILES, strict=True):
        (tmp_path / f"{name}.png").write_bytes(file)
    (tmp_path / "c,d.png").write_bytes(FILES[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], []),
        (["a.png"], [0]),
        (["b.png", "a.png"], [1, 0]),
        (["a.png,b.png"], [0, 1]),  # as llama.cpp takes several
        (["c,d.png"], [0]),
        (["~/b.png"], [1]),
    ],
)
def test_files(folder: Path, given: list[str], found: list[int]) -> None:
    assert attachments.pictures(given) == tuple(FILES[i] for i in found)


def test_a_pipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Piped(FILES[1]))
    assert attachments.pictures(["a.png", "-"]) == (FILES[0], FILES[1])
    monkeypatch.setattr("sys.stdin", Piped(b"", tty=True))
    with pytest.raises(OptionError, match="-a - reads a picture from standard input, and nothing is piped"):
        attachments.pictures(["-"])
    assert run.read_prompt("What?", is_alone=True) == "What?"
    for prompt in (None, "-", " "):
        with pytest.raises(UserError, match="give the prompt as text"):
            run.read_prompt(prompt, is_alone=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["none.png"], "^-a none.png cannot be read: No such file or directory"),
        (["."], "^-a . cannot be read: is a directory, not a file"),
        (["text.png"], "^-a text.png: this is not a picture in a format that is read"),
        (["drawing.svg"], "^-a drawing.svg: this is an SVG drawing, which is not read as a picture"),
        (["-", "-"], "^-a - is given twice"),
        (["a.png"] * 65, "^-a is given 65 times, and a prompt may have 64 pictures"),
    ],
)
def test_what_is_wrong(folder: Path, given: list[str], said: str) -> None:
    (folder / "text.png").write_text("Hello")
    (folder / "drawing.svg").write_text("<svg/>")
    with pytest.raises(OptionError, match=said):
        attachments.pictures(given)


def test_a_named_pipe_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")
    with pytest.raises(OptionError, match="is not a regular file"):
        attachments.pictures(["pipe.png"])


def asked(prompt: str, *, raw: bool = False) -> GenerateRequest:
    settings = Settings.resolve(environ={}, system="Be brief.")
    return run.make_request(settings, prompt, SamplingParams(), raw)


def test_pictures_come_before_the_prompt() -> None:
    request = attachments.with_pictures(asked("What?"), tuple(FILES))
    assert request.messages is not None
    assert [message["content"] for message in request.messages] == [
        "Be brief.",
        [PLACE, PLACE, {"type": "text", "text": "What?"}],
    ]
    assert request.pictures == tuple(FILES)
    assert attachments.with_pictures(asked("What?"), ()) == asked("What?")


def test_a_raw_prompt_may_say_where_they_are() -> None:
    assert attachments.with_pictures(asked("a", raw=True), tuple(FILES)).text == f"{PICTURE_MARK * 2}a"
    marked = asked(f"a{PICTURE_MARK}b{PICTURE_MARK}", raw=True)
    assert attachments.with_pictures(marked, tuple(FILES)).text == marked.text
    with pytest.raises(OptionError, match="2 times, and 1 pictures are attached"):
        attachments.with_pictures(marked, (FILES[0],))
