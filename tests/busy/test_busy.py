"""A sample of `python -m tests.busy`, without busy programs; and all of it, beside them, in the slow tier."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.busy import checks, table
from tests.busy.rig import Lost, Rig, rig
from tests.busy.table import CheckRow, attempt
from tests.models.tiny import TinyLlama, write_gguf

ROOT = Path(__file__).parents[2]
TINY = TinyLlama("tiny", layers=2, embd=64, ffn=96, heads=2, kv_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(TINY, tmp_path_factory.mktemp("busy") / "tiny.gguf"))


@pytest.fixture
def served(tiny: str, tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path / "home", tiny) as found:
        found.start()
        yield found
        found.stop()


@pytest.mark.slow
def test_what_is_asked_twice_is_answered_alike(served: Rig) -> None:
    for name in ("chats", "run_there", "ps"):
        row = CheckRow(name)
        attempt(served, row, busy=False)
        attempt(served, row, busy=True)
        assert row.faults == []
        assert row.texts
        assert (row.rounds, row.busy_s > 0) == (1, True)


def test_alarms_losses_and_other_texts_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter((["a", "b"], ["a", "c"], Lost("no answer")))

    def check(found: Rig) -> list[str]:
        found.look_through("server", "hetrun: a step is stuck: it has been in blk.3 for 9 s\nhetrun: well\n")
        answer = next(said)
        if isinstance(answer, Lost):
            raise answer
        return answer

    monkeypatch.setitem(checks.CHECKS, "made up", check)
    row = CheckRow("made up")
    for busy in (False, True, True):
        attempt(Rig(tmp_path, "none"), row, busy=busy)
    assert len(row.alarms) == 3
    assert row.lost == ["other texts than before: 'c' for 'b'", "Lost: no answer"]
    assert table.table([row]).splitlines()[1].split()[-3:] == ["2", "3", "2"]
    faults = row.as_json()["faults"]
    assert isinstance(faults, list)
    assert len(faults) == 5


@pytest.mark.alone
@pytest.mark.exhaustive
@pytest.mark.slow
def test_nothing_is_lost_beside_busy_programs(tiny: str) -> None:
    names = [name for name in checks.CHECKS if name not in ("doctor", "first_start")]
    command = [sys.executable, "-m", "tests.busy", *names, "-m", tiny, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["faults"] == []
    assert done.returncode == 0
