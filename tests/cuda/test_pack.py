"""The pack: what is in it, how large it may be, and what a machine is told that lacks something."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.cuda import conformance, needs, pack
from tests.cuda.__main__ import main
from tests.cuda.rows import Table
from tests.support.paths import ROOT

needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this tree is no checkout of git")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "carried-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("carried/__init__.py", "FOUND = 1\n")
    return path


@needs_git
def test_what_is_carried_runs_from_where_it_is_unpacked(tmp_path: Path, wheel: Path) -> None:
    size = pack.write(tmp_path / "pack.tar.gz", [wheel], "v3", b"a vocabulary")
    assert size < 8 << 20, "sources alone"
    there = tmp_path / "there"
    with tarfile.open(tmp_path / "pack.tar.gz") as packed:
        packed.extractall(there, filter="fully_trusted")  # links to folders are in it
    assert (there / "site/cpu.txt").read_text() == "v3"
    assert (there / "tree/hetrun/backends/cuda/kernels").is_dir()
    assert not list(there.rglob("*.gguf"))[1:]
    asked = (
        "import carried, hetrun, sys; from hetrun.backend import registry; "
        "import os; from tests.cuda.models import TOKENIZER; "
        "print(hetrun.__file__, 'cuda' in registry.backends(), open(os.environ[TOKENIZER]).read())"
    )
    script = (there / "run").read_text().replace('-m tests.cuda "$@"', f'-c "{asked}"')
    (there / "ask").write_text(script)
    done = subprocess.run(
        ["sh", there / "ask"],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split(maxsplit=2)[1:] == ["True", "a vocabulary\n"], done.stderr
    assert done.stdout.startswith(str(there.resolve()))


@needs_git
def test_a_pack_that_is_too_large_says_what_is(tmp_path: Path, wheel: Path) -> None:
    with pytest.raises(pack.PackError, match=r"the pack has .* 0 may travel: sources"):
        pack.write(tmp_path / "pack.tar.gz", [wheel], "v3", b"", most=1000)
    assert not (tmp_path / "pack.tar.gz").exists()


def test_what_is_no_checkout_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(pack.PackError, match="is no checkout of git"):
        list(pack.sources(tmp_path))


def test_libraries_of_our_own_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "hetrun").mkdir()
    for name in ("one.c", "other.c", "one.so"):
        (tmp_path / "hetrun" / name).touch()
    assert pack.not_built(tmp_path) == ["other.c"]


def test_llama_cpps_programs_travel_as_sources(tmp_path: Path) -> None:
    kept = ("CMakeLists.txt", "ggml/src/ggml.c", "ggml/src/ggml-cuda/mmq.cu", "tools/llama-bench/main.cpp")
    left = ("ggml/src/ggml-metal/ggml-metal.m", "tools/server/server.cpp", "models/vocab.gguf")
    archive = tmp_path / "llama_cpp_python-1.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name in (*kept, *left):
            file = tmp_path / "file"
            file.write_text(name)
            packed.add(file, f"llama_cpp_python-1/vendor/llama.cpp/{name}")
    found = dict(pack.peer_files(archive))
    project = found.pop("llama.cpp/CMakeLists.txt").decode()
    assert "add_subdirectory(llama.cpp/tools/llama-bench)" in project
    assert found == {f"llama.cpp/llama.cpp/{name}": name.encode() for name in kept}


def test_ggml_is_not_built_for_the_machine_that_builds() -> None:
    assert set(pack.LEVELS) == set(needs.FLAGS)
    assert "-DGGML_NATIVE=OFF" in pack.cmake("v3")
    assert "AVX512" not in pack.cmake("v3")
    assert "-DGGML_AVX512_VNNI=ON" in pack.cmake("v4")


def test_a_cpu_that_is_too_old_is_told(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("flags : fpu avx2 fma f16c bmi2\n")
    assert not needs.cpu("v3", info).missing
    said = needs.cpu("v4", info).missing
    assert said.startswith("this CPU has no avx512f, ")
    assert said.endswith("pack again with --cpu v3")


def test_a_pack_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack"]) == 2
    assert "-o FILE" in capsys.readouterr().err


def test_tests_of_the_emulator_are_counted_by_how_they_end(tmp_path: Path) -> None:
    good, bad = tmp_path / "test_good.py", tmp_path / "test_bad.py"
    good.write_text("import os\ndef test(): assert os.environ['TESTS_ON_GPU'] == '1'\n")
    bad.write_text("def test(): assert False\n")
    none = tmp_path / "test_none.py"
    none.write_text("import pytest\n@pytest.mark.skip\ndef test(): pass\n")
    table = Table("conformance", tmp_path)
    conformance.kernels(table, [str(good), str(bad), str(none)])
    assert [line.what for line in table.missed] == [
        "test_bad on the GPU ended with",
        "test_bad on the GPU: tests that passed",
        "test_none on the GPU: tests that passed",  # pytest ends with 0 where all were skipped
    ]


def test_what_takes_too_long_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(command: list[str], timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", endless)
    monkeypatch.setattr("shutil.which", lambda name: name)
    table = Table("conformance", tmp_path)
    conformance.kernels(table, ["tests/cuda/test_small.py"])
    conformance.sanitized(table, "memcheck")
    assert [line.what for line in table.missed] == ["test_small on the GPU ended with", "memcheck ended with"]
