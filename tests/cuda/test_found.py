"""Which GPUs there are: names without asking the driver, and its own word for each."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_int
from pathlib import Path
from typing import Protocol

import pytest

from hetrun.backend import Available, Probe, Unavailable
from hetrun.backends import cuda


class Reference(Protocol):
    """What `ctypes.byref` gives."""

    _obj: c_int


class FakeDriver:
    """A driver that knows of some GPUs: their names, and what they can do."""

    def __init__(self, *gpus: tuple[str, int, int], status: int = 0) -> None:
        self._gpus, self._status = gpus, status

    def cuInit(self, flags: int) -> int:
        return self._status

    def cuDeviceGetCount(self, count: Reference) -> int:
        count._obj.value = len(self._gpus)
        return 0

    def cuDeviceGet(self, device: Reference, number: int) -> int:
        device._obj.value = 100 + number  # a handle, not the number
        return 0

    def cuDeviceGetName(self, name: ctypes.Array[ctypes.c_char], size: int, device: c_int) -> int:
        name.value = self._gpus[device.value - 100][0].encode()
        return 0

    def cuDeviceGetAttribute(self, value: Reference, attribute: int, device: c_int) -> int:
        _, major, minor = self._gpus[device.value - 100]
        value._obj.value = {cuda.MAJOR: major, cuda.MINOR: minor}[attribute]
        return 0


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(cuda, "FILES", str(tmp_path))
    cuda.descriptors.cache_clear()
    yield tmp_path
    cuda.descriptors.cache_clear()


def probes(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, found: bool = True) -> list[Probe]:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if found else None)
    return [d.probe() for d in cuda.descriptors()]


def test_there_is_one_for_each_file_of_a_gpu(files: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "nvme0", "null"):
        (files / name).touch()
    assert [d.name for d in cuda.descriptors()] == ["cuda", "cuda-1", "cuda-2"]
    assert all(d.by_name for d in cuda.descriptors())


def test_without_any_there_is_one_that_says_why(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.rmdir()
    (descriptor,) = cuda.descriptors()
    monkeypatch.setattr(cuda, "DRIVER", "no-such-library.so.1")
    found = descriptor.probe()
    assert isinstance(found, Unavailable)
    assert found.reason.startswith(
        "there is no NVIDIA driver (no-such-library.so.1): if there is an NVIDIA GPU, install its driver"
    )


def test_each_gpu_speaks_for_itself(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3):
        (files / f"nvidia{n}").touch()
    assert probes(monkeypatch, FakeDriver(("An old one", 7, 5), ("A new one", 9, 0))) == [
        Unavailable("An old one has compute capability 7.5, but at least 8.0 is needed"),
        Available("A new one, compute capability 9.0"),
        Unavailable("the NVIDIA driver finds no GPU 2, only 2; CUDA_VISIBLE_DEVICES may hide it"),
    ]


@pytest.mark.parametrize(
    ("driver", "installed", "said"),
    [
        (FakeDriver(status=100), True, "the NVIDIA driver does not start (cuInit says 100): is there a GPU?"),
        (FakeDriver(), True, "the NVIDIA driver finds no GPU; CUDA_VISIBLE_DEVICES may hide it"),
        (
            FakeDriver(("One", 9, 0)),
            False,
            "CuPy is not installed: pip install cupy-cuda13x cuda-pathfinder nvidia-cuda-nvrtc "
            "nvidia-cuda-runtime nvidia-cuda-crt nvidia-cublas",
        ),
    ],
)
def test_what_is_missing_is_said(
    files: Path, monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, installed: bool, said: str
) -> None:
    assert probes(monkeypatch, driver, installed) == [Unavailable(said)]


def test_a_backend_has_the_name_of_its_gpu(files: Path) -> None:
    (files / "nvidia0").touch()
    (files / "nvidia1").touch()
    assert [d.create().name for d in cuda.descriptors()] == ["cuda", "cuda-1"]
