"""Every CUDA source through NVIDIA's compiler, with every word that it is compiled with: it needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from hetrun.backends.cuda.nvrtc import (
    CUPY,
    HEADERS,
    Compiler,
    chosen_folder,
    compiler,
    folders_of_headers,
    installed,
)
from hetrun.backends.cuda.programs import FOLDER, Programs, Source
from hetrun.backends.cuda.weights import READ
from hetrun.errors import BackendUnavailable
from tests.cuda.emulated.driver import EmulatedDriver
from tests.cuda.emulated.kernels import names
from tests.cuda.sources import SOURCES, kernels_of, shared_of
from tests.cuda.test_matmul import UNPACKED
from tests.support.tiers import exhaustive

ARCHITECTURES = "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"
# The others differ by how weights and rows are read; all of them take a minute for one architecture, and
# that is the one which everything is made for. How weights of each type are read is in UNPACKED.
QUICK = (
    *("small", "rows", "grouping", "convolution", "products Q4_K", "tiles Q4_K", "attention F16 128"),
    *("attention_tiles F16 128", "int8_products Q4_K", "int8_experts Q4_K", "delta_net 128"),
)

REGISTERS = 65536  # of a multiprocessor: a block that wants more does not start
THREADS = {"rms_norm": 1024, "layer_norm": 1024}  # at most; 256 otherwise
# Bytes of a thread in memory instead of registers. Angles: for the cosines of large ones.
# Tiles of 128 rows in bytes, with Q6_K and Q3_K on some: two blocks at once are worth more than the last few
# numbers.
STACK = {"angles": 32, "products_128": 8, "experts_down_int8": 8, "experts_gated_int8": 8}

ENTRY = re.compile(
    r"entry function '(\w+)' for .*?Function properties for \1\n.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Taken:
    """What a thread of a kernel takes."""

    stack: int
    spilled: int
    registers: int


@pytest.fixture(scope="module")
def nvrtc() -> Compiler:
    try:
        return compiler()
    except BackendUnavailable as e:
        pytest.skip(str(e))


def often(source: Source, architecture: str) -> bool:
    """Whether `make test` compiles it: every kernel once."""
    return str(source) in QUICK and architecture == "sm_90"


CASES = [
    pytest.param(source, architecture, marks=() if often(source, architecture) else exhaustive, id=name)
    for source in SOURCES
    for architecture in ARCHITECTURES
    if architecture == "sm_90" or str(source) in QUICK
    for name in [f"{source} {architecture}".replace(" ", "-")]
]


def compiled(
    nvrtc: Compiler, path: Path, architecture: str, options: Sequence[str] = ()
) -> tuple[bytes, str]:
    every = f"--gpu-architecture={architecture}", "--ptxas-options=-v", *options
    return nvrtc.compile(path.name, path.read_text(), FOLDER, every)


def test_no_source_is_forgotten() -> None:
    assert {s.name for s in SOURCES} == {p.stem for p in FOLDER.glob("*.cu")}
    assert set(QUICK) <= {str(s) for s in SOURCES}


@pytest.mark.parametrize(("source", "architecture"), CASES)
def test_it_compiles(nvrtc: Compiler, source: Source, architecture: str) -> None:
    program, said = compiled(nvrtc, source.path, architecture, source.options)
    assert "warning" not in said
    found = {name: Taken(*map(int, numbers)) for name, *numbers in ENTRY.findall(said)}
    # The emulator, which finds kernels by their text, runs all that there are.
    assert set(found) == set(names(source.path.read_text()))
    for name, taken in found.items():
        assert name.encode() in program
        assert taken.registers * THREADS.get(name, 256) <= REGISTERS, name
        assert max(taken.stack, taken.spilled) <= STACK.get(name, 0), name


def test_no_block_wants_more_shared_memory_than_an_rtx_has() -> None:
    """99 KiB, of 8.6, 8.9 and 12.0; the emulated driver refuses more as well."""
    wanted = {source: max(shared_of(source, name) for name in kernels_of(source)) for source in SOURCES}
    assert max(wanted.values()) <= EmulatedDriver().device.shared == 99 << 10
    driver = EmulatedDriver()
    with pytest.raises(AssertionError, match="wants 101377 bytes of shared memory, and a block has 101376"):
        driver.kernel(driver.load(b"a program"), "a kernel", (99 << 10) + 1)


def test_weights_of_every_type_are_read(nvrtc: Compiler) -> None:
    program, said = compiled(nvrtc, UNPACKED, "sm_90")
    assert "warning" not in said
    assert {name.removeprefix("unpacked_") for name in names(UNPACKED.read_text())} == READ
    assert all(f"unpacked_{quant}".encode() in program for quant in READ)


def test_what_is_wrong_is_said_with_its_line(nvrtc: Compiler) -> None:
    text, options = "\n\nint f() { return nothing; }\n", ["--gpu-architecture=sm_90"]
    with pytest.raises(
        BackendUnavailable, match=r"cannot compile wrong.cu \(--gpu-architecture=sm_90\)"
    ) as e:
        nvrtc.compile("wrong.cu", text, FOLDER, options)
    assert 'wrong.cu(3): error: identifier "nothing" is undefined' in str(e.value)


def test_a_program_is_compiled_once(nvrtc: Compiler, tmp_path: Path) -> None:
    told: list[str] = []
    programs = Programs((9, 0), tmp_path / "kept", told.append)
    first = programs.program(Source("rows"))
    assert first[:4] == b"\x7fELF"
    assert told == ["compiling CUDA kernels, once for this GPU: rows"]
    assert Programs((9, 0), tmp_path / "kept", told.append).program(Source("rows")) == first
    assert len(told) == 1
    Programs((8, 0), tmp_path / "kept", told.append).program(Source("rows"))
    assert len(told) == 2
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_done_without(nvrtc: Compiler, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    programs = Programs((9, 0), tmp_path / "file", lambda line: None)
    assert programs.program(Source("rows"))[:4] == b"\x7fELF"


def test_a_gpu_that_is_newer_than_the_compiler_gets_what_its_driver_can_translate(nvrtc: Compiler) -> None:
    assert nvrtc.architecture((9, 0)) == "--gpu-architecture=sm_90"
    older = nvrtc.architecture((99, 0))
    assert re.fullmatch(r"--gpu-architecture=compute_\d+", older)
    source = Source("rows")
    program, _ = nvrtc.compile("rows.cu", source.path.read_text(), FOLDER, [older, *source.options])
    assert b".visible .entry pack_rows" in program


@pytest.mark.parametrize(
    ("known", "capability", "option"),
    [
        ([75, 80, 86, 89, 90], (8, 9), "sm_89"),
        ([75, 80, 86], (8, 9), "sm_86"),  # the same generation: its programs run as they are
        ([75, 80, 86, 90], (12, 0), "compute_90"),
        ([80, 90, 120], (8, 0), "sm_80"),
        ([], (8, 0), "sm_80"),
    ],
)
def test_the_nearest_older_architecture_is_taken(
    nvrtc: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    known: list[int],
    capability: tuple[int, int],
    option: str,
) -> None:
    monkeypatch.setattr(nvrtc, "_architectures", lambda: known)
    assert nvrtc.architecture(capability) == f"--gpu-architecture={option}"


def test_libraries_are_found_in_any_folder_of_pythons_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that were unpacked and not installed, as a pack has them."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    libc = next(line.split()[-1] for line in maps if "/libc.so" in line)
    for major in CUPY:
        folder = tmp_path / f"nvidia/cu{major}/lib"
        folder.mkdir(parents=True)
        (folder / f"libcublas.so.{major}").symlink_to(libc)
    monkeypatch.syspath_prepend(tmp_path)
    for major in CUPY:
        monkeypatch.setattr("hetrun.backends.cuda.nvrtc.made_for", partial(int, major))
        assert installed("cublas", "missing")._name == str(
            tmp_path / f"nvidia/cu{major}/lib/libcublas.so.{major}"
        )


def test_headers_are_those_of_the_cuda_that_cupy_is_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("cu13", "cuda_runtime", "cuda_nvcc"):
        (tmp_path / "nvidia" / folder / "include").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    for major in CUPY:
        monkeypatch.setattr("hetrun.backends.cuda.nvrtc.made_for", partial(int, major))
        folders = [folder for folder in folders_of_headers() if folder.is_relative_to(tmp_path)]
        found[major] = [folder.parent.name for folder in folders]
    assert found == {13: ["cu13"], 12: ["cuda_nvcc", "cuda_runtime"]}


def test_headers_are_taken_from_the_first_folder_that_has_all_of_them(tmp_path: Path) -> None:
    there = {"nothing": ["other.h"], "some": HEADERS[:1], "runtime": HEADERS, "system": HEADERS}
    for folder, names_ in there.items():
        (tmp_path / folder).mkdir()
        for name in names_:
            (tmp_path / folder / name).touch()
    folders = [tmp_path / name for name in there]
    assert chosen_folder(folders) == folders[2]
    with pytest.raises(
        BackendUnavailable, match=r"\(cuda_fp16.h, cuda_bf16.h\) are not .*nvidia-cuda-runtime"
    ):
        chosen_folder(folders[:2])


def test_kernels_include_nothing_but_the_headers_that_are_looked_for() -> None:
    """All of them are in one package, so no other one has to be installed."""
    read = "".join(path.read_text() for path in FOLDER.iterdir())
    assert set(re.findall(r"#include <(.*)>", read)) == set(HEADERS)
