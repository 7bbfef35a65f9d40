"""Every screen as a picture; `python -m tests.tools.pictures` draws them again."""

from __future__ import annotations

import pytest

from tests.tools import pictures
from tests.tools.pictures import FOLDER, SCENES, picture
from tests.tui.driver import Driver
from tests.tui.looks import looks


@pytest.mark.parametrize("name", SCENES)
async def test_a_screen_looks_as_it_did(name: str) -> None:
    kept = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert looks(await picture(name, kept)) == looks(kept)


async def test_a_picture_has_the_cursor_in_whichever_moment_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def edited(chat: Driver) -> None:
        await pictures.edit(chat)
        chat.prompt._toggle_cursor_blink_visible()
        await chat.pilot.pause()  # drawn without

    monkeypatch.setitem(SCENES, "edit", (edited, pictures.SMALL))
    await test_a_screen_looks_as_it_did("edit")


def test_no_picture_is_of_a_screen_that_is_gone() -> None:
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(SCENES)


def test_a_look_has_text_and_colours() -> None:
    first, *_ = looks((FOLDER / "chat.svg").read_text(encoding="utf-8"))
    text, ink, paper = first.split(" | ")
    assert text.startswith(" Search conversations")
    assert "1-20:fill:#" in ink
    assert paper.startswith("0-")
