"""Some modes in a control group of just their budget, and what judges them: kills, answers, growth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.memory.__main__ import environment, line
from tests.memory.group import PAGE, VERSION_1, VERSION_2, MemoryGroup, limited, missing
from tests.memory.models import TINY, ModelFolder
from tests.memory.modes import MODES, raw
from tests.memory.soak import slope
from tests.memory.trial import MIB, Mode, Run, attempt
from tests.support.tiers import exhaustive

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder(tmp_path_factory.mktemp("models"))


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


@pytest.fixture
def _groups() -> None:
    if reason := missing():
        pytest.skip(reason)


@exhaustive
@pytest.mark.usefixtures("_groups")
def test_the_least_that_is_asked_for_is_enough(models: ModelFolder, env: dict[str, str]) -> None:
    """A tiny model, its weights from disk, in a group of what the refusal names."""
    row = attempt(Mode("least", TINY[0], None, raw(TINY[0], n="4", words=10)), models, env)
    assert row.faults == [], line(row)
    assert row.kills == 0
    assert 0 < row.fixed <= row.budget
    assert row.peak <= row.budget


@exhaustive
@pytest.mark.usefixtures("_groups")
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_mode_keeps_to_its_budget(mode: Mode, models: ModelFolder, env: dict[str, str]) -> None:
    row = attempt(mode, models, env)
    if row.skipped:
        pytest.skip(row.skipped)
    assert row.faults == [], line(row)


@pytest.mark.usefixtures("_groups")
def test_who_takes_more_is_killed_and_counted() -> None:
    """The judge of all modes: a group does kill."""
    with limited(48 * MIB) as group:
        command = group.command([sys.executable, "-c", "bytearray(96 << 20)"])
        done = subprocess.run(command, check=False)
        assert done.returncode == -9
        assert group.kills == 1
        assert group.failures > 0
        assert 40 * MIB < group.peak <= 48 * MIB


@pytest.mark.usefixtures("_groups")
def test_another_answer_in_the_group_is_a_fault(models: ModelFolder, env: dict[str, str]) -> None:
    def answer(run: Run) -> object:
        return "here" if run.group else "there"

    row = attempt(Mode("differs", TINY[0], 64, answer), models, env)
    assert row.faults == ["another answer: 'here' instead of 'there'"]


@pytest.mark.parametrize("files", [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
def test_a_group_of_either_version_is_read(files: object, tmp_path: Path) -> None:
    """From a folder with what the kernel writes there."""
    first = files is VERSION_1
    stat = "total_rss 5\ntotal_shmem 7\ntotal_workingset_refault_file 3\n"
    said = {
        "memory.stat": stat if first else "anon 5\nshmem 7\nkernel 2\nworkingset_refault_file 3\n",
        "memory.kmem.usage_in_bytes" if first else "memory.events": "2\n" if first else "max 9\noom_kill 1\n",
        "memory.max_usage_in_bytes" if first else "memory.peak": "100\n",
        **({"memory.failcnt": "9\n", "memory.oom_control": "under_oom 0\noom_kill 1\n"} if first else {}),
        "memory.memsw.limit_in_bytes" if first else "memory.swap.max": "",
    }
    for name, text in said.items():
        (tmp_path / name).write_text(text)
    group = MemoryGroup(tmp_path, VERSION_1 if first else VERSION_2, 4096)
    assert (group.fixed, group.refaults, group.kills, group.failures, group.peak) == (14, 3, 1, 9, 100)
    limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    names = limits if first else ("memory.max", "memory.swap.max")
    assert [(tmp_path / name).read_text() for name in names] == ["4096", str(4096 + PAGE) if first else "0"]


def test_a_line_that_climbs_is_told_from_one_that_only_wavers() -> None:
    """A leak of 3 MiB an hour under noise of 1 MiB is found in an hour; noise and a warm-up are none."""
    noise = [((n * 7919) % 101 - 50) / 50 for n in range(1800)]
    level = [(2.0 * n, 100 + noise[n]) for n in range(1800)]
    leak = [(at, value + 3.0 * at / 3600) for at, value in level]
    warm = [(at, value + 20 * min(at, 600) / 600) for at, value in level]
    assert slope("level", level, 0.5).is_flat
    assert slope("warm-up", warm, 0.5).is_flat
    found = slope("leak", leak, 0.5)
    assert not found.is_flat
    assert abs(found.per_hour - 3.0) <= found.spread
    assert found.spread < 1.0
