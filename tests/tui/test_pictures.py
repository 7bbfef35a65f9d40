"""Every screen as a picture; `python -m tests.pictures` draws them again."""

from __future__ import annotations

import pytest

from tests.pictures import FOLDER, SCENES, picture, words


@pytest.mark.parametrize("name", SCENES)
async def test_a_screen_looks_as_it_did(name: str) -> None:
    kept = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert words(await picture(name)) == words(kept)
