"""`hetrun bench --ram 1GiB,50%`: what is asked for, the groups that processes run in, the disk's ceiling."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetrun.errors import OptionError, UserError
from hetrun.tools.bench.cases import BenchCase, BenchOptions
from hetrun.tools.bench.disk_bandwidth import Ceiling, ModelDisk
from hetrun.tools.bench.options import TypedBenchOptions, options_of
from hetrun.tools.bench.process import BenchProcess, BenchProcessDied
from hetrun.tools.bench.sweep import cgroup_sandbox
from hetrun.tools.bench.sweep.budgets import BESIDE, SweepBudget, SweepOptions, budgets, is_sweep
from hetrun.tools.bench.sweep.cgroup_sandbox import VERSION_1, VERSION_2, confined, why_not

GIB = 1 << 30

# --- what is typed


def test_budgets_are_sizes_and_shares() -> None:
    found = budgets("1GiB, 50%,2.5%,1GiB,")
    assert found == (SweepBudget(GIB), SweepBudget(percent=50.0), SweepBudget(percent=2.5))
    assert [b.name for b in found] == ["1.0 GiB", "50%", "2.5%"]
    assert [b.of(1000) for b in found] == [GIB, 500 + BESIDE, 25 + BESIDE]


@given(st.lists(st.one_of(st.integers(1, 1 << 50), st.floats(0.01, 1000)), min_size=1, max_size=5))
def test_what_is_typed_is_what_is_meant(values: list[float]) -> None:
    typed = [str(v) if isinstance(v, int) else f"{v!r}%" for v in values]
    for budget, value in zip(budgets(",".join(typed)), dict.fromkeys(values), strict=True):
        expected = value if isinstance(value, int) else round(value / 100 * 10**9) + BESIDE
        assert budget.of(10**9) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (",", "--ram must be budgets such as 1GiB,2GiB,50%"),
        ("1GiB,much", "--ram must be a size such as 2GiB"),
        ("0%", "a share in --ram must be more than 0%"),
        ("-5%", "a share in --ram must be more than 0%"),
        ("nan%", "a share in --ram must be more than 0%"),
        ("half%,1GiB", "a share in --ram must be more than 0%"),
        ("2000%", "at most 1000%"),
    ],
)
def test_what_is_no_budget_is_refused(text: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        budgets(text)


def test_one_size_is_no_sweep() -> None:
    assert not is_sweep("2GiB")
    assert is_sweep("2GiB,3GiB")
    assert is_sweep("2GiB,")
    assert is_sweep("50%")


def asked(**given: Any) -> TypedBenchOptions:  # noqa: ANN401 - its fields
    typed: dict[str, Any] = {"generate": "64", "rounds": 5, "output": "table", "explain": False}
    typed |= dict.fromkeys(("prompt", "depth", "batch", "vs", "clients", "requests", "shared_prefix"))
    return TypedBenchOptions(**(typed | {"arrival": None} | given))


def test_several_budgets_ask_for_a_sweep() -> None:
    found = options_of(asked(ram="1GiB,50%"))
    assert found == SweepOptions((SweepBudget(GIB), SweepBudget(percent=50.0)))
    assert isinstance(found, SweepOptions)
    assert found.case == BenchCase("decode", 64, 32)
    typed = asked(ram="50%", generate="8", depth="0", batch="4", vs="llama.cpp", vs_threads="2", rounds=3)
    found = options_of(replace(typed, picture=Path("a.svg")))
    assert isinstance(found, SweepOptions)
    assert (found.case, found.rounds, found.vs_threads) == (BenchCase("decode", 8, 0, 4), 3, 2)
    assert options_of(asked(ram="1GiB")) == BenchOptions()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ram": "50%", "prompt": "512"}, "-p is not for a sweep"),
        ({"ram": "50%", "explain": True}, "--explain is not for a sweep"),
        ({"ram": "50%", "clients": "1"}, "--clients is not for a sweep"),
        ({"ram": "50%", "beside": "1"}, "--beside is not for a sweep"),
        ({"ram": "50%", "depth": "1,2"}, "-d must be one number"),
        ({"ram": "50%", "generate": "1"}, "-n must be 2 or more"),
        ({"ram": "50%", "vs_threads": "1"}, "give --vs llama.cpp too"),
        ({"ram": "50%", "picture": Path("a.png")}, "--picture writes SVG"),
        ({"ram": "50%", "output": "xml"}, "-o must be one of"),
        ({"ram": "50%", "rounds": 0}, "-r must be 1 or more"),
        ({"ram": "1GiB", "picture": Path("a.svg")}, "--picture draws a sweep over budgets"),
        ({"ram": "1GiB", "clients": "1"}, "--ram is for runs in process"),
    ],
)
def test_what_a_sweep_does_not_do_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        options_of(asked(**given))


# --- groups

NAMES = {
    VERSION_1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "cgroup.procs"),
    VERSION_2: ("memory.max", "memory.swap.max", "cgroup.procs"),
}


class Kernel:
    """A tree of control groups in an ordinary folder: a new group has its files, and goes with them."""

    def __init__(self, root: Path, version: cgroup_sandbox.Version, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._version = root, version
        self.mount = root / "sys/fs/cgroup"
        self.mine = self.mount / "a/mine"
        kind, name = ("cgroup", "memory") if version is VERSION_1 else ("cgroup2", "")
        proc = root / "proc/self"
        proc.mkdir(parents=True)
        (proc / "mountinfo").write_text(f"32 31 0:29 / /sys/fs/cgroup rw - {kind} {kind} rw,{name}\n")
        (proc / "cgroup").write_text(f"4:{name}:/a/mine\n")
        self.mine.mkdir(parents=True)
        self.made: list[Path] = []
        self.busy = 0  # times that a group cannot be removed
        mkdir = Path.mkdir

        def make(path: Path, *args: Any, **named: Any) -> None:  # noqa: ANN401 - those of mkdir
            mkdir(path, *args, **named)
            if self.mount in path.parents:
                self.made.append(path)
                for file in NAMES[self._version]:
                    (path / file).touch()

        def remove(path: Path) -> None:
            if self.busy:
                self.busy -= 1
                raise OSError(16, "Device or resource busy")
            shutil.rmtree(path)

        monkeypatch.setattr(Path, "mkdir", make)
        monkeypatch.setattr(Path, "rmdir", remove)

    def says(self, group: Path, **files: str) -> None:
        for name, text in files.items():
            (group / name.replace("__", ".")).write_text(text)


@pytest.fixture
def version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(tmp_path, VERSION_1, monkeypatch)
    for folder in (kernel.mine, kernel.mine.parent):
        kernel.says(folder, memory__limit_in_bytes="9223372036854771712")
    return kernel


@pytest.fixture
def version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(tmp_path, VERSION_2, monkeypatch)
    kernel.says(kernel.mine, cgroup__subtree_control="cpu")
    kernel.says(kernel.mine.parent, cgroup__subtree_control="cpu memory io")
    return kernel


def test_a_group_of_version_1_lies_below_ours(version_1: Kernel) -> None:
    with confined(1 << 20, version_1.root) as group:
        assert group.folder.parent == version_1.mine
        assert (group.folder / "memory.limit_in_bytes").read_text() == str(1 << 20)
        assert (group.folder / "memory.memsw.limit_in_bytes").read_text() == str(1 << 20)
        assert (group.peak, group.killed) == (None, False)
        version_1.says(group.folder, memory__max_usage_in_bytes="12345\n")
        version_1.says(group.folder, memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
        assert (group.peak, group.killed) == (12345, True)
        group.empty()
        assert (group.folder / "memory.force_empty").exists()
    assert not list(version_1.mine.glob("hetrun*"))


def test_a_group_of_version_2_lies_where_memory_is_delegated(version_2: Kernel) -> None:
    with confined(1 << 20, version_2.root) as group:
        assert group.folder.parent == version_2.mine.parent
        assert (group.folder / "memory.max").read_text() == str(1 << 20)
        assert (group.folder / "memory.swap.max").read_text() == "0"
        version_2.says(group.folder, memory__peak="777", memory__events="low 0\noom 3\noom_kill 1\n")
        assert (group.peak, group.killed) == (777, True)
        version_2.says(group.folder, memory__events="low 0\noom 3\noom_kill 0\n")
        assert (group.peak, group.killed) == (777, False)
    assert not list(version_2.mine.parent.glob("hetrun*"))


def test_a_command_joins_before_it_begins(version_1: Kernel) -> None:
    with confined(1 << 20, version_1.root) as group:
        found = subprocess.run([*group.prefix, "echo", "a b"], capture_output=True, text=True, check=True)
        assert found.stdout == "a b\n"
        assert (group.folder / "cgroup.procs").read_text() == "0\n"  # a process that writes this means itself
        (group.folder / "cgroup.procs").write_text("")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_it_is_removed_however_it_ends(version_1: Kernel, error: type[BaseException]) -> None:
    version_1.busy = 3
    with pytest.raises(error), confined(1 << 20, version_1.root):
        raise error
    assert not list(version_1.mine.glob("hetrun*"))


def test_who_is_left_in_it_is_killed(version_1: Kernel) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with confined(1 << 20, version_1.root) as group:
            (group.folder / "cgroup.procs").write_text(f"{process.pid}\n")
        assert process.wait() == -signal.SIGKILL


def test_what_a_killed_run_left_behind_is_swept_out(version_1: Kernel) -> None:
    of_the_dead, of_the_living = (version_1.mine / f"hetrun-bench-{pid}-1" for pid in (4, 5))
    of_somebody = version_1.mine / "hetrun-bench-notes"
    for folder in (of_the_dead, of_the_living, of_somebody, version_1.root / "proc/5"):
        folder.mkdir()
    with confined(1 << 20, version_1.root):
        assert [f.exists() for f in (of_the_dead, of_the_living, of_somebody)] == [False, True, True]


@pytest.mark.parametrize("fails", ["mkdir", "write_text"])
def test_who_may_not_make_one_is_told_why(
    version_1: Kernel, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, fails, refuse)
    said = why_not(version_1.root)
    assert said is not None
    assert "Permission denied" in said
    assert "run as root" in said
    assert not list(version_1.mine.glob("hetrun*"))


def test_a_kernel_without_groups_has_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="offers no control group that limits memory"), confined(1, tmp_path):
        pass


@pytest.mark.skipif(why_not() is not None, reason="no group can be made here")
def test_the_kernel_kills_who_wants_more() -> None:
    with confined(64 << 20) as group:
        small = subprocess.run([*group.prefix, sys.executable, "-c", "b'x' * (8 << 20)"], check=False)
        assert (small.returncode, group.killed) == (0, False)
        large = subprocess.run([*group.prefix, sys.executable, "-c", "b'x' * (256 << 20)"], check=False)
        assert (large.returncode, group.killed) == (-signal.SIGKILL, True)
        assert group.peak is None or 8 << 20 < group.peak <= 64 << 20
    assert not group.folder.exists()


# --- processes that are told what to do


def told(code: str) -> BenchProcess:
    return BenchProcess("someone", "from hetrun.tools.bench.process import obey; " + code)


def test_what_it_answers_comes_back_and_so_do_errors() -> None:
    answers = "obey({pipe}, 'someone', lambda order: [order * 2])"
    process = told(answers)
    try:
        assert process.ask(4, int) == 8
        assert process.ask("a", str) == "aa"
        with pytest.raises(Exception, match="someone answered 8"):
            process.ask(4, str)
        with pytest.raises(Exception, match="the process of someone: TypeError"):
            process.ask({}, int)
        assert process.ask(1, int) == 2
    finally:
        process.close()


def test_its_death_is_an_error_that_says_how() -> None:
    process = told("import os; obey({pipe}, 'someone', lambda order: os.kill(os.getpid(), order))")
    try:
        with pytest.raises(BenchProcessDied, match="the process of someone was killed") as found:
            process.ask(9, int)
        assert found.value.code == -signal.SIGKILL
        with pytest.raises(BenchProcessDied):
            process.ask(9, int)
    finally:
        process.close()


IN_A_SESSION = """
from pathlib import Path
from hetrun.tools.bench.process import BenchProcess
Path("/proc/self/autogroup").write_text("5")
obeying = "from hetrun.tools.bench.process import obey; obey({pipe}, 'x', lambda order: [order])"
process = BenchProcess("x", obeying)
process.ask(1, int)
print(Path(f"/proc/{process.pid}/autogroup").read_text())
process.close()
"""


@pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="time is not shared among sessions here"
)
def test_it_is_as_important_as_we() -> None:
    code = ["-c", IN_A_SESSION]
    found = subprocess.run(
        [sys.executable, *code], capture_output=True, text=True, check=True, start_new_session=True
    )
    assert found.stdout.strip().endswith("nice 5")


# --- the disk


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(1 << 20) * 5)
    return path


def test_the_ceiling_is_the_best_way(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {(1, 1): 1e9, (1, 2): 2e9, (2, 1): 3e9, (2, 2): 5e9, (4, 1): 4e9, (4, 2): 2e9}
    # The best of short times is too good: it is measured once more.
    monkeypatch.setattr(
        ModelDisk, "_rate", lambda self, fd, n, request, s: rates.pop((n, request >> 20), 4e9)
    )
    found = ModelDisk([file]).ceiling()
    assert found is not None
    assert (found.rate, found.threads, found.request) == (4e9, 2, 2 << 20)
    assert found.text.startswith("4.00 GB/s (2 threads, requests of 2 MiB")


def test_bytes_are_counted_that_were_read(file: Path) -> None:
    disk = ModelDisk([file])
    found = disk.ceiling(0.001, 0.001)
    assert found is not None
    assert found.rate > 0
    assert disk.ceiling(0.001, 0.001)
    disk.forget()


def test_measurements_walk_through_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets: list[int] = []
    read: Callable[..., int] = os.preadv

    def note(fd: int, buffers: list[Any], offset: int) -> int:
        offsets.append(offset)
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", note)
    disk = ModelDisk([file])
    descriptor, _ = disk._open()
    offsets.clear()
    for _ in range(7):
        disk._rate(descriptor, 1, 1 << 20, 0.0005)
    os.close(descriptor)
    assert len(offsets) >= 7
    assert set(offsets) <= {i << 20 for i in range(5)}
    # One behind the other, but for one that a measurement may leave out at its end.
    assert {(b - a >> 20) % 5 for a, b in pairwise(offsets)} <= {1, 2}


def test_a_short_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 4096)
    assert ModelDisk([tmp_path / "short"]).ceiling() is None


def test_a_disk_behind_the_page_cache_is_told() -> None:
    assert "refuses O_DIRECT" in Ceiling(1e9, 1, 1 << 20, direct=False).text
