"""The tree of a machine: real ones as their kernels describe them, containers, files that say nonsense."""

from __future__ import annotations

import os
import re
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetrun.system.cpu_topology import LEVELS, TopoTree, physical_cores, read_topology, this_machine
from tests.support.sysfs import (
    ARM_SERVER,
    EPYC,
    GB10,
    LAPTOP,
    PHONE,
    XEON,
    Described,
    lay_out,
    lend,
    of,
    write,
)

# hwloc's own tests (tests/hwloc/linux of its sources): recordings of machines, and what hwloc says of each.
RECORDINGS = os.environ.get("TESTS_RECORDINGS")


def shape(tree: TopoTree) -> dict[str, int]:
    """How many there are of everything."""
    groups = {level: len(tree.groups(level)) for level in LEVELS}
    return groups | {"core": len(tree.cores), "cpu": len(tree.cpus), "kind": tree.kinds}


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (LAPTOP, (1, 1, 1, 8, 14, 20, 2)),
        (XEON, (2, 4, 4, 40, 40, 80, 1)),
        (EPYC, (2, 8, 16, 48, 48, 96, 1)),
        (GB10, (1, 1, 2, 20, 20, 20, 2)),
        (PHONE, (1, 1, 1, 7, 8, 8, 3)),
        (ARM_SERVER, (2, 4, 4, 128, 128, 128, 1)),
    ],
    ids=lambda x: x.name if isinstance(x, Described) else "",
)
def test_real_machines(machine: Described, expected: tuple[int, ...]) -> None:
    tree = read_topology(of(machine))
    assert tree == read_topology(of(machine))
    assert tuple(shape(tree).values()) == expected
    assert physical_cores(of(machine)) == len(tree.cores)


def test_who_is_slow_and_who_only_favoured() -> None:
    tree = read_topology(of(LAPTOP))
    assert [core.cpus for core in tree.cores if core.kind == 0] == [(n, n + 1) for n in range(0, 12, 2)]
    assert [core.cpus for core in tree.cores if core.kind == 1] == [(n,) for n in range(12, 20)]
    assert "14 cores (6 fast, 8 slow), 20 hardware threads" in tree.to_text()


def test_what_the_system_calls_efficient_is_slower_whatever_its_clock(tmp_path: Path) -> None:
    lay_out(tmp_path, LAPTOP)
    for cpu in range(20):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq", "4000000\n")
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/base_frequency", "2000000\n")
    assert read_topology(tmp_path).kinds == 1
    write(tmp_path / "sys/devices/cpu_atom/cpus", "12-19\n")
    assert [core.kind for core in read_topology(tmp_path).cores] == [0] * 6 + [1] * 8


def test_a_cache_that_spans_two_nodes_is_cut_by_them() -> None:
    tree = read_topology(of(XEON))
    assert set(tree.groups("cache")) == set(tree.groups("node"))
    assert [core.cpus for core in tree.groups("node")[2]] == [(n, n + 40) for n in range(2, 40, 4)]


def test_packages_that_share_a_cache_are_one_socket() -> None:
    tree = read_topology(of(PHONE))
    assert len(tree.groups("socket")) == 1
    assert [core.kind for core in tree.cores] == [2, 2, 2, 1, 1, 1, 1, 0]


def test_only_what_is_allowed_is_there() -> None:
    tree = read_topology(of(EPYC), {0, 48, 1, 24, 200})
    assert [core.cpus for core in tree.cores] == [(0, 48), (1,), (24,)]
    assert shape(tree)["socket"] == 2
    assert read_topology(of(EPYC), {300}).cpus == (300,)  # the mask is the kernel's last word


def test_offline_cpus_are_left_out(tmp_path: Path) -> None:
    lay_out(tmp_path, LAPTOP)
    write(tmp_path / "sys/devices/system/cpu/online", "0-9,11-16,18\n")
    tree = read_topology(tmp_path)
    assert tree.cpus == (*range(10), *range(11, 17), 18)
    assert (11,) in [core.cpus for core in tree.cores]


def test_old_kernels_say_so_cpu_by_cpu(tmp_path: Path) -> None:
    lay_out(tmp_path, PHONE)
    (tmp_path / "sys/devices/system/cpu/online").unlink()
    write(tmp_path / "sys/devices/system/cpu/cpu3/online", "0\n")
    assert read_topology(tmp_path).cpus == (0, 1, 2, 4, 5, 6, 7)


# --- containers


def group_files(root: Path, version: int, group: str, files: Mapping[str, str], mounted: str = "/") -> None:
    """A group of processes, with this process in it."""
    if version == 2:
        write(root / "proc/self/cgroup", f"0::{group}\n")
        mounts = f"30 20 0:26 {mounted} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
        base = root / "sys/fs/cgroup"
    else:
        write(root / "proc/self/cgroup", f"4:cpu,cpuacct:{group}\n3:cpuset:{group}\n1:name=systemd:/\n")
        mounts = f"30 20 0:26 {mounted} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        base = root / "sys/fs/cgroup/cpu,cpuacct"
    write(root / "proc/self/mountinfo", "1 0 8:1 / / rw shared:1 - ext4 /dev/root rw\n" + mounts)
    for name, text in files.items():
        write(base / name, text + "\n")


@pytest.mark.parametrize(
    ("version", "group", "files", "mounted"),
    [
        (2, "/", {"cpu.max": "200000 100000"}, "/"),
        (2, "/pod/one", {"pod/one/cpu.max": "max 100000", "pod/cpu.max": "200000 100000"}, "/"),
        (2, "/pod/one", {"cpu.max": "150000 100000"}, "/pod/one"),  # one CPU and a half: two threads share it
        (
            1,
            "/docker/a",
            {"docker/a/cpu.cfs_quota_us": "200000", "docker/a/cpu.cfs_period_us": "100000"},
            "/",
        ),
        (1, "/docker/a", {"cpu.cfs_quota_us": "20000", "cpu.cfs_period_us": "10000"}, "/docker/a"),
    ],
)
def test_a_quota_is_a_number_of_threads(
    tmp_path: Path, version: int, group: str, files: Mapping[str, str], mounted: str
) -> None:
    group_files(tmp_path, version, group, files, mounted)
    tree = read_topology(lend(tmp_path, LAPTOP))
    assert tree.threads == 2
    assert len(tree.cpus) == 20
    assert "time for 2 threads" in tree.to_text()


@pytest.mark.parametrize("files", [{"cpu.max": "max 100000"}, {"cpu.max": "20000000 100000"}, {}])
def test_no_quota_or_a_large_one_changes_nothing(tmp_path: Path, files: Mapping[str, str]) -> None:
    group_files(tmp_path, 2, "/", files)
    assert read_topology(lend(tmp_path, LAPTOP)).threads == 20


def test_a_quota_below_one_cpu_is_one_thread(tmp_path: Path) -> None:
    group_files(tmp_path, 2, "/", {"cpu.max": "1000 100000"})
    assert read_topology(lend(tmp_path, LAPTOP)).threads == 1


def test_a_set_of_cpus_is_kept_to(tmp_path: Path) -> None:
    group_files(tmp_path, 2, "/pod", {"pod/cpuset.cpus.effective": "10-13", "cpuset.cpus.effective": "0-19"})
    tree = read_topology(lend(tmp_path, LAPTOP))
    assert [core.cpus for core in tree.cores] == [(10, 11), (12,), (13,)]


# --- nothing, or nonsense


def test_no_files_at_all(tmp_path: Path) -> None:
    assert physical_cores(tmp_path) is None
    assert read_topology(tmp_path).cpus == (0,)
    assert read_topology(tmp_path, {3, 5}).to_text() == "2 cores, 1 socket, 1 NUMA node"


def test_this_machine_is_described() -> None:
    tree = this_machine()
    assert set(tree.cpus) <= os.sched_getaffinity(0)
    assert 1 <= tree.threads <= len(tree.cpus)


NAMES = [
    "cpu/online",
    "cpu/cpu0/topology/core_cpus_list",
    "cpu/cpu1/topology/thread_siblings",
    "cpu/cpu0/topology/physical_package_id",
    "cpu/cpu2/topology/physical_package_id",
    "cpu/cpu0/cache/index2/level",
    "cpu/cpu0/cache/index2/shared_cpu_list",
    "cpu/cpu1/cache/index3/level",
    "cpu/cpu1/cache/index3/shared_cpu_map",
    "cpu/cpu1/cpu_capacity",
    "cpu/cpu2/cpufreq/cpuinfo_max_freq",
    "node/node0/cpulist",
    "node/node1/cpulist",
    "../../fs/cgroup/cpu.max",
    "../../../proc/self/cgroup",
    "../../../proc/self/mountinfo",
]
SAYS = st.one_of(
    st.sampled_from(
        ["", "-1", "0", "0-3", "1-2", "2", "3-1", "0-99999999999", "max 0", "1 0", "nan", "9" * 400, "f,f"]
    ),
    st.text(max_size=20),
    st.none(),  # a folder of that name
)


@given(files=st.dictionaries(st.sampled_from(NAMES), SAYS, max_size=8), allowed=st.sets(st.integers(0, 5)))
def test_whatever_files_say_each_cpu_is_somewhere_once(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, str | None], allowed: set[int]
) -> None:
    root = tmp_path_factory.mktemp("odd")
    for name, text in files.items():
        path = root / "sys/devices/system" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.mkdir()
        else:
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
    tree = read_topology(root, allowed or None)
    if allowed:
        assert set(tree.cpus) <= allowed
    for level in LEVELS:
        assert Counter(cpu for g in tree.groups(level) for core in g for cpu in core.cpus) == Counter(
            tree.cpus
        )
    assert 1 <= tree.threads <= len(tree.cpus)
    assert tree.to_text()
    assert tree.to_json()["cpus"] == list(tree.cpus)


def test_pipes_and_endless_files_are_not_waited_for(tmp_path: Path) -> None:
    lay_out(tmp_path, PHONE)
    online = tmp_path / "sys/devices/system/cpu/online"
    online.unlink()
    os.mkfifo(online)
    (tmp_path / "sys/devices/system/node").symlink_to("/dev/zero")
    assert len(read_topology(tmp_path).cores) == 8


# --- whole recordings, where they are installed


@pytest.mark.skipif(not RECORDINGS, reason="TESTS_RECORDINGS names no folder with hwloc's recordings")
def test_recordings_have_the_cores_that_hwloc_finds(tmp_path: Path) -> None:
    seen = []
    for expected in sorted(Path(RECORDINGS or "").glob("*.console")):
        recording = expected.with_name(expected.stem + ".tar.bz2")
        said = Counter(re.findall(r"^ *(Core|PU) L#", expected.read_text(), re.M))
        # Some are about a group that the process was in, in a form of long ago.
        if not recording.exists() or "cpuset" in expected.name or not said["Core"]:
            continue
        with tarfile.open(recording) as files:
            files.extractall(tmp_path, filter="fully_trusted")
            top = tmp_path / files.getnames()[0].split("/")[0]
        found = shape(read_topology(top))
        assert (found["core"], found["cpu"]) == (said["Core"], said["PU"]), recording.name
        seen.append(recording.name)
    assert len(seen) > 10
