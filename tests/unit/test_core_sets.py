"""Candidate sets of cores, on real machines and in containers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from hetrun.system.core_sets import MOST_COUNTS, MOST_SETS, CoreSet, core_sets, counts, in_ranges, to_text
from hetrun.system.cpu_topology import Core, TopoTree, read_topology
from tests.support.sysfs import (
    ARM_SERVER,
    EPYC,
    GB10,
    LAPTOP,
    MACHINES,
    PHONE,
    XEON,
    Described,
    numbers,
    of,
)


def sets_of(machine: Described) -> dict[tuple[int, ...], CoreSet]:
    """The candidates by their CPUs."""
    return {s.cpus: s for s in core_sets(read_topology(of(machine)))}


def flat(n: int, share: float | None = None) -> TopoTree:
    """`n` cores of which nothing is known."""
    return TopoTree(tuple(Core((cpu,), 0, (0, 0, -1, -1)) for cpu in range(n)), share)


def test_a_hybrid_laptop_has_its_fast_cores_with_and_without_their_second_threads() -> None:
    sets = sets_of(LAPTOP)
    assert sets[tuple(range(0, 12, 2))].name == "the 6 fast cores"
    assert sets[tuple(range(12))].threads == 12
    assert sets[(*range(0, 12, 2), *range(12, 20))].name == "all cores"
    assert sets[tuple(range(20))].threads == 20


def test_many_caches_can_each_keep_cores_idle() -> None:
    sets = sets_of(EPYC)
    assert sets[tuple(range(0, 48, 3))].name == "1 core of each cache"
    two = sets[tuple(cpu for cpu in range(48) if cpu % 3 < 2)]
    assert (two.name, two.threads) == ("2 cores of each cache", 32)
    # As many threads, packed and spread: only a measurement can tell.
    assert sets[0, 1].threads == sets[0, 3].threads == 2


def test_a_socket_and_a_node_can_be_had_alone() -> None:
    names = {s.name: s.cpus for s in sets_of(XEON).values()}
    assert names["all cores of one socket"] == tuple(range(0, 40, 2))
    assert names["all cores of one NUMA node"] == tuple(range(0, 40, 4))
    assert names["5 cores of each cache"] == tuple(range(20))


def test_the_fast_cores_of_a_cache_come_first() -> None:
    sets = sets_of(GB10)
    assert (*range(5, 8), *range(15, 18)) in sets
    assert (*range(5, 10), *range(15, 20)) in sets


def test_with_three_kinds_the_slow_ones_go_kind_by_kind() -> None:
    sets = sets_of(PHONE)
    assert sets[7,].name == "one core"
    assert sets[3, 4, 5, 6, 7].name == "the 5 fast cores"


def test_cores_of_one_module_are_taken_last() -> None:
    """11 of the laptop's 14 cores: its two modules of four slow ones give by turns."""
    eleven = next(s for s in sets_of(LAPTOP).values() if s.threads == 11)
    assert set(eleven.cpus) & set(range(12, 16)) == {12, 13, 14}
    assert set(eleven.cpus) & set(range(16, 20)) == {16, 17}


def test_two_cores_leave_nothing_else_to_choose() -> None:
    tree = flat(2)
    sets = core_sets(tree)
    assert [(s.threads, s.cpus) for s in sets] == [(1, (0, 1)), (2, (0, 1))]
    assert counts(tree) == (1, 2)
    assert list(to_text(tree, sets))[-1] == "  with so few cores there is no other choice"


def test_one_core_is_one_set() -> None:
    assert [s.threads for s in core_sets(flat(1))] == [1]
    assert counts(flat(1)) == (1,)


def test_a_limit_of_time_leaves_the_place_to_the_system() -> None:
    sets = core_sets(flat(64, share=3.5))
    assert [(s.threads, len(s.cpus)) for s in sets] == [(1, 64), (2, 64), (4, 64)]
    assert counts(flat(64, share=2)) == (1, 2)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_candidates_are_few_distinct_and_real(machine: Described) -> None:
    tree = read_topology(of(machine))
    check(tree, core_sets(tree))
    assert core_sets(tree)[-1].cpus == tuple(numbers(machine.cpus))
    # The number of threads that all cores have with one each is measured throughout.
    assert {1, len(tree.cores)} <= set(counts(tree))


def check(tree: TopoTree, sets: Sequence[CoreSet]) -> None:
    """What holds of all candidates."""
    assert 1 <= len(sets) <= MOST_SETS
    assert len({(s.threads, s.cpus) for s in sets}) == len(sets)
    assert [s.threads for s in sets] == sorted(s.threads for s in sets)
    assert sets[0].threads == 1
    for s in sets:
        assert set(s.cpus) <= set(tree.cpus)
        assert s.threads == len(s.cpus) or s.threads < len(s.cpus)
    assert set(counts(tree)) <= {s.threads for s in sets}
    assert len(counts(tree)) <= MOST_COUNTS


@st.composite
def trees(draw: st.DrawFn) -> TopoTree:
    """Any tree: groups of any sizes, kinds of cores in any places."""
    cores, cpu = [], 0
    for socket in range(draw(st.integers(1, 3))):
        for cache in range(draw(st.integers(1, 4))):
            for module in range(draw(st.integers(1, 5))):
                threads = draw(st.integers(1, 2))
                path = (socket, draw(st.integers(0, 2)), cache, module)
                cores.append(Core(tuple(range(cpu, cpu + threads)), draw(st.integers(0, 2)), path))
                cpu += threads
    kinds = sorted({core.kind for core in cores})
    placed = [Core(core.cpus, kinds.index(core.kind), core.path) for core in cores]
    return TopoTree(tuple(sorted(placed, key=lambda core: (core.path, core.cpus))))


@given(trees())
def test_any_tree_has_candidates(tree: TopoTree) -> None:
    sets = core_sets(tree)
    check(tree, sets)
    assert sets == core_sets(tree)
    assert any(len(s.cpus) == s.threads == len(tree.cores) for s in sets) or len(tree.cores) == 1


@given(st.sets(st.integers(0, 300), min_size=1))
def test_ranges_read_back(cpus: set[int]) -> None:
    assert numbers(in_ranges(sorted(cpus))) == sorted(cpus)


def test_text_names_machine_and_candidates() -> None:
    tree = read_topology(of(ARM_SERVER))
    first, *lines = to_text(tree, core_sets(tree))
    assert first == "128 cores, 2 sockets, 4 NUMA nodes, 4 last-level caches of 32 cores"
    assert "  32 threads: all cores of one NUMA node, on CPU 0-31" in lines
