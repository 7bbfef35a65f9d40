"""Which of the installed packages ggml's libraries come from, and which of them computes on a CPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest

from hetrun.backends.llamacpp import ggml_api
from hetrun.errors import BackendUnavailable
from hetrun.system.cpu_flags import cpu_flags
from tests.support.paths import ROOT

PACKAGE = ROOT / "packaging" / "hetrun-ggml"
AVX2 = "sse4_2 avx f16c fma avx2 bmi2"
AVX512 = f"{AVX2} avx512f avx512cd avx512vl avx512dq avx512bw"
# Flags of CPUs, and the level for each.
CPUS = {
    "Xeon, 4th generation": (
        f"{AVX512} avx512vbmi avx512_vnni avx512_bf16 avx_vnni amx_tile amx_int8 amx_bf16",
        "sapphirerapids",
    ),
    "the same where the kernel keeps AMX to itself": (
        f"{AVX512} avx512vbmi avx512_vnni avx512_bf16 avx_vnni",
        "zen4",
    ),
    "Zen 4": (f"{AVX512} avx512vbmi avx512_vnni avx512_bf16", "zen4"),
    "Xeon, 3rd generation": (f"{AVX512} avx512vbmi avx512_vnni", "icelake"),
    "Xeon, 2nd generation": (f"{AVX512} avx512_vnni", "cascadelake"),
    "Xeon, 1st generation": (AVX512, "skylakex"),
    "Core, 12th generation": (f"{AVX2} avx_vnni", "alderlake"),
    "Zen 3": (AVX2, "haswell"),
    "AVX-512 of which a part is missing": (f"{AVX2} avx512f avx512cd", "haswell"),
    "Bulldozer": ("sse4_2 avx fma4", "sandybridge"),
    "Nehalem": ("ssse3 sse4_1 sse4_2", "sse42"),
    "the first of 64 bits": ("sse2", "x64"),
    "nothing says": ("", "x64"),
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """hetrun-ggml as a wheel installs it, with empty files for libraries."""
    folder = tmp_path / "hetrun_ggml"
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").write_text((PACKAGE / "hetrun_ggml" / "__init__.py").read_text())
    for _, level in CPUS.values():
        (folder / "lib" / f"libggml-cpu-{level}.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    before = sys.modules.pop("hetrun_ggml", None)
    invalidate_caches()
    yield folder / "lib"
    sys.modules.pop("hetrun_ggml", None)  # other tests are to find what is really there
    if before:
        sys.modules["hetrun_ggml"] = before


@pytest.mark.parametrize("cpu", CPUS)
def test_each_cpu_gets_the_best_level_that_it_runs(
    cpu: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, level = CPUS[cpu]
    monkeypatch.setattr(ggml_api, "cpu_flags", lambda: frozenset(flags.split()))
    assert ggml_api.find_files() == (installed, installed / f"libggml-cpu-{level}.so")


def test_a_level_that_was_not_built_is_passed_over(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml_api, "cpu_flags", lambda: frozenset(CPUS["Zen 4"][0].split()))
    (installed / "libggml-cpu-zen4.so").unlink()
    assert ggml_api.find_files().cpu.name == "libggml-cpu-icelake.so"


def test_a_package_without_libraries_is_one_sentence(installed: Path) -> None:
    for path in installed.iterdir():
        path.unlink()
    sentence = f"{installed} has no libggml-cpu-x64.so: pip install --force-reinstall hetrun-ggml"
    with pytest.raises(BackendUnavailable, match=re.escape(sentence)):
        ggml_api.find_files()


def test_a_library_is_chosen_without_reading_it(installed: Path) -> None:
    """This CPU's own flags: files that hold nothing suffice."""
    assert ggml_api.find_files().cpu.parent == installed
    from hetrun_ggml import LEVELS, levels

    best = levels(cpu_flags())[0]
    assert LEVELS[best] <= cpu_flags()


def test_its_version_is_the_one_that_is_pinned() -> None:
    pinned = re.search(r"^llama-cpp-python==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    text = (PACKAGE / "hetrun_ggml" / "__init__.py").read_text()
    assert pinned
    assert f'__version__ = "{pinned[1]}"' in text
