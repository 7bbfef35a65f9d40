"""How much memory there is: the machine's, or what a container may have of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from hetrun.system.cgroups import MemoryLimit, memory_limit
from hetrun.system.memory_info import available_memory, free_memory
from tests.support.sysfs import write

GIB = 1 << 30
NONE = "9223372036854771712"  # version 1 writes this where there is no limit


def lay_out(
    root: Path, version: int, group: str, files: Mapping[str, str], mounted: str = "/", free: int = 16 * GIB
) -> Path:
    """A machine with some free memory, and a group of processes with this one in it."""
    write(
        root / "proc/meminfo", f"MemTotal:  67108864 kB\nMemAvailable:   {free // 1024} kB\nBuffers: 0 kB\n"
    )
    base = root / "sys/fs/cgroup"
    if version == 2:
        write(root / "proc/self/cgroup", f"0::{group}\n")
        mounts = f"30 20 0:26 {mounted} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
    else:
        write(root / "proc/self/cgroup", f"9:memory:{group}\n4:cpu,cpuacct:/\n1:name=systemd:/\n0::/\n")
        mounts = f"35 31 0:32 {mounted} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        base = base / "memory"
    write(root / "proc/self/mountinfo", "1 0 8:1 / / rw shared:1 - ext4 /dev/root rw\n" + mounts)
    for name, text in files.items():
        write(base / name, text + "\n")
    return root


def version_1(folder: str, limit: int | str, used: int, cached: int = 0) -> dict[str, str]:
    """The files of a group, as kernels of that time write them."""
    stat = f"cache {cached}\nrss 4096\ninactive_file 0\nactive_file 77\ntotal_cache {cached}\n"
    return {
        f"{folder}memory.limit_in_bytes": str(limit),
        f"{folder}memory.usage_in_bytes": str(used),
        f"{folder}memory.stat": f"{stat}total_inactive_file {cached}\ntotal_active_file 77",
    }


def version_2(folder: str, limit: int | str, used: int, cached: int = 0, high: str = "max") -> dict[str, str]:
    """The same of today's kernels."""
    return {
        f"{folder}memory.max": str(limit),
        f"{folder}memory.high": high,
        f"{folder}memory.current": str(used),
        f"{folder}memory.stat": f"anon 4096\nfile {cached}\ninactive_file {cached}\nactive_file 7",
    }


CASES = {
    "docker, version 2, namespace of its own": (2, "/", version_2("", 2 * GIB, GIB), "/"),
    "docker, version 1, its group mounted": (1, "/docker/a1", version_1("", 2 * GIB, GIB), "/docker/a1"),
    "version 1, the whole tree is seen": (
        1,
        "/docker/a1",
        version_1("docker/a1/", 2 * GIB, GIB) | version_1("", NONE, 9 * GIB),
        "/",
    ),
    "a pod has the limit, not the container": (
        2,
        "/pod/one",
        version_2("pod/one/", "max", GIB // 2) | version_2("pod/", 2 * GIB, GIB),
        "/",
    ),
    "the pod's neighbours take more": (
        2,
        "/pod/one",
        version_2("pod/one/", 2 * GIB, GIB // 4) | version_2("pod/", 2 * GIB, GIB),
        "/",
    ),
    "files that nobody misses are no use of memory": (2, "/", version_2("", 2 * GIB, 2 * GIB, GIB), "/"),
    "the same, version 1": (1, "/a", version_1("a/", 2 * GIB, 2 * GIB, GIB), "/"),
    "slowed before it is killed": (2, "/", version_2("", 8 * GIB, GIB, high=str(2 * GIB)), "/"),
}


@pytest.mark.parametrize(("version", "group", "files", "mounted"), CASES.values(), ids=CASES)
def test_a_container_has_what_is_left_of_its_limit(
    tmp_path: Path, version: int, group: str, files: Mapping[str, str], mounted: str
) -> None:
    free = free_memory(lay_out(tmp_path, version, group, files, mounted))
    assert free.nbytes == GIB
    assert free.of == "the container's limit of 2.0 GiB"


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (2, {}),  # the root of all groups has no such files
        (2, version_2("", "max", GIB)),
        (1, version_1("", NONE, GIB)),
        (1, {"memory.limit_in_bytes": NONE}),
        (2, version_2("", 40 * GIB, 0)),  # more than the machine has left
    ],
)
def test_without_a_limit_or_with_a_large_one_it_is_what_the_machine_has(
    tmp_path: Path, version: int, files: Mapping[str, str]
) -> None:
    free = free_memory(lay_out(tmp_path, version, "/", files))
    assert (free.nbytes, free.limit) == (16 * GIB, None)
    assert free.of == "the machine's memory"


def test_a_machine_that_has_less_than_the_container_may_take(tmp_path: Path) -> None:
    free = free_memory(lay_out(tmp_path, 2, "/", version_2("", 4 * GIB, GIB), free=GIB))
    assert (free.nbytes, free.limit) == (GIB, None)


def test_version_1_and_2_side_by_side(tmp_path: Path) -> None:
    """systemd's hybrid: the second tree is there, and limits are in the first."""
    lay_out(tmp_path, 1, "/a", version_1("a/", 2 * GIB, GIB))
    with (tmp_path / "proc/self/mountinfo").open("a") as mounts:
        mounts.write("41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")
    write(tmp_path / "sys/fs/cgroup/unified/cgroup.procs", "1\n")
    assert free_memory(tmp_path).nbytes == GIB


def test_a_group_above_its_limit_has_nothing_left() -> None:
    assert MemoryLimit(GIB, 2 * GIB).left == 0


SAYS = st.one_of(
    st.sampled_from(["", "-1", "0", "max", "4096", "1 0", "9" * 18, "9" * 400, "0x10", "12K", "nan", NONE]),
    st.text(max_size=20),
    st.none(),  # a folder of that name
)
NAMES = [
    *(f"sys/fs/cgroup/memory.{name}" for name in ("max", "high", "current", "stat", "limit_in_bytes")),
    "proc/meminfo",
    "proc/self/cgroup",
    "proc/self/mountinfo",
]


@given(files=st.dictionaries(st.sampled_from(NAMES), SAYS, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_files_say_there_is_an_answer(
    tmp_path_factory: pytest.TempPathFactory, files: Mapping[str, str | None]
) -> None:
    root = lay_out(tmp_path_factory.mktemp("root"), 2, "/", {})
    for name, text in files.items():
        path = root / name
        path.unlink(missing_ok=True)
        if text is None:
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("utf-8", "replace"))
    assert free_memory(root).nbytes >= 0


# --- the kernel itself

MOUNT = Path("/sys/fs/cgroup/memory")
ASK = """
import os, sys
sys.stdin.readline()
from hetrun.system.memory_info import free_memory
free = free_memory()
print(free.nbytes, free.limit)
held = bytearray(32 << 20)
held[::4096] = b"x" * len(held[::4096])
print(free_memory().nbytes)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A group of version 1 and one inside of it, which has no limit of its own."""
    outer = MOUNT / f"hetrun-test-{os.getpid()}"
    try:
        (outer / "inner").mkdir(parents=True)
        (outer / "memory.limit_in_bytes").write_text(str(256 << 20))
    except OSError as error:
        pytest.skip(f"no groups of version 1 can be made here: {error.strerror}")
    yield outer
    for folder in (outer / "inner", outer):
        folder.rmdir()


def test_what_the_kernel_says(group: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ASK], stdin=-1, stdout=-1, text=True)
    try:
        (group / "inner/cgroup.procs").write_text(str(child.pid))
        said = child.communicate("go\n", timeout=30)[0].split()
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 0
    before, limit, after = map(int, said)
    assert limit == 256 << 20
    assert 128 << 20 < before < 256 << 20
    assert 30 << 20 < before - after < 40 << 20


def test_no_more_than_the_machine_has() -> None:
    limit = memory_limit()
    assert limit is None or available_memory() <= limit.limit
