"""Pictures in the chat, as someone sends them who has never done so before."""

from __future__ import annotations

import json
import os
import pty
import random
import sqlite3
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from textual import events

from hetrun.client.engine_client import LocalClient
from hetrun.client.events import PICTURE
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import UserError
from hetrun.pictures.picture import Picture
from hetrun.server import listen
from hetrun.server.app import create_app
from hetrun.system.units import format_bytes
from hetrun.tui import clipboard
from hetrun.tui.clipboard import copied_picture, reader
from hetrun.tui.conversation import Talk
from hetrun.tui.paths import dropped, without_paths
from hetrun.tui.pictures import Gallery, size_before
from hetrun.tui.screens.dialogs import Choose
from hetrun.tui.store import store as module
from hetrun.tui.store.store import SCHEMA, ConversationStore
from hetrun.tui.store.tree import TurnPicture
from hetrun.tui.transcript.thumbnails import Card, KittyPainter, has_placeholders, reduced
from hetrun.tui.widgets.chips import Chips
from tests.support.fakes import FakeEngine
from tests.support.pictures import png
from tests.tui.driver import Driver, chatting
from tests.tui.test_server_models import chat_over

CAT, DOG = png(64, 32), png(40, 40, red=90)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(pace_s=0.001)
    fake.info = replace(fake.info, pictures=True)
    yield fake
    fake.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "my pictures"
    found.mkdir()
    (found / "cat.png").write_bytes(CAT)
    (found / "the dog.png").write_bytes(DOG)
    return found


def chips(chat: Driver) -> list[str]:
    return [f"{chip.name} {chip.about}".strip() for chip in chat.screen.query_one(Chips).chips]


async def attached(chat: Driver, n: int = 1) -> None:
    await chat.until(
        lambda: len(chat.screen.parts.draft.pictures) == n and not chat.screen.parts.draft.coming
    )


async def paste(chat: Driver, text: str) -> None:
    chat.prompt.focus()
    await chat.until(lambda: chat.prompt.has_focus)
    chat.prompt.post_message(events.Paste(text))


async def written(chat: Driver, text: str) -> None:
    """Wait until this stands in the box."""
    await chat.until(lambda: chat.prompt.text == text)


def sent(engine: FakeEngine) -> tuple[list[object], tuple[bytes, ...]]:
    """The contents of the last request's messages, and its pictures."""
    request = engine.requests[-1]
    return [message["content"] for message in request.messages or ()], request.pictures


def asks(text: str, n: int = 1) -> list[object]:
    return [*[{"type": PICTURE}] * n, {"type": "text", "text": text}]


async def test_a_picture_is_attached_shown_and_sent(engine: FakeEngine, folder: Path) -> None:
    async with chatting(engine) as chat:
        await chat.command(f"/attach {folder}/cat.png")
        await attached(chat)
        assert chips(chat) == [f"cat.png 64 x 32, {format_bytes(len(CAT))}"]
        await chat.exchange("say a cat")
        assert sent(engine) == ([asks("say a cat")], (CAT,))
        assert chips(chat) == []
        (asked,) = chat.entries("user")
        await chat.until(lambda: all(card.is_shown for card in asked.cards))
        assert chat.shown.count("▀") == 32 * 8, "64 x 32 pixels in 32 x 8 cells"
        assert f"cat.png 64 x 32, {format_bytes(len(CAT))}" in chat.shown
        await chat.exchange("say still there")  # sent again, with the same bytes, before the new message
        assert sent(engine) == ([asks("say a cat"), "a cat", "say still there"], (CAT,))
        await chat.do_with_turn(0, "e")
        await chat.until(lambda: len(chat.screen.parts.draft.pictures) == 1)
        await chat.press("escape")  # nothing of the edit stays
        await chat.until(lambda: not chat.screen.parts.draft.editing)
        assert chips(chat) == []
        chat.screen.parts.engine.info = replace(engine.info, pictures=False)  # as after /model
        await chat.send("say what now?")
        await chat.until(lambda: chat.said != [])
        assert "this conversation has some: choose a model that does (/model), or begin" in chat.said[0]
        assert chat.prompt.text == "say what now?"
        assert len(engine.requests) == 2


async def test_a_large_picture_has_its_own_size(engine: FakeEngine, tmp_path: Path) -> None:
    from PIL import Image  # on use, as everywhere

    large = Image.new("1", (6000, 4000))
    large.save(tmp_path / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    large.convert("L").save(tmp_path / "b.jpg", exif=exif, quality=20)
    async with chatting(engine) as chat:
        await paste(chat, f"{tmp_path}/a.png {tmp_path}/b.jpg")
        await attached(chat, 2)
        a, b = (picture.what for picture in chat.screen.parts.draft.pictures)
        assert (a.width, a.height) == (6000, 4000)
        assert (b.width, b.height) == (4000, 6000)


@pytest.mark.parametrize("file", [b"\xff\xd8\xff", b"\xff\xd8\xff\xe0\0\0" * 9, CAT[:20], b"", b"GIF89a" * 9])
def test_a_header_that_says_nothing(file: bytes) -> None:
    assert size_before(file, 3, 2) == (3, 2)


async def test_paths_in_a_message_are_pictures(engine: FakeEngine, folder: Path) -> None:
    dog = f"{folder}/the dog.png".replace(" ", "\\ ")
    async with chatting(engine) as chat:
        await chat.exchange(f"say two '{folder}/cat.png' {dog}")
        assert sent(engine) == ([asks("say two", 2)], (CAT, DOG))
        await chat.new()
        await chat.send(f"{folder}/the dog.png".replace(" ", "\\ "))  # a slash, and yet no command
        await attached(chat)
        assert "Attached" in chat.said[0]
        await chat.exchange("say what is it?")
        assert sent(engine) == ([asks("say what is it?")], (DOG,))


async def test_what_is_dropped_is_attached_and_what_is_pasted_is_text(
    engine: FakeEngine, folder: Path
) -> None:
    async with chatting(engine) as chat:
        await paste(chat, f"'{folder}/cat.png' ")
        await attached(chat)
        await paste(chat, f"file://{folder}/the%20dog.png\n".replace("my pictures", "my%20pictures"))
        await attached(chat, 2)
        assert chat.prompt.text == ""
        await paste(chat, f"see {folder}/cat.png\nand more")
        await chat.until(lambda: chat.prompt.text == f"see {folder}/cat.png\nand more")
        assert len(chat.screen.parts.draft.pictures) == 2


async def test_chips_are_taken_away_by_backspace_and_by_a_click(engine: FakeEngine, folder: Path) -> None:
    async with chatting(engine) as chat:
        for name in ("cat.png", "the dog.png"):
            await paste(chat, f"{folder}/{name}")
        await attached(chat, 2)
        await chat.press("backspace")
        await attached(chat)
        await chat.pilot.pause()
        row = chat.screen.query_one(Chips).render_line(0).text
        await chat.pilot.click(Chips, offset=(2 + row.index("✕"), 0))
        await attached(chat, 0)
        assert not chat.screen.query_one(Chips).display


async def test_a_model_that_reads_no_pictures_says_what_to_do(engine: FakeEngine, folder: Path) -> None:
    engine.info = replace(engine.info, pictures=False)
    async with chatting(engine) as chat:
        await chat.send(f"/attach {folder}/cat.png")
        await chat.until(lambda: chat.said != [])
        assert "does not read pictures: choose a model that does (/model)" in chat.said[0]
        assert chat.prompt.text == f"/attach {folder}/cat.png"
        chat.prompt.clear()
        await paste(chat, f"{folder}/cat.png")
        await written(chat, f"{folder}/cat.png")
        await chat.until(lambda: chat.said != [])
        chat.prompt.clear()
        text = f"say code for '{folder}/cat.png'"
        await chat.exchange(text)
        assert sent(engine) == ([text], ())
        assert "was sent as text" in chat.said[0]


HOSTILE = {
    "cut.png": (CAT[:60], "the PNG picture cannot be read"),
    "drawing.png": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "this is an SVG drawing"),
    "bomb.png": (CAT[:16] + b"\0\1\0\0" * 2 + CAT[24:], "the PNG picture cannot be read"),
    "empty.jpg": (b"", "the picture is empty"),
    "photo.heic": (b"\0\0\0\x18ftypheic", "HEIC picture, which is not read"),
}


async def test_a_hostile_picture_is_a_sentence_and_loses_nothing(engine: FakeEngine, folder: Path) -> None:
    async with chatting(engine) as chat:
        await paste(chat, f"{folder}/cat.png")
        await attached(chat)
        for name, (data, why) in HOSTILE.items():
            (folder / name).write_bytes(data)
            text = f"say what is this? '{folder}/{name}'"
            await chat.send(text)
            await chat.until(lambda: chat.said != [])
            assert chat.said[0].startswith(f"{name}: ")
            assert why in chat.said[0]
            await written(chat, text)
            assert len(chat.screen.parts.draft.pictures) == 1
            chat.prompt.clear()
            await chat.until(lambda: chat.said == [])
        assert engine.requests == []
        assert chat.asked == []


async def test_edited_asked_again_forked_and_opened_again(
    engine: FakeEngine, folder: Path, tmp_path: Path
) -> None:
    place = tmp_path / "conversations.db"
    async with chatting(engine, place=place) as chat:
        await chat.exchange(f"say one '{folder}/cat.png'")
        await chat.press("ctrl+r")
        await chat.until(lambda: len(engine.requests) == 2 and chat.screen.parts.answers.current is None)
        assert sent(engine) == ([asks("say one")], (CAT,))
        await chat.do_with_turn(0, "e")
        await chat.until(lambda: chat.screen.parts.draft.editing)
        assert chat.prompt.text == "say one"
        assert len(chat.screen.parts.draft.pictures) == 1
        await paste(chat, f"{folder}/the dog.png")
        await attached(chat, 2)
        await chat.press("enter")
        await chat.until(lambda: len(engine.requests) == 3 and chat.screen.parts.answers.current is None)
        assert sent(engine) == ([asks("say one", 2)], (CAT, DOG))
        await chat.command("/fork")
        await chat.until(lambda: chat.screen.talk.title.endswith("(fork)"))
        await chat.exchange("say two")
        assert sent(engine)[1] == (CAT, DOG)
    (folder / "cat.png").unlink()  # it is kept with the conversation
    async with chatting(engine, place=place) as chat:
        found = chat.screen.talk.store.conversations("the dog")
        assert len(found) == 2, "found by the picture's name"
        chat.screen.parts.conversations.open(found[-1].id)
        (asked,) = chat.entries("user")
        assert asked.turn is not None
        await chat.until(lambda: len(asked.cards) == 2 and all(card.small for card in asked.cards))
        await chat.exchange("say three")
        assert sent(engine)[1] == (CAT, DOG)
        chat.screen.talk.store.delete(found[0].id)
        assert chat.screen.talk.store.picture(asked.turn.pictures[0].digest) == CAT, "the other one shows it"
        await chat.command("/delete")
        await chat.opened(Choose)
        await chat.press("y")
        await chat.until(lambda: chat.asked == [])
    with sqlite3.connect(place) as db:
        assert db.execute("SELECT count(*) FROM picture").fetchone() == (0,)


async def test_what_cannot_be_answered_is_given_back_with_its_pictures(
    engine: FakeEngine, folder: Path
) -> None:
    async with chatting(engine) as chat:
        await paste(chat, f"{folder}/cat.png")
        await attached(chat)
        await chat.send("refuse")
        await chat.until(lambda: chat.errors != [])
        assert chat.prompt.text == "refuse"
        assert [picture.file for picture in chat.screen.parts.draft.pictures] == [CAT]


async def test_exports_have_the_pictures_and_come_back(
    engine: FakeEngine, folder: Path, tmp_path: Path
) -> None:
    async with chatting(engine) as chat:
        await chat.exchange(f"say one '{folder}/cat.png'")
        for name in ("out.md", "out.json"):
            await chat.command(f"/export {tmp_path}/{name}")
        (picture,) = (tmp_path / "out-pictures").iterdir()
        assert picture.read_bytes() == CAT
        assert f"![cat.png](out-pictures/{picture.name})" in (tmp_path / "out.md").read_text()
        await chat.command(f"/import {tmp_path}/out.json")
        await chat.until(lambda: chat.said == ["1 conversation imported"])
        await chat.exchange("say two")
        assert sent(engine) == ([asks("say one"), "one", "say two"], (CAT,))
        found = json.loads((tmp_path / "out.json").read_text())
        found["turns"][0]["pictures"][0]["url"] = "data:image/png;base64,PHN2Zy8+"
        (tmp_path / "bad.json").write_text(json.dumps(found))
        await chat.send(f"/import {tmp_path}/bad.json")
        await chat.until(lambda: any("SVG drawing" in said for said in chat.said))
        chat.prompt.clear()
        url = f"data:image/png;base64,{b64encode(DOG).decode()}"  # messages as OpenAI has them
        parts = [{"type": "text", "text": "say three"}, {"type": "image_url", "image_url": {"url": url}}]
        (tmp_path / "in.json").write_text(json.dumps([{"role": "user", "content": parts}]))
        await chat.command(f"/import {tmp_path}/in.json")
        await chat.until(lambda: chat.asked == ["say three"])
        await chat.exchange("say four")
        assert sent(engine)[1] == (DOG,)


async def test_a_server_gets_the_same_pictures(engine: FakeEngine, folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "s"
    with listen.listening(listen.ListenAddress(uds=place)) as bound:
        async with listen.served(create_app(LocalClient(engine)), bound), chat_over(place) as chat:
            await chat.exchange(f"say one '{folder}/cat.png'")
            await chat.exchange(f"say two '{folder}/the dog.png'")
            assert sent(engine) == ([asks("say one"), "one", asks("say two")], (CAT, DOG))


async def test_escape_gives_back_a_message_whose_picture_is_still_read(
    engine: FakeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = threading.Event()
    monkeypatch.setattr(Gallery, "_made", lambda self, file: str(read.wait(40)))
    async with chatting(engine) as chat:
        text = f"say one '{folder}/cat.png'"
        await chat.send(text)
        await chat.until(lambda: chips(chat) == ["cat.png …"])
        await chat.send("say two")
        await chat.until(lambda: chat.said == ["one moment: a picture is being read"])
        chat.prompt.clear()
        await chat.press("escape")
        await written(chat, text)
        assert chips(chat) == []
        read.set()
    assert engine.requests == []


async def test_what_is_no_regular_file_is_said(engine: FakeEngine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.jpg").mkdir()
    async with chatting(engine) as chat:
        for name, why in (("pipe.png", "is not a regular file"), ("folder.jpg", "is a directory")):
            await chat.send(f"/attach {tmp_path}/{name}")
            await written(chat, f"/attach {tmp_path}/{name}")
            await chat.until(lambda: chat.said != [])
            assert why in chat.said[0]
            chat.prompt.clear()
            await chat.until(lambda: chat.said == [])


async def test_more_pictures_than_a_request_may_have(engine: FakeEngine, folder: Path) -> None:
    async with chatting(engine) as chat:
        await paste(chat, f"{folder}/cat.png")
        await attached(chat)
        chat.screen.parts.draft.pictures *= 65
        await chat.send("say too many")
        await chat.until(lambda: chat.said != [])
        assert "would have 65 pictures, and up to 64 are sent" in chat.said[0]
        assert chat.prompt.text == "say too many"


async def test_narrow_and_without_colours(
    engine: FakeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    long = folder / f"{'a-long-name-' * 8}.png"
    long.write_bytes(DOG)
    async with chatting(engine, size=(30, 16)) as chat:
        for path in (long, folder / "cat.png"):
            await paste(chat, str(path))
        await attached(chat, 2)
        await chat.pilot.pause()
        found = chat.screen.query_one(Chips)
        assert [found.render_line(y).text.count("✕") for y in range(found.size.height)] == [1, 1]
        await chat.exchange("say hello")
        (asked,) = chat.entries("user")
        await chat.until(lambda: all(card.is_shown for card in asked.cards))
        assert all(line.cell_length <= 30 for line in asked.lines)
        assert "▀" in chat.shown
        chat.app.export_screenshot()


def test_a_store_of_before_pictures_is_brought_up_to_date(tmp_path: Path) -> None:
    place = tmp_path / "c.db"
    with sqlite3.connect(place) as db:
        db.executescript(SCHEMA)
        db.execute("INSERT INTO conversation (title, changed) VALUES ('old', 1)")
        db.execute("INSERT INTO turn (conversation, role, text) VALUES (1, 'user', 'hello')")
        db.execute("PRAGMA user_version = 1")
    store = ConversationStore(place)
    (found,) = store.conversations()
    assert [(turn.text, turn.pictures) for turn in store.tree(found)] == [("hello", ())]
    store.close()


def test_pictures_have_a_limit_and_their_room_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "c.db"
    store = ConversationStore(place)
    small, large = random.Random(1).randbytes(1 << 10), random.Random(2).randbytes(1 << 20)
    pictures = [
        (TurnPicture(sha256(file).hexdigest(), name), file) for name, file in (("a", small), ("b", large))
    ]
    talk = Talk(store, SamplingParams(), "")
    talk.say("both", None, pictures)
    monkeypatch.setattr(module, "MOST_KEPT", len(large))
    more = random.Random(3).randbytes(10)
    with pytest.raises(UserError, match="no room for c: the pictures of all conversations"):
        talk.say("one more", talk.tree.leaf, [(TurnPicture(sha256(more).hexdigest(), "c"), more)])
    fresh = Talk(store, SamplingParams(), "")
    with pytest.raises(UserError, match="no room"):
        fresh.say("first", None, [(TurnPicture(sha256(more).hexdigest(), "c"), more)])
    (found,) = store.conversations()  # none was begun for what is not kept
    assert found.title == "both"
    store.delete(found.id)
    monkeypatch.setattr(module, "MOST_UNUSED", 1 << 19)
    store.close()
    assert place.stat().st_size < 1 << 17


PATHS = {
    "what is D/a.png ?": "what is ?",
    "look at D/b\\ c.jpg, please": "look at, please",
    "'D/b c.jpg' who?": "who?",
    "file://D/b%20c.jpg x": "x",
    "'tis D/a.png, isn't it": "'tis, isn't it",
    "a.png": "a.png",
    "it opens D/none.png": "it opens D/none.png",
    "    keep\n      D/a.png\n   this": "keep\n     \n   this",
}


@pytest.mark.parametrize("text", PATHS)
def test_paths_are_told_from_text(tmp_path: Path, text: str) -> None:
    for name in ("a.png", "b c.jpg"):
        (tmp_path / name).write_bytes(CAT)
    rest, paths = without_paths(text.replace("D/", f"{tmp_path}/"))
    assert rest == PATHS[text].replace("D/", f"{tmp_path}/")
    assert len(paths) == (rest != text.replace("D/", f"{tmp_path}/"))


def test_long_texts_are_read_once(tmp_path: Path) -> None:
    """A text that looks like paths all over takes no time that grows with its square."""
    for text in ("/a\\ " * 50_000, "'" * 50_000, '" ' * 50_000, "/a.png " * 2_000, "'a 'b\n" * 20_000):
        assert without_paths(text) == (text, [])
        assert dropped(text) == []


PNG_ONLY = """#!/bin/sh
case "$*" in
--list-types) printf 'TEXT\\nimage/png\\n' ;;
*image/png) cat "$COPIED" ;;
*) exit 1 ;;
esac
"""


async def test_a_copied_picture_is_pasted(
    engine: FakeEngine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "wl-paste"
    program.write_text(PNG_ONLY)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    monkeypatch.setenv("COPIED", str(folder / "cat.png"))
    async with chatting(engine) as chat:
        await chat.press("ctrl+v")
        await attached(chat)
        assert chat.screen.parts.draft.pictures[0].file == CAT
        program.write_text("#!/bin/sh\nexit 1\n")  # nothing but text there
        chat.app._clipboard = "words"
        await chat.press("ctrl+v")
        await chat.until(lambda: chat.prompt.text == "words")


async def test_without_a_program_for_the_clipboard_ctrl_v_says_what_to_do(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WAYLAND_DISPLAY", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    async with chatting(engine) as chat:
        await chat.press("ctrl+v")
        await chat.until(lambda: chat.said != [])
        assert "wl-clipboard (Wayland) or xclip (X11)" in chat.said[0]
        chat.app._clipboard = "words"
        await chat.press("ctrl+v")
        await chat.until(lambda: chat.prompt.text == "words")


def test_the_clipboards_programs_and_what_they_write() -> None:
    def have(*names: str) -> Callable[[str], str | None]:
        return lambda name: name if name in names else None

    wayland, x11 = {"WAYLAND_DISPLAY": "1", "DISPLAY": ":0"}, {"DISPLAY": ":0"}
    assert reader(wayland, have("wl-paste", "xclip")).read("image/png")[0] == "wl-paste"
    assert reader(x11, have("wl-paste", "xclip")).kinds[-1] == "TARGETS"
    script = reader({}, have("osascript"))
    assert script.decode("«data PNGf89504E47»\n".encode()) == b"\x89PNG"
    assert script.decode(b"words") == b""
    assert reader({}, have("powershell.exe")).decode(b"iVBORw==\r\n") == b"\x89PNG"
    with pytest.raises(UserError, match="Save the picture"):
        reader({}, have())


async def test_a_clipboard_that_does_not_answer_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipboard, "PATIENCE_S", 0.2)
    with pytest.raises(UserError, match="gives no answer"):
        await copied_picture(clipboard.ClipboardReader(("sleep", "60"), lambda kind: ()))
    monkeypatch.setattr(clipboard, "PATIENCE_S", 20.0)
    with pytest.raises(UserError, match="larger than"):
        await copied_picture(clipboard.ClipboardReader((), lambda kind: ("cat", "/dev/zero")))
    with pytest.raises(UserError, match="does not start"):
        await copied_picture(clipboard.ClipboardReader((), lambda kind: (str(tmp_path / "none"),)))


def test_kittys_placeholders_are_text_and_the_picture_is_sent_once() -> None:
    said: list[str] = []
    painter = KittyPainter(said.append)
    small = reduced(Picture.of(64, 32, bytes(64 * 32 * 3)))
    card = Card("cat.png", 64, 32, painter)
    card.show(small)
    lines = card.lines(80)
    assert [line.cell_length for line in lines[:8]] == [32] * 8
    assert lines[0].text.startswith("\U0010eeee")
    assert said[0].startswith("\x1b_G")
    assert "U=1" in said[0]
    assert len(said) == 1
    assert card.lines(80) == lines, "nothing is sent again for the same place"
    assert len(said) == 1
    painter.close()
    assert said[1].startswith("\x1b_Ga=d,d=I,i=")


ALONE = """
import os, sys, termios
from hetrun.pictures.picture import Picture
from hetrun.tui.transcript.thumbnails import KittyPainter, place_for, reduced
keys = termios.tcgetattr(0)
KittyPainter.prepare()
small = reduced(Picture.of(8, 8, bytes(192)))
KittyPainter(lambda text: None)(small, place_for(8, 8, 8))
assert termios.tcgetattr(0) == keys
assert os.read(0, 9) == b"typed\\n"
print("ready")
"""


def test_the_terminal_is_not_asked_and_its_keys_are_not_read() -> None:
    """textual-image does both when it is imported, if it sees a terminal."""
    ours, theirs = pty.openpty()
    os.write(ours, b"typed\n")
    done = subprocess.Popen([sys.executable, "-c", ALONE], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert done.wait(40) == 0
    written = b""
    with suppress(OSError):  # the terminal is gone when all was read
        while part := os.read(ours, 1 << 16):
            written += part
    os.close(ours)
    assert written.replace(b"typed\r\n", b"", 1) == b"ready\r\n"


def test_which_terminals_are_known_to_have_placeholders() -> None:
    assert has_placeholders({"TERM": "xterm-kitty"})
    assert not has_placeholders({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"})
    assert not has_placeholders({"TERM": "tmux-256color", "KITTY_WINDOW_ID": "1"})
