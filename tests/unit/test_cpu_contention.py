"""What other programs take, from the system's own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrun.executor.autotune.cpu_contention import OtherPrograms

STAT = """cpu  1000 0 0 0 0 0 0 0 0 0
cpu0 {0} 10 20 5000 400 1 2 3 0 0
cpu1 {1} 10 20 5000 400 1 2 3 0 0
cpu2 {2} 10 20 5000 400 1 2 3 0 0
intr 5 0 0
ctxt 17
"""


class Machine:
    """A file as /proc/stat is, and the time that this process has computed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.own = folder / "stat", 7.0
        monkeypatch.setattr("hetrun.executor.autotune.cpu_contention.process_time", lambda: self.own)
        monkeypatch.setattr("hetrun.executor.autotune.cpu_contention.os.sysconf", lambda name: 100)
        self.ticks(0, 0, 0)

    def ticks(self, *busy: int) -> None:
        self.file.write_text(STAT.format(*(1000 + n for n in busy)))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_it_is_what_the_cores_did_less_what_this_process_did(machine: Machine) -> None:
    others = OtherPrograms(machine.file, (0, 1))
    assert others.count == 2
    assert others.look(10.0) is None, "there is nothing to compare with"
    machine.ticks(50, 50, 50)
    machine.own += 0.25
    assert others.look(10.5) == pytest.approx(1.5), "core 2 is not ours to use"
    assert others.look(11.5) == 0
    assert others.look(11.5) is None


def test_less_than_our_own_is_no_answer(machine: Machine) -> None:
    others = OtherPrograms(machine.file, (0, 1))
    others.look(10.0)
    machine.own += 2.0
    machine.ticks(10, 10, 0)
    assert others.look(11.0) is None, "these are not the cores that we run on"
    machine.own += 1.02
    machine.ticks(60, 60, 0)
    assert others.look(12.0) == 0, "clocks of the system are coarse"


@pytest.mark.parametrize("text", ["", "cpu0 1 2", "cpu0 a b c d e f g h\ncpu1 1 2 3 4 5 6 7 8", "cpux 1 2"])
def test_what_cannot_be_read_is_not_known(machine: Machine, text: str) -> None:
    others = OtherPrograms(machine.file, (0, 1))
    others.look(10.0)
    machine.file.write_text(text)
    assert others.look(11.0) is None
    machine.ticks(0, 0, 0)
    assert others.look(12.0) is None
    assert others.look(13.0) == 0


def test_no_file_and_cores_that_are_not_in_it(machine: Machine) -> None:
    gone = OtherPrograms(machine.file.with_name("none"), (0,))
    elsewhere = OtherPrograms(machine.file, (0, 9))
    for at in (1.0, 2.0):
        assert gone.look(at) is None
        assert elsewhere.look(at) is None


def test_this_machine_can_be_asked() -> None:
    others = OtherPrograms()
    others.look(0.0)
    found = others.look(1e-9)
    assert found is None or found >= 0
