"""Where threads run: real teams of threads on the CPUs of this machine, and choices for other machines."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hetrun.system import thread_affinity
from hetrun.system.core_sets import CoreSet
from hetrun.system.cpu_topology import Core, TopoTree, read_topology, this_machine
from hetrun.system.thread_affinity import Team, ThreadCores, seats
from tests.support.sysfs import EPYC, LAPTOP, of

ALL = this_machine().cpus


def openmp() -> ctypes.CDLL:
    """A library with GNU's OpenMP, as ggml and torch are linked to."""
    try:
        return ctypes.CDLL("libgomp.so.1")
    except OSError:
        pytest.skip("GNU's OpenMP is not installed")


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> ThreadCores:
    """Choices of this test's own."""
    if thread_affinity._function() is None:
        pytest.skip("the C library was not built")
    made = ThreadCores(this_machine())
    monkeypatch.setattr(thread_affinity, "chosen", lambda: made)
    return made


def masks_of_threads() -> list[tuple[int, ...]]:
    """What each thread of this process may use."""
    return [tuple(sorted(os.sched_getaffinity(int(tid)))) for tid in os.listdir("/proc/self/task")]


def in_a_thread(work: object) -> None:
    """Run it on a thread that ends, as its masks and its team do."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.skipif(len(ALL) < 2, reason="there is one CPU only")
def test_each_thread_takes_its_seat_and_gives_it_back(choice: ThreadCores) -> None:
    library = openmp()

    def work() -> None:
        before = masks_of_threads()
        team = Team(library)
        with team.seated(len(ALL)):
            assert os.sched_getaffinity(0) == {ALL[0]}
        after = masks_of_threads()
        assert os.sched_getaffinity(0) == set(ALL)  # the engine's own: children and threads begin with it
        for cpu in ALL[1:]:
            assert after.count((cpu,)) == before.count((cpu,)) + 1
        team.rise()
        assert all(masks_of_threads().count((cpu,)) == before.count((cpu,)) for cpu in ALL[1:])

    in_a_thread(work)


@pytest.mark.skipif(len(ALL) < 2, reason="there is one CPU only")
def test_threads_that_were_made_anew_have_seats_of_their_own(choice: ThreadCores) -> None:
    """Another user of the same threads may want fewer for a moment: the others end, and are made again."""
    library = openmp()
    free = ctypes.CDLL(None).free  # a C function that a thread may call with nothing

    def work() -> None:
        before = masks_of_threads()
        team = Team(library)
        with team.seated(len(ALL)):
            pass
        library.GOMP_parallel(free, None, 1, 0)
        with team.seated(len(ALL)):
            masks = masks_of_threads()
        for cpu in ALL:
            assert masks.count((cpu,)) == before.count((cpu,)) + 1

    in_a_thread(work)


@pytest.mark.skipif(len(ALL) < 2, reason="there is one CPU only")
def test_fewer_threads_are_kept_to_a_set_and_all_may_be_anywhere_again(choice: ThreadCores) -> None:
    library = openmp()

    def work() -> None:
        team = Team(library)
        choice.choose(CoreSet("the last", ALL[-1:], 1))
        with team.seated(1):
            assert os.sched_getaffinity(0) == {ALL[-1]}
        choice.choose(CoreSet("anywhere", ALL, 1))
        with team.seated(1):
            assert os.sched_getaffinity(0) == set(ALL)

    in_a_thread(work)


def test_nothing_is_asked_of_the_system_where_nothing_changes(choice: ThreadCores) -> None:
    def work() -> None:
        team = Team(openmp())
        asked: list[int] = []
        team._run = lambda masks, threads: asked.append(threads)
        with team.seated(1):  # anywhere, as before
            assert not asked
        for _ in range(3):
            with team.seated(len(ALL)):
                pass
        assert asked == ([len(ALL)] * 3 if len(ALL) > 1 else [])
        del asked[:]
        with team.seated(1):  # all of them may go where they like again
            assert asked == [len(ALL)][: len(ALL) - 1]
        team.rise()
        assert len(asked) < 2

    in_a_thread(work)


@pytest.mark.parametrize("name", thread_affinity.THEIRS)
def test_who_places_threads_by_openmp_is_obeyed(
    name: str, choice: ThreadCores, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = openmp()  # if it were loaded later, it would follow the setting itself, for good
    monkeypatch.setenv(name, "0")
    assert Team(library)._run is None
    with Team(library).seated(len(ALL)):  # and does no harm
        assert os.sched_getaffinity(0) == set(ALL)


def test_a_library_without_threads_has_none_to_place(choice: ThreadCores) -> None:
    plain = ctypes.CDLL(
        str(Path(thread_affinity.__file__).parent / thread_affinity.NAME)
    )  # it needs the C library only
    with Team(plain).seated(2):
        assert os.sched_getaffinity(0) == set(ALL)


def test_the_masks_of_a_set() -> None:
    assert seats(CoreSet("pairs", (2, 5, 9), 3)) == ((2,), (5,), (9,))
    assert seats(CoreSet("anywhere", (0, 1, 2), 2)) == ((0, 1, 2),)


def test_a_thread_for_each_core_has_a_place_and_fewer_wait_for_a_measurement() -> None:
    made = ThreadCores(read_topology(of(EPYC)))
    assert made.of(48).cpus == tuple(range(48))
    assert made.of(96).cpus == tuple(range(96))
    assert made.of(16).name == made.of(7).name == "anywhere"
    assert not made.open(48) or made.open(48)[0].name == "anywhere"
    names = [s.name for s in made.open(16)]
    assert names == ["anywhere", "2 cores of each cache of one socket", "1 core of each cache"]
    made.choose(made.open(16)[2])
    assert made.of(16).cpus == tuple(range(0, 48, 3))


def test_where_cores_are_of_two_kinds_there_is_something_to_measure() -> None:
    made = ThreadCores(read_topology(of(LAPTOP)))
    assert [s.name for s in made.open(6)] == ["anywhere", "the 6 fast cores"]
    assert made.open(1) == []  # one thread is kept to the fast cores in any case


def test_a_limit_of_time_pins_nothing() -> None:
    tree = TopoTree(tuple(Core((cpu,), 0, (0, 0, -1, -1)) for cpu in range(8)), share=8)
    made = ThreadCores(tree)
    assert all(made.of(n).cpus == tree.cpus and not made.open(n) for n in range(1, 8))


def test_masks_are_those_of_the_process_when_it_ends() -> None:
    """A real model's threads, in a process of their own that may use one CPU only."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from hetrun.system.cpu_topology import this_machine; from hetrun.system.core_sets import core_sets;"
        "print([(s.threads, s.cpus) for s in core_sets(this_machine())])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"[(1, ({ALL[0]},))]"
