"""A few minutes that say whether a GPU works at all: every call of the driver, every kernel compiled and
loaded, copies, graphs, and what is left of CUDA after a kernel has read where nothing is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from statistics import median
from time import perf_counter

import numpy as np

from hetrun.backends.cuda.driver import DeviceProduct, Driver, Stream
from hetrun.backends.cuda.kernel_cache import KernelLibrary, at, long
from hetrun.backends.cuda.programs import Programs, Source
from hetrun.backends.cuda.stages import Portion, Work, give
from hetrun.errors import HetrunError
from tests.cuda.emulated.real import KERNELS
from tests.cuda.measured import gpu_memory
from tests.cuda.rows import Line, Table
from tests.cuda.sources import SOURCES, kernels_of, shared_of

COPIED = 256 << 20
NODES, REPLAYS = 1000, 20
SMALL = Source("small")
HIDDEN = 32 << 20  # bytes of CUDA's own that come later, as kernels are loaded lazily
BROKEN = """
from hetrun.backends.cuda.cupy_driver import CupyDriver
from hetrun.backends.cuda.kernel_cache import Library, at, long, number
from hetrun.backends.cuda.programs import Programs, Source
d = CupyDriver(0)
library, stream, done, other = Library(d, Programs(d.device.capability)), d.stream(), d.event(), d.event()
memory = d.allocate(1 << 20)
held = d.pinned(1 << 20)
d.launch(library.launch(Source("small"), "fetch_words", (1,), 256, at(64), at(memory), long(1024)), stream)
d.record(done, stream)
for name, call in (("synchronize", lambda: d.synchronize(done)), ("again", lambda: d.synchronize(done)),
                   ("stream", d.stream), ("copy", lambda: d.copy(memory, held.ctypes.data, 64, stream)),
                   ("drop", lambda: d.drop(other)), ("free", lambda: d.free(memory)), ("close", d.close)):
    try:
        call()
        print(f"{name}: works", flush=True)
    except Exception as e:
        print(f"{name}: {type(e).__name__} {e}", flush=True)
"""


def smoke(table: Table) -> None:
    """All of it; what fails is a line with a number that is not reached."""
    _context(table)
    _compiled(table)
    with gpu_memory(4 * COPIED) as memory:
        driver = memory.driver
        copies(table, driver, [memory.take(COPIED, "a copy") for _ in range(2)])
        graphs(table, driver, memory.computing, memory.take(COPIED, "numbers"))
    if table.has_time("a wild read"):
        _broken()


def _context(table: Table) -> None:
    from cupy_backends.cuda.api import runtime

    from hetrun.backends.cuda.cupy_driver import CupyDriver, free_bytes

    bus = runtime.deviceGetPCIBusId(0)
    before = free_bytes(bus) or 0
    driver = CupyDriver(0)
    print(
        f"{driver.device}; CUDA {runtime.runtimeGetVersion()}, driver {runtime.driverGetVersion()}",
        flush=True,
    )
    for name in ("asyncEngineCount", "sharedMemPerBlockOptin", "l2CacheSize", "pageableMemoryAccess"):
        print(f"{name}: {runtime.getDeviceProperties(0).get(name)}", flush=True)
    one = driver.allocate(64 << 20)
    held, taken = driver.held_memory(), before - driver.free_memory()
    what, counted = "memory that CUDA took beside what it is counted with", f"{held / 2**20:.0f} MiB counted"
    table.add(Line(what, "MiB", ((taken - held) / 2**20,), HIDDEN / 2**20, "most", note=counted))
    driver.free(one)
    driver.close()


def _compile(capability: tuple[int, int], source: Source) -> str:
    """What is wrong with it."""
    try:
        Programs(capability, KERNELS).program(source)
    except HetrunError as e:
        return f"{source}: {e}"
    return ""


def _load(driver: Driver, source: Source) -> str:
    try:
        loaded = driver.load(Programs(driver.device.capability, KERNELS).program(source))
        for name in kernels_of(source):
            driver.kernel(loaded, name, shared_of(source, name))
    except HetrunError as e:
        return f"{source}: {e}"
    return ""


def _compiled(table: Table) -> None:
    from hetrun.backends.cuda.cupy_driver import properties

    start = perf_counter()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        wrong = list(filter(None, pool.map(partial(_compile, properties(0).capability), SOURCES)))
    table.add(Line("seconds to compile every kernel", "s", (perf_counter() - start,)))
    table.add(Line("programs that do not compile", "", (len(wrong),), 0, "most"))
    with gpu_memory(COPIED) as memory:
        before = memory.driver.free_memory()
        lost = [said for source in SOURCES if (said := _load(memory.driver, source))]
        table.add(Line("programs that do not load", "", (len(lost),), 0, "most"))
        taken = before - memory.driver.free_memory()
        table.add(Line("memory that all of them take", "MiB", (taken / 2**20,)))
    for said in (*wrong, *lost):
        print(said[:2000], flush=True)


def copies(table: Table, driver: Driver, places: Sequence[int]) -> None:
    """How fast bytes cross the link, one way and both at once, and how long a small copy takes."""
    streams = driver.stream(), driver.stream()
    hosts = [driver.pinned(COPIED) for _ in range(2)]
    for host in hosts:
        host[:] = np.random.default_rng(0).integers(0, 256, COPIED, np.uint8)
    addresses = [int(host.ctypes.data) for host in hosts]

    def there(stream: Stream) -> None:
        driver.copy(places[0], addresses[0], COPIED, stream)

    def back(stream: Stream) -> None:
        driver.copy(addresses[1], places[1], COPIED, stream)

    both = _seconds(driver, streams, (there, back))
    for what, seconds in {
        "to the device": _seconds(driver, streams[:1], (there,)),
        "from the device": _seconds(driver, streams[:1], (back,)),
        "both ways at once, together": both / 2,
    }.items():
        table.add(Line(f"copies {what}", "GB/s", (COPIED / seconds / 1e9,)))
    for nbytes in (4096, 65536, 1 << 20):
        few = _seconds(driver, streams[:1], (partial(driver.copy, places[0], addresses[0], nbytes),))
        table.add(Line(f"a copy of {nbytes >> 10} KiB, with the wait", "µs", (1e6 * few,)))


def _seconds(driver: Driver, streams: Sequence[Stream], works: Sequence[Callable[[Stream], object]]) -> float:
    """The median of some times that work takes which streams do at once."""
    done, times = [driver.event() for _ in streams], list[float]()
    for _ in range(REPLAYS):
        start = perf_counter()
        for stream, work, event in zip(streams, works, done, strict=True):
            work(stream)
            driver.record(event, stream)
        for event in done:
            driver.synchronize(event)
        times.append(perf_counter() - start)
    for event in done:
        driver.drop(event)
    return median(times[1:])


def graphs(table: Table, driver: Driver, stream: Stream, place: int) -> None:
    """A product and small kernels, recorded and run again: the same numbers, and how long each takes."""
    library = library_of(driver)
    n, k, m = 64, 512, 256
    x, w, c, d = place, place + (1 << 20), place + (2 << 20), place + (3 << 20)
    host = driver.pinned(1 << 20)
    host.view(np.uint16)[:] = np.random.default_rng(1).integers(0x3F00, 0x3F80, host.size // 2)  # about one
    for target in (x, w):
        driver.copy(target, int(host.ctypes.data), host.size, stream)
    work: list[Work] = [
        DeviceProduct(x, w, c, n, m, k, m),
        library.launch(SMALL, "add", (64,), 256, at(c), at(c), at(d), long(n * m)),
    ]
    first, later = (
        _result(driver, stream, work, d, n * m, 0),
        _result(driver, stream, work, d, n * m, REPLAYS),
    )
    table.add(Line("numbers that differ in a graph", "", (int((first != later).sum()),), 0, "most"))
    numbers = host.view(np.uint16).astype(np.uint32) << 16
    rows = numbers.view(np.float32)
    right = 2 * rows[: n * k].reshape(n, k) @ rows[: m * k].reshape(m, k).T
    error = float(np.abs(first.reshape(n, m) - right).max() / np.abs(right).max())
    table.add(Line("a product of cuBLAS is off by", "of the largest", (error,), 1e-5, "most"))
    tiny = library.launch(SMALL, "add", (1,), 256, at(c), at(c), at(d), long(256))
    for count in (1, NODES):
        seconds = replayed(driver, stream, [tiny] * count)
        table.add(Line(f"a graph of {count} kernels in a chain, with the wait", "µs", (1e6 * seconds,)))
    direct = _seconds(driver, (stream,), (partial(give, driver, work=[tiny] * NODES),))
    table.add(Line(f"{NODES} kernels that are launched one by one", "µs", (1e6 * direct,)))


def library_of(driver: Driver) -> KernelLibrary:
    """The kernels of a device."""
    return KernelLibrary(driver, Programs(driver.device.capability, KERNELS))


def _result(
    driver: Driver, stream: Stream, work: Sequence[Work], place: int, n: int, replays: int
) -> np.ndarray:
    host, done = driver.pinned(4 * n), driver.event()
    if replays:
        replayed(driver, stream, work)
    else:
        give(driver, stream, work)
    driver.copy(int(host.ctypes.data), place, 4 * n, stream)
    driver.record(done, stream)
    driver.synchronize(done)
    return host.view(np.float32).copy()


def replayed(driver: Driver, stream: Stream, work: Sequence[Work]) -> float:
    """Seconds that recorded work takes, with the wait for it."""
    portion = Portion(work=list(work))
    for _ in range(2):  # what has run once is recorded
        portion.run(driver, stream)
    seconds = _seconds(driver, (stream,), (partial(portion.run, driver),))
    assert portion.graph is not None
    driver.forget(portion.graph)
    return seconds


def _broken() -> None:
    """What CUDA says to each call after a wild read: by a process of its own, as nothing mends it."""
    with suppress(subprocess.TimeoutExpired):
        ended = subprocess.run(
            [sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=60, check=False
        )
        print(
            f"after a wild read (exit {ended.returncode}):\n{ended.stdout[-1500:]}{ended.stderr[-800:]}",
            flush=True,
        )
