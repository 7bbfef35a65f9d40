"""Keys, commands and sizes in random order: no traceback, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrun.tui.screens.chat import ChatScreen
from tests.tui.keys_at_random import OTHERS, PLAIN, SIZES, press_at_random, press_each


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_some_keys_at_random(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where exports go
    await press_at_random(size[0], 150, size, tmp_path)


@pytest.mark.parametrize(
    "size",
    [SIZES[0], *(pytest.param(size, marks=pytest.mark.exhaustive) for size in SIZES[1:])],
    ids=["60x15", "80x24", "140x45"],
)
async def test_each_key_and_each_command(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await press_each((), size, tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("front", ["ctrl+up", "f1", "f2", "f3", "f4", "f5", "f6", "f7", "f8", "ctrl+o"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_each_key_everywhere(
    size: tuple[int, int], front: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await press_each((front,), size, tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_20_000_keys_at_random(
    size: tuple[int, int], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await press_at_random(seed, 2000, size, tmp_path)


def test_every_key_of_the_chat_is_pressed() -> None:
    bound = {key for b in ChatScreen.BINDINGS for key in b.key.split(",")}  # type: ignore[union-attr]
    assert bound <= {*PLAIN, *OTHERS}
