"""A worker that has something to write before it ends may take its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetrun.client import worker_process
from hetrun.client.engine_client import WorkerClient
from hetrun.config import Settings
from tests.support.fakes import FakeEngine

LONGER_S = 0.5  # than the others may take


class Writer(FakeEngine):
    """An engine that writes a file when it is closed, slowly."""

    def __init__(self, *, prompt_cache: Path, progress: Callable[[float], None]) -> None:
        super().__init__(progress=progress)
        self._path = prompt_cache

    def close(self) -> None:
        super().close()
        time.sleep(LONGER_S)
        self._path.write_text("all of it")


async def test_prompts_are_written_before_a_worker_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "GRACE_S", LONGER_S / 10)
    settings = Settings.resolve(environ={}, prompt_cache=tmp_path / "prompts")
    client = WorkerClient(settings, engine=f"{__name__}:Writer")
    await client.info()
    await client.close()
    assert (tmp_path / "prompts").read_text() == "all of it"
