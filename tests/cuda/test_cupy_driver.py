"""The driver that works through CuPy, over a CUDA that keeps books: no GPU is needed."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest

from hetrun.backends.cuda.driver import Driver
from hetrun.errors import BackendError, BudgetError, DeviceLost
from tests.cuda.fake_cuda import ADDRESS, CONTEXT, INVALID, MEMORY, OUT, RUNTIME, FakeCuda, under_cupy_driver

MIB = 1 << 20


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def module(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with under_cupy_driver(cuda, monkeypatch) as found:
        yield found


def test_what_cuda_itself_takes_counts(cuda: FakeCuda, module: ModuleType) -> None:
    """Its context is made by the first call that needs it, which asking for free memory is as well."""
    driver = module.CupyDriver(0)
    assert driver.held_memory() == CONTEXT + module.LATER
    driver.allocate(10 * MIB)
    assert driver.held_memory() == CONTEXT + module.LATER + 10 * MIB
    assert driver.held_memory() + driver.free_memory() == MEMORY
    again = module.CupyDriver(0)
    assert again.held_memory() == CONTEXT + module.LATER, "there is one context, made once"


def test_it_says_what_the_device_is(module: ModuleType) -> None:
    device = module.CupyDriver(0).device
    assert (device.name, device.capability, device.processors) == ("A fake", (8, 6), 28)
    assert (device.memory, device.engines, device.shared) == (MEMORY, 1, 99 << 10)


def test_a_driver_that_is_too_old_is_an_error_in_words(cuda: FakeCuda, module: ModuleType) -> None:
    cuda.fails["getDeviceCount"] = 35
    with pytest.raises(BackendError, match="looking for GPUs: cudaError 35"):
        module.device_count()


def test_memory_that_is_not_there_is_a_memory_error(cuda: FakeCuda, module: ModuleType) -> None:
    driver = module.CupyDriver(0)
    with pytest.raises(MemoryError, match=r"A fake has no 2\.0 GiB left"):
        driver.allocate(2 << 30)


@pytest.mark.parametrize("status", [INVALID, OUT, 304])
def test_ram_that_cannot_be_page_locked_is_no_broken_gpu(
    cuda: FakeCuda, module: ModuleType, status: int
) -> None:
    driver = module.CupyDriver(0)
    cuda.fails |= {"hostAlloc": status, "hostRegister": status}
    with pytest.raises(BudgetError, match="20 MiB of RAM cannot be page-locked for A fake"):
        driver.pinned(20 * MIB)
    cuda.fails.clear()
    driver.pinned(MIB)


def test_memory_that_is_there_is_locked_where_cuda_gets_none(cuda: FakeCuda, module: ModuleType) -> None:
    driver = module.CupyDriver(0)
    cuda.fails["hostAlloc"] = 2
    found = driver.pinned(3 * MIB + 5)
    found[:] = 7
    assert len(found) == 3 * MIB + 5
    assert int(found.ctypes.data) in cuda.held["pinned"]
    del found
    gc.collect()
    assert not cuda.held["pinned"]


def test_everything_is_given_back(cuda: FakeCuda, module: ModuleType) -> None:
    """A model may be closed and opened again in one process, any number of times."""
    driver = module.CupyDriver(0)
    stream, events = driver.stream(), [driver.event(), driver.event(sleeps=True)]
    assert [cuda.flags[event] for event in events] == [2, 3]
    driver.load(b"a program")
    memory, pinned = driver.allocate(MIB), driver.pinned(MIB)
    driver.capture(stream)
    graph = driver.captured(stream)
    driver.forget(graph)
    driver.drop(events[0])
    driver.free(memory)
    driver.close()
    del pinned
    gc.collect()
    assert not any(cuda.held.values()), cuda.held


def test_the_device_tells_how_long_work_took(cuda: FakeCuda, module: ModuleType) -> None:
    driver = module.CupyDriver(0)
    stream, ran = driver.stream(), list[int]()
    assert driver.seconds(lambda: ran.append(cuda.calls.count("eventRecord")), stream) == 0.0005
    assert (ran, cuda.calls.count("eventRecord")) == ([1], 2)
    assert cuda.held["events"] == set()
    driver.close()


def test_memory_that_dies_while_a_graph_is_recorded_is_given_back_afterwards(
    cuda: FakeCuda, module: ModuleType
) -> None:
    driver = module.CupyDriver(0)
    stream, pinned = driver.stream(), driver.pinned(MIB)
    driver.capture(stream)
    del pinned
    gc.collect()
    assert len(cuda.held["pinned"]) == 1
    driver.captured(stream)
    assert not cuda.held["pinned"]


def test_a_recording_that_fails_ends(cuda: FakeCuda, module: ModuleType) -> None:
    driver = module.CupyDriver(0)
    stream, pinned = driver.stream(), driver.pinned(MIB)
    for failing in ("streamEndCapture", "graphInstantiate"):
        driver.capture(stream)
        cuda.fails[failing] = 901
        with pytest.raises(BackendError, match="recording a graph: cudaError 901"):
            driver.captured(stream)
        del cuda.fails[failing]
        cuda.recording = False
    assert not cuda.held["recorded"]
    del pinned
    gc.collect()
    assert not cuda.held["pinned"], "memory is given back at once again"


def test_after_an_illegal_access_it_raises_one_error_and_gives_back_in_silence(
    cuda: FakeCuda, module: ModuleType
) -> None:
    driver = module.CupyDriver(0)
    stream, event, memory, pinned = driver.stream(), driver.event(), driver.allocate(MIB), driver.pinned(MIB)
    cuda.broken = ADDRESS
    for _ in range(2):
        with pytest.raises(DeviceLost, match=r"A fake: computing: cudaError 700; only a new process"):
            driver.synchronize(event)
    made = len(cuda.calls)
    driver.drop(event)
    driver.forget(5)
    driver.free(memory)
    driver.close()
    assert len(cuda.calls) == made, "CUDA is not asked any more"
    del pinned
    gc.collect()
    with pytest.raises(DeviceLost):
        driver.record(event, stream)


def test_who_gives_back_may_be_the_first_to_notice(cuda: FakeCuda, module: ModuleType) -> None:
    driver = module.CupyDriver(0)
    event = driver.event()
    cuda.broken = ADDRESS
    driver.drop(event)
    with pytest.raises(DeviceLost, match="giving an event back"):
        driver.stream()


def test_an_error_that_passes_is_no_loss(cuda: FakeCuda, module: ModuleType) -> None:
    driver = module.CupyDriver(0)
    cuda.fails["streamCreateWithFlags"] = 2
    with pytest.raises(BackendError, match="making a stream"):
        driver.stream()
    del cuda.fails["streamCreateWithFlags"]
    driver.stream()


def test_a_thread_says_once_which_gpu_it_means(cuda: FakeCuda, module: ModuleType) -> None:
    one, other = module.CupyDriver(0), module.CupyDriver(1)
    cuda.calls.clear()

    def work(*drivers: Driver) -> list[str]:
        before = len(cuda.calls)
        for driver in drivers:
            driver.record(driver.event(), driver.stream())
        return [name for name in cuda.calls[before:] if name == "setDevice"]

    assert len(work(one, one, other, other, one)) == 3
    assert work(one) == []
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(work, one, one).result()) == 1
    cuda.fails["setDevice"] = INVALID
    with pytest.raises(BackendError, match="making an event: cudaError 1"):
        work(other)
    cuda.fails.clear()
    assert len(work(other)) == 1, "what failed is said again"


@pytest.mark.skipif(not importlib.util.find_spec("cupy_backends"), reason="CuPy is not installed")
def test_cupy_has_every_call() -> None:
    """Its bindings load without a driver."""
    from cupy_backends.cuda.api import driver, runtime

    assert [name for name in RUNTIME if not callable(getattr(runtime, name, None))] == []
    calls = ("moduleLoadData", "moduleUnload", "moduleGetFunction", "funcSetAttribute", "launchKernel")
    assert [name for name in calls if not callable(getattr(driver, name, None))] == []
