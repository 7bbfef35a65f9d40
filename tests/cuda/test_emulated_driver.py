"""The emulated GPU itself: who forgets to wait, or uses memory that is not there, is found out."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from hetrun.backends.cuda.driver import DeviceProduct, Event, Kernel, Launch, Stream
from hetrun.graph.quant import by_name
from tests.cuda.emulated.driver import CONTEXT, EmulatedDriver
from tests.cuda.emulated.kernels import EmulationError, needs_compiler

SEEDS = range(20)
N = 64  # bytes that are moved
KERNELS = """
#include "common.cuh"
extern "C" __global__ void set(byte *y, int at, int value) {
    if (threadIdx.x == 0) y[at] = value;
}
"""


class Desk:
    """A driver with two streams and some memory."""

    def __init__(self, seed: int = 0) -> None:
        self.driver = EmulatedDriver(seed=seed)
        self.one, self.other = self.driver.stream(), self.driver.stream()
        self.memory = self.driver.allocate(N)
        self.host = self.driver.pinned(N)
        self.host[:] = 0

    def fill(self, byte: int, stream: Stream) -> None:
        self.driver.fill(self.memory, byte, N, stream)

    def fetch(self, stream: Stream) -> None:
        self.driver.copy(self.host.ctypes.data, self.memory, N, stream)

    def recorded(self, stream: Stream) -> Event:
        event = self.driver.event()
        self.driver.record(event, stream)
        return event

    def finish(self, stream: Stream) -> None:
        self.driver.synchronize(self.recorded(stream))

    def found(self) -> np.ndarray:
        """What is in the memory once everything has run."""
        self.finish(self.one)
        self.finish(self.other)
        self.fetch(self.one)
        self.finish(self.one)
        return self.host.copy()


# --- streams and events


def test_nothing_runs_until_the_caller_waits() -> None:
    desk = Desk()
    desk.fill(1, desk.one)
    desk.fetch(desk.one)
    assert (desk.host == 0).all()
    desk.finish(desk.one)
    assert (desk.host == 1).all()


def test_one_stream_runs_in_order() -> None:
    for seed in SEEDS:
        desk = Desk(seed)
        for byte in range(5):
            desk.fill(byte, desk.one)
        assert (desk.found() == 4).all()


def filled_and_fetched(seed: int, waits: bool) -> np.ndarray:
    desk = Desk(seed)
    desk.fill(1, desk.one)
    event = desk.recorded(desk.one)
    if waits:
        desk.driver.wait(desk.other, event)
    desk.fetch(desk.other)
    desk.finish(desk.other)
    return desk.host


def test_a_missing_event_is_found() -> None:
    assert all((filled_and_fetched(seed, waits=True) == 1).all() for seed in SEEDS)
    found = {int(filled_and_fetched(seed, waits=False)[0]) for seed in SEEDS}
    assert found == {1, 0xFF}, "now and then it is fetched too early"


def test_a_missing_synchronize_is_found() -> None:
    seen = set()
    for seed in SEEDS:
        desk = Desk(seed)
        desk.fill(1, desk.one)
        event = desk.recorded(desk.one)
        desk.fetch(desk.one)
        desk.driver.synchronize(event)  # of what lies before the copy
        seen.add(int(desk.host[0]))
    assert seen == {0, 1}, "sometimes more is done than was asked for"


def test_a_buffer_that_is_used_again_too_early_is_found() -> None:
    """The host writes into page-locked memory that a copy still has to read."""
    found = set()
    for waits in (True, False):
        desk = Desk()
        desk.host[:] = 7
        desk.driver.copy(desk.memory, desk.host.ctypes.data, N, desk.one)
        if waits:
            desk.finish(desk.one)
        desk.host[:] = 9
        found.add((waits, int(desk.found()[0])))
    assert found == {(True, 7), (False, 9)}


def test_an_event_is_the_last_time_it_was_recorded() -> None:
    for seed in SEEDS:
        desk = Desk(seed)
        event = desk.recorded(desk.one)
        desk.fill(1, desk.one)
        desk.driver.record(event, desk.one)
        desk.driver.synchronize(event)
        desk.fetch(desk.other)
        desk.finish(desk.other)
        assert (desk.host == 1).all()


def test_who_waits_for_a_moment_does_not_see_a_later_one() -> None:
    """The same event is recorded again, by a stream with nothing to do: that is another moment."""
    for seed in SEEDS:
        desk = Desk(seed)
        desk.fill(1, desk.one)
        event = desk.recorded(desk.one)
        desk.driver.wait(desk.other, event)
        desk.driver.record(event, desk.driver.stream())
        desk.fetch(desk.other)
        desk.finish(desk.other)
        assert (desk.host == 1).all()


def test_an_event_that_was_not_recorded_has_happened() -> None:
    desk = Desk()
    event = desk.driver.event()
    desk.driver.synchronize(event)
    desk.driver.wait(desk.one, event)
    desk.fill(3, desk.one)
    assert (desk.found() == 3).all()


# --- memory


def test_memory_that_was_not_written_holds_no_numbers() -> None:
    desk = Desk()
    assert np.isnan(desk.found().view(np.float32)).all()
    assert np.isnan(desk.driver.pinned(64).view(np.float16)).all()
    assert desk.memory % 256 == 0


def test_memory_is_counted() -> None:
    driver = EmulatedDriver(CONTEXT + 1000)
    a, b = driver.allocate(600), driver.allocate(400)
    assert (driver.free_memory(), driver.held_memory()) == (0, CONTEXT + 1000)
    with pytest.raises(MemoryError, match="1 bytes are more than the 0"):
        driver.allocate(1)
    driver.free(a)
    assert (driver.free_memory(), driver.held_memory(), driver.most_allocated) == (600, CONTEXT + 400, 1000)
    with pytest.raises(AssertionError, match="not all memory was given back"):
        driver.close()
    driver.free(b)
    driver.close()
    assert driver.closed


def test_memory_that_was_given_back_holds_no_numbers() -> None:
    desk = Desk()
    desk.fill(0, desk.one)
    desk.finish(desk.one)
    desk.driver.free(desk.memory)
    assert ctypes.string_at(desk.memory, N) == b"\xff" * N
    with pytest.raises(AssertionError, match="neither the device's nor page-locked"):
        desk.fetch(desk.one)
    with pytest.raises(AssertionError):
        desk.fill(0, desk.one)


def test_work_on_memory_that_was_given_back_is_found() -> None:
    desk = Desk()
    desk.fill(0, desk.one)
    desk.driver.free(desk.memory)
    with pytest.raises(AssertionError, match="someone wrote to memory given back"):
        desk.driver.close()


@pytest.mark.parametrize("beside", [-1, N])
def test_writes_beside_memory_are_found(beside: int) -> None:
    desk = Desk()
    ctypes.memset(desk.memory + beside, 0, 1)
    with pytest.raises(AssertionError, match="written beside the memory"):
        desk.driver.free(desk.memory)


def test_copies_stay_in_memory_that_is_known() -> None:
    desk = Desk()
    ordinary = np.zeros(N, np.uint8)
    at = desk.host.ctypes.data
    for target, source, nbytes in [
        (desk.memory, ordinary.ctypes.data, N),
        (ordinary.ctypes.data, desk.memory, N),
        (desk.memory, at, N + 1),
        (desk.memory - 1, at, N),
        (desk.memory + 1, at, N),
    ]:
        with pytest.raises(AssertionError, match="neither the device's nor page-locked"):
            desk.driver.copy(target, source, nbytes, desk.one)
    desk.driver.copy(desk.memory + 8, at + 8, N - 8, desk.one)
    assert (desk.found()[8:] == 0).all()


# --- kernels, graphs, products


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("driver") / "kernels.cu"
    path.write_text(KERNELS)
    return str(path).encode()


def kernel(desk: Desk, program: bytes, shared: int = 0) -> Kernel:
    return desk.driver.kernel(desk.driver.load(program), "set", shared)


def setting(desk: Desk, which: Kernel, at: int, value: int) -> Launch:
    """memory[at] = value"""
    arguments = ctypes.c_void_p(desk.memory), ctypes.c_int(at), ctypes.c_int(value)
    return Launch(which, (1, 1, 1), 32, 0, arguments)


@needs_compiler
def test_arguments_are_read_when_a_kernel_is_launched(program: bytes) -> None:
    desk = Desk()
    desk.fill(0, desk.one)
    launch = setting(desk, kernel(desk, program), 5, 42)
    desk.driver.launch(launch, desk.one)
    for argument in launch.arguments[1:]:
        assert isinstance(argument, ctypes.c_int)
        argument.value = 6
    assert list(np.flatnonzero(desk.found())) == [5]
    assert desk.host[5] == 42
    assert desk.driver.launches == ["set"]


@needs_compiler
@pytest.mark.parametrize("at", [-1, N])
def test_a_kernel_that_writes_beside_memory_is_named(program: bytes, at: int) -> None:
    desk = Desk()
    desk.driver.launch(setting(desk, kernel(desk, program), at, 0), desk.one)
    with pytest.raises(AssertionError, match="set wrote beside memory"):
        desk.finish(desk.one)


@needs_compiler
def test_launches_that_no_gpu_takes(program: bytes) -> None:
    desk = Desk()
    which = kernel(desk, program, shared=100)
    pointer, zero = ctypes.c_void_p(desk.memory), ctypes.c_int(0)
    for grid, shared, what in [
        ((1, 1, 1), 101, "set was not to get 101 bytes"),
        ((1, 0, 1), 0, "set on no blocks"),
        ((1, 1 << 16, 1), 0, "set on too many blocks"),
        ((1, 1, 1 << 16), 0, "set on too many blocks"),
    ]:
        with pytest.raises(AssertionError, match=what):
            desk.driver.launch(Launch(which, grid, 32, shared, [pointer, zero, zero]), desk.one)
    desk.driver.launch(Launch(which, (1, 1, 1), 32, 0, [pointer, zero]), desk.one)
    with pytest.raises(EmulationError, match="takes arguments of p8 i4 i4 and was given p8 i4"):
        desk.finish(desk.one)


def test_a_graph_runs_as_often_as_it_is_replayed() -> None:
    desk = Desk()
    desk.host[:] = np.arange(N)
    desk.driver.capture(desk.one)
    desk.driver.copy(desk.memory, desk.host.ctypes.data, N, desk.one)
    graph = desk.driver.captured(desk.one)
    assert (desk.found() == 0xFF).all(), "so far it is only noted"
    for first in (7, 8):
        desk.host[:] = first
        desk.driver.replay(graph, desk.other)
        desk.fill(1, desk.other)
        desk.driver.copy(desk.memory + 1, desk.host.ctypes.data, N - 1, desk.other)
        desk.driver.replay(graph, desk.other)
        assert (desk.found() == first).all()
    assert desk.driver.replays == 4
    desk.driver.free(desk.memory)
    with pytest.raises(AssertionError, match="not all graphs were forgotten"):
        desk.driver.close()
    desk.driver.forget(graph)
    desk.driver.close()


def test_waiting_while_a_graph_is_captured_is_an_error() -> None:
    desk = Desk()
    event = desk.recorded(desk.one)
    desk.driver.capture(desk.one)
    with pytest.raises(AssertionError, match="events are no part of a graph"):
        desk.driver.record(event, desk.one)
    with pytest.raises(AssertionError, match="events are no part of a graph"):
        desk.driver.wait(desk.one, event)
    with pytest.raises(AssertionError, match="no one waits"):
        desk.driver.synchronize(event)


def given(desk: Desk, array: np.ndarray) -> tuple[int, np.ndarray]:
    """Device memory with a copy of an array, and page-locked memory with the same."""
    host = desk.driver.pinned(array.nbytes)
    host[:] = array.reshape(-1).view(np.uint8)
    address = desk.driver.allocate(array.nbytes)
    desk.driver.copy(address, host.ctypes.data, array.nbytes, desk.one)
    return address, host


@pytest.mark.parametrize("add", [False, True])
def test_products_are_of_bf16_and_summed_in_float32(add: bool) -> None:
    desk, rng, bf16 = Desk(), np.random.default_rng(2), by_name("BF16")
    rows, out, inner, ldc = 5, 7, 16, 9
    x, w, c = (rng.standard_normal(s, np.float32) for s in ((rows, inner), (out, inner), (rows, ldc)))
    (x_at, x_raw), (w_at, w_raw) = given(desk, bf16.quantise(x)), given(desk, bf16.quantise(w))
    c_at, c_raw = given(desk, c)
    product = DeviceProduct(x_at, w_at, c_at, rows, out, inner, ldc, add)
    with pytest.raises(AssertionError, match="nowhere to work"):
        desk.driver.multiply(product, desk.one)
    desk.driver.work_in(desk.driver.allocate(desk.driver.workspace), desk.one)
    for wrong in (replace(product, x=x_at + 2), replace(product, w=w_at + 2), replace(product, c=c_at + 12)):
        with pytest.raises(AssertionError, match="is not the device's"):
            desk.driver.multiply(wrong, desk.one)
    desk.driver.multiply(product, desk.one)
    desk.driver.copy(c_raw.ctypes.data, c_at, c.nbytes, desk.one)
    desk.finish(desk.one)
    near_x, near_w = (bf16.dequantise(raw, inner).astype(np.float64) for raw in (x_raw, w_raw))
    right = c.astype(np.float64)
    right[:, :out] = near_x @ near_w.T + (c[:, :out] if add else 0)
    found = c_raw.view(np.float32).reshape(rows, ldc)
    assert np.abs(found - right).max() < 1e-5
    assert (found[:, out:] == c[:, out:]).all()
