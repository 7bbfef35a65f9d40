"""The files that Linux writes about a machine's CPUs, laid out from a short description.

`MACHINES` are real ones, described by what published recordings of their files say. The files are written as
those machines' kernels write them: which exist, in which form, and with which oddities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from tests.support.folders import lasting_folder


@dataclass(frozen=True)
class Described:
    """A machine. CPUs are lists as "0-2,48-50"; what is empty has no file."""

    name: str
    source: str
    cpus: str
    sockets: dict[int, str]
    nodes: dict[int, str] = field(default_factory=dict)
    cores: Sequence[str] = ()  # those with several hardware threads; the others are alone
    level2: Sequence[str] = ()
    level3: Sequence[str] = ()
    level3_size: str = ""
    speeds: dict[str, dict[str, int]] = field(default_factory=dict)  # file -> CPUs -> what it says
    form: Literal["list", "mask"] = "list"  # of lists of CPUs: old kernels write only bits
    ends: str = "\n"  # behind each line


def pairs(first: range, further: int) -> list[str]:
    """Cores with two hardware threads, the second so much further."""
    return [f"{cpu},{cpu + further}" for cpu in first]


# One package of 6 fast cores with two threads and 8 slow ones, which share second-level caches by four.
# Two of the fast cores may go a little faster than the others, and are of the same kind.
LAPTOP = Described(
    "Core i7-1370P (Raptor Lake) in a laptop",
    "hwloc, tests/hwloc/linux/20em64t-hybrid-1p6c2t+2ca4co1t",
    "0-19",
    {0: "0-19"},
    {0: "0-19"},
    [f"{n}-{n + 1}" for n in range(0, 12, 2)],
    [*[f"{n}-{n + 1}" for n in range(0, 12, 2)], "12-15", "16-19"],
    ["0-19"],
    "24576K",
    {
        "cpufreq/cpuinfo_max_freq": {"0-3,6-7,10-11": 5000000, "4-5,8-9": 5200000, "12-19": 3900000},
        "cpufreq/base_frequency": {"0-11": 1900000, "12-19": 1400000},
    },
)

# Numbers go round the sockets. Each socket is two NUMA nodes, whose cores share one cache by its own words.
XEON = Described(
    "two Xeon Gold 6230 (Cascade Lake), two NUMA nodes in each",
    "hwloc, tests/hwloc/linux/memorysidecaches",
    "0-79",
    {n: ",".join(map(str, range(n, 80, 2))) for n in range(2)},
    {n: ",".join(map(str, range(n, 80, 4))) for n in range(4)},
    pairs(range(40), 40),
    pairs(range(40), 40),
    [",".join(map(str, range(n, 80, 2))) for n in range(2)],
    "28160K",
)

# 16 caches of three cores; the kernel of the recording wrote the CPUs of a node as bits.
EPYC = Described(
    "two EPYC 7451 (Naples)",
    "util-linux, tests/ts/lscpu/dumps/x86_64-epyc_7451",
    "0-95",
    {0: "0-23,48-71", 1: "24-47,72-95"},
    {n: f"{6 * n}-{6 * n + 5},{48 + 6 * n}-{48 + 6 * n + 5}" for n in range(8)},
    pairs(range(48), 48),
    pairs(range(48), 48),
    [f"{n}-{n + 2},{n + 48}-{n + 50}" for n in range(0, 48, 3)],
    "8192K",
    {"cpufreq/cpuinfo_max_freq": {"0-95": 2300000}},
    "mask",
)

# Five slow and five fast cores on each of two caches of different sizes; the fast ones are not quite alike.
GB10 = Described(
    "NVIDIA GB10 (10 Cortex-X925, 10 Cortex-A725)",
    "hwloc, tests/hwloc/linux/nvidia-dgx-gb10",
    "0-19",
    {36: "0-19"},
    {0: "0-19"},
    level2=[str(n) for n in range(20)],
    level3=["0-9", "10-19"],
    level3_size="16384K",
    speeds={"cpu_capacity": {"0-4": 718, "5-9": 997, "10-14": 731, "15-18": 1017, "19": 1024}},
)

# The kernel calls each kind of cores a package, and there are no nodes.
PHONE = Described(
    "a phone with Cortex-X3, A715, A710 and A510",
    "util-linux, tests/ts/lscpu/dumps/arm-A510-A710-A715-X3",
    "0-7",
    {0: "0-2", 1: "3-6", 2: "7"},
    level2=["0", "1-2", "3", "4", "5", "6", "7"],
    level3=["0-7"],
    speeds={"cpu_capacity": {"0-2": 280, "3-6": 855, "7": 1024}},
)

# Its firmware numbers packages strangely, and its kernel ends lines with a NUL.
ARM_SERVER = Described(
    "an arm64 server with two sockets of 64 cores",
    "hwloc, tests/hwloc/linux/128arm-2pa2n8cluster4co",
    "0-127",
    {36: "0-63", 8442: "64-127"},
    {n: f"{32 * n}-{32 * n + 31}" for n in range(4)},
    level2=[str(n) for n in range(128)],
    level3=[f"{n}-{n + 31}" for n in range(0, 128, 32)],
    level3_size="32768K",
    speeds={"cpu_capacity": {"0-127": 1024}},
    ends="\n\0",
)

MACHINES = (LAPTOP, XEON, EPYC, GB10, PHONE, ARM_SERVER)


def numbers(text: str) -> list[int]:
    """The CPUs of a list."""
    ends = [part.split("-") for part in text.split(",")]
    return [cpu for first, *last in ends for cpu in range(int(first), int((last or [first])[0]) + 1)]


@cache
def _set(text: str) -> frozenset[int]:
    return frozenset(numbers(text))


_laid_out: dict[str, Path] = {}


def of(machine: Described) -> Path:
    """A root with its files, which are written once and are there for all who only read."""
    if machine.name not in _laid_out:
        _laid_out[machine.name] = lay_out(lasting_folder(), machine)
    return _laid_out[machine.name]


def lend(root: Path, machine: Described) -> Path:
    """Have the files that are there for all under this root too, beside others of its own."""
    (root / "sys").mkdir(exist_ok=True)
    (root / "sys/devices").symlink_to(of(machine) / "sys/devices")
    return root


def lay_out(root: Path, machine: Described) -> Path:
    """Write the files, and give the root back."""
    system = root / "sys/devices/system"
    write(system / "cpu/online", machine.cpus + machine.ends)
    for cpu in numbers(machine.cpus):
        folder = system / f"cpu/cpu{cpu}"
        core = next((c for c in machine.cores if cpu in _set(c)), str(cpu))
        _write_cpus(machine, folder / "topology/thread_siblings", core)
        if machine.form == "list":
            _write_cpus(machine, folder / "topology/core_cpus", core)
        socket = next(n for n, cpus in machine.sockets.items() if cpu in _set(cpus))
        write(folder / "topology/physical_package_id", f"{socket}{machine.ends}")
        _write_caches(machine, folder / "cache", cpu)
        for name, said in machine.speeds.items():
            value = next(value for cpus, value in said.items() if cpu in _set(cpus))
            write(folder / name, f"{value}\n")
    for node, cpus in machine.nodes.items():
        _write_cpus(machine, system / f"node/node{node}/cpu", cpus, "list", "map")
    return root


def _write_caches(machine: Described, folder: Path, cpu: int) -> None:
    levels = [(1, "Data", [str(cpu)], "32K"), (1, "Instruction", [str(cpu)], "32K")]
    levels += [(2, "Unified", list(machine.level2), "512K")] if machine.level2 else []
    levels += [(3, "Unified", list(machine.level3), machine.level3_size)] if machine.level3 else []
    for at, (level, kind, groups, size) in enumerate(levels):
        write(folder / f"index{at}/level", f"{level}\n")
        write(folder / f"index{at}/type", f"{kind}\n")
        if size:
            write(folder / f"index{at}/size", f"{size}\n")
        cpus = next(group for group in groups if cpu in _set(group))
        _write_cpus(machine, folder / f"index{at}/shared_cpu", cpus, "_list", "_map")


def _write_cpus(machine: Described, path: Path, cpus: str, as_list: str = "_list", as_mask: str = "") -> None:
    if machine.form == "list":
        write(path.with_name(path.name + as_list), cpus + machine.ends)
    bits = sum(1 << cpu for cpu in _set(cpus))
    words = 1 + max(_set(machine.cpus)) // 32
    text = ",".join(f"{bits >> 32 * at & 0xFFFFFFFF:08x}" for at in reversed(range(words)))
    write(path.with_name(path.name + as_mask), text + machine.ends)


def write(path: Path, text: str) -> None:
    """A file, and the folders above it."""
    try:
        path.write_text(text)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
