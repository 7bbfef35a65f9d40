"""Which GPUs there are: names without asking the driver, and its own word for each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import c_int
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import ClassVar, Protocol

import pytest

from hetrun.backend import Available, Probe, Unavailable
from hetrun.backends import cuda
from hetrun.backends.cuda import nvrtc
from hetrun.errors import BackendUnavailable


class Reference(Protocol):
    """What `ctypes.byref` gives."""

    _obj: c_int


class FakeDriver:
    """A driver that knows of some GPUs: their names, and what they can do."""

    def __init__(self, *gpus: tuple[str, int, int], status: int = 0, version: int = 13000) -> None:
        self._gpus, self._status, self._version = gpus, status, version

    def cuInit(self, flags: int) -> int:
        return self._status

    def cuDriverGetVersion(self, version: Reference) -> int:
        version._obj.value = self._version
        return 0

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


class Compiling:
    """NVRTC, which compiles nothing, or says what is missing."""

    compiled: ClassVar[list[tuple[str, list[str]]]] = []
    missing = ""

    def architecture(self, capability: tuple[int, int]) -> str:
        return f"--gpu-architecture=sm_{capability[0]}{capability[1]}"

    def compile(self, name: str, text: str, folder: Path, options: list[str]) -> None:
        if self.missing:
            raise BackendUnavailable(self.missing)
        self.compiled.append((name, options))


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
            "nvidia-cuda-runtime nvidia-cublas",
        ),
    ],
)
def test_what_is_missing_is_said(
    files: Path, monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, installed: bool, said: str
) -> None:
    assert probes(monkeypatch, driver, installed) == [Unavailable(said)]


@pytest.mark.parametrize(
    ("version", "made_for", "installed", "said"),
    [
        (
            12040,
            13,
            True,
            "the NVIDIA driver can run CUDA 12.4 at most, and cupy-cuda13x needs CUDA 13: install driver 580 "
            "or newer, or pip uninstall cupy-cuda13x, then pip install cupy-cuda12x cuda-pathfinder "
            "nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12 nvidia-cublas-cu12",
        ),
        (
            11080,
            12,
            False,
            "the NVIDIA driver can run CUDA 11.8 at most, and at least CUDA 12 is needed: install driver 525 "
            "or newer",
        ),
        (
            12080,
            13,
            False,
            "CuPy is not installed: pip install cupy-cuda12x cuda-pathfinder nvidia-cuda-nvrtc-cu12 "
            "nvidia-cuda-runtime-cu12 nvidia-cublas-cu12",
        ),
        (12080, 12, True, ""),
        (13010, 12, True, ""),
        (13000, 13, True, ""),
    ],
)
def test_a_driver_that_is_too_old_for_what_is_installed_is_told_apart(
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    made_for: int,
    installed: bool,
    said: str,
) -> None:
    monkeypatch.setattr(nvrtc, "made_for", lambda: made_for)
    (found,) = probes(monkeypatch, FakeDriver(("One", 9, 0), version=version), installed)
    assert found == (Unavailable(said) if said else Available("One, compute capability 9.0"))


def test_parts_of_a_gpu_are_as_many_as_the_driver_says(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process sees one part of a GPU at most (MIG), whatever files there are."""
    for n in range(4):
        (files / f"nvidia{n}").touch()
    found = probes(monkeypatch, FakeDriver(("A part 1g.10gb", 9, 0)))
    assert found[0] == Available("A part 1g.10gb, compute capability 9.0")
    hidden = "the NVIDIA driver finds no GPU {}, only 1; CUDA_VISIBLE_DEVICES may hide it"
    assert found[1:] == [Unavailable(hidden.format(n)) for n in (1, 2, 3)]


def test_cupy_says_which_cuda_it_is_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def only(package: str) -> Callable[[str], None]:
        def look(name: str) -> None:
            if name != package:
                raise PackageNotFoundError(name)

        return look

    for major, package in nvrtc.CUPY.items():
        nvrtc.made_for.cache_clear()
        monkeypatch.setattr(nvrtc, "distribution", only(package))
        assert nvrtc.made_for() == major
    nvrtc.made_for.cache_clear()


def test_a_closer_look_compiles_what_a_first_prompt_needs(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (descriptor,) = cuda.descriptors()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("hetrun.backends.cuda.cublas.library", lambda: None)
    monkeypatch.setattr("hetrun.backends.cuda.nvrtc.compiler", Compiling)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(("One", 8, 6)))
    assert descriptor.examine
    assert descriptor.examine() == Available("One, compute capability 8.6; its kernels compile")
    assert Compiling.compiled == [
        ("attention.cu", ["--gpu-architecture=sm_86", "-DKV=F16", "-DHEAD=128"]),
        ("tiles.cu", ["--gpu-architecture=sm_86", "-DQUANT=Q4_K"]),
    ]
    missing = "CUDA's headers (cuda_bf16.h) are not installed: pip install nvidia-cuda-runtime"
    monkeypatch.setattr(Compiling, "missing", missing)
    assert descriptor.examine() == Unavailable(f"One, compute capability 8.6: {missing}")


def test_a_backend_has_the_name_of_its_gpu(files: Path) -> None:
    (files / "nvidia0").touch()
    (files / "nvidia1").touch()
    assert [d.create().name for d in cuda.descriptors()] == ["cuda", "cuda-1"]
