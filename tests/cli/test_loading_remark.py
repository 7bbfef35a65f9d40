"""What `hetrun serve` writes into its log while a model is loaded."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from hetrun.cli import serve
from hetrun.client.interface import ChatClient


class Slow:
    """A client whose model is there after some looks at its progress."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    async def info(self) -> str:
        for _ in range(self.looks):
            await asyncio.sleep(2 * serve.POLL_S)
        return "loaded"


def said(capsys: pytest.CaptureFixture[str], looks: int, remark: bool = False) -> str:
    async def load() -> None:
        await serve.loaded(cast(ChatClient, Slow(looks)), asyncio.Event(), remark)

    asyncio.run(load())
    return capsys.readouterr().err


def test_long_loading_is_told_once_where_there_is_no_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "POLL_S", 0.01)
    monkeypatch.setattr(serve, "LONG_S", 0.0)
    assert said(capsys, 3, remark=True).count("the model is being loaded") == 1
    assert said(capsys, 3) == ""  # as for batches
    assert said(capsys, 0, remark=True) == ""
