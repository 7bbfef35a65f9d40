"""llama.cpp's measuring programs: how they are built on a machine with a GPU, and what their lines say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hetrun.tools.bench.cases import BenchCase
from tests.cuda import peer
from tests.cuda.mixture import Sizes, ways
from tests.cuda.peer import Peer, PeerError, build, configured, help_of, rates

# Two lines of llama-batched-bench, and what it writes between them.
SAID = """
{"n_kv_max": 1024, "pp": 128, "tg": 4, "pl": 2, "n_kv": 264, "t_tg": 0.888301, "speed_tg": 9.005956, "t": 1.5}

{"n_kv_max": 1024, "pp": 128, "tg": 4, "pl": 2, "n_kv": 264, "t_tg": 1.821390, "speed_tg": 4.392250, "t": 2.3}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(peer, "built_folder", lambda: tmp_path / "built")
    return tmp_path


def program(folder: Path, name: str, script: str) -> None:
    """Something in the place of a program, which tells how it was called."""
    (folder / "built/bin").mkdir(parents=True, exist_ok=True)
    path = folder / "built/bin" / name
    path.write_text(f'#!/bin/sh\necho "$@" > {folder}/{name}.called\n{script}\n')
    path.chmod(0o755)


def test_every_line_is_one_measurement() -> None:
    assert rates(SAID) == (9.005956, 4.39225)
    with pytest.raises(PeerError, match="no line of JSON: nothing"):
        rates("nothing")


def test_a_case_is_asked_of_the_program_that_measures_it(folder: Path) -> None:
    lines = json.dumps([{"samples_ts": [98.5, 97.0], "avg_ts": 97.75}])
    program(folder, "llama-bench", f"echo '{lines}'")
    program(folder, "llama-batched-bench", f"cat <<'END'\n{SAID}\nEND")
    asked = Peer(Path("model.gguf"), 2)
    assert asked.tokens_per_s(BenchCase("prefill", 4096)) == (98.5, 97.0)
    called = (folder / "llama-bench.called").read_text()
    assert "-m model.gguf -p 4096 -n 0 -d 0 -r 2 -fa 1 -ub 2048" in called
    assert asked.tokens_per_s(BenchCase("decode", 32, 8192)) == (98.5, 97.0)
    assert "-p 0 -n 32 -d 8192" in (folder / "llama-bench.called").read_text()
    assert asked.tokens_per_s(BenchCase("decode", 4, 128, 2)) == (9.005956, 4.39225)
    assert "-npp 128 -ntg 4 -npl 2,2,2 -c 266" in (folder / "llama-batched-bench.called").read_text()


def test_a_program_that_fails_or_hangs_is_a_sentence(folder: Path) -> None:
    with pytest.raises(PeerError, match="llama-bench is not built: run the stage peer first"):
        Peer(Path("m"), 1).tokens_per_s(BenchCase("prefill", 16))
    program(folder, "llama-bench", "echo no such file >&2; exit 1")
    with pytest.raises(PeerError, match="llama-bench failed: no such file"):
        Peer(Path("m"), 1).tokens_per_s(BenchCase("prefill", 16))
    program(folder, "llama-bench", "exec sleep 60")
    with pytest.raises(PeerError, match="was not done after 0 s"):
        Peer(Path("m"), 1, 0.05).tokens_per_s(BenchCase("prefill", 16))


def test_it_is_built_for_the_gpu_that_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_cublas_of_packages", lambda: ["-DCUDA_cublas_LIBRARY=there"])
    command = configured(folder, (9, 0))
    assert {"-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90", "-DCUDA_cublas_LIBRARY=there"} <= {*command}
    assert not any("CUDA=ON" in part for part in configured(folder, None))


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_what_cannot_be_built_says_why(folder: Path) -> None:
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nmessage(FATAL_ERROR none)\n"
    )
    with pytest.raises(PeerError, match=r"cmake -S failed:\n(?s:.*)none"):
        build(None, folder / "log", folder)
    with pytest.raises(PeerError, match=r"llama\.cpp's sources are not here"):
        build(None, folder / "log")


def test_a_mixture_is_measured_in_as_much_memory_with_what_the_release_knows(folder: Path) -> None:
    sizes = Sizes(10 << 30, [2 << 30] * 4)  # two of ten GiB are no experts
    old = ways("-ncmoe, --n-cpu-moe <n>", sizes, 7 << 30, 24 << 30)
    assert old == {"--n-cpu-moe 2": {"-ngl": "99", "-ncmoe": 2}}
    options = "-fitt, --fit-target <MiB>\n--moe-cache <auto|on|off|0|MiB>\n--n-gen-warmup <n>"
    new = ways(options, sizes, 7 << 30, 24 << 30)
    assert new["--fit"] == {"-fitt": 17 << 10}
    assert new["--moe-cache"] == {"-ngl": "99", "-ncmoe": 4, "--moe-cache": 4 << 10, "--n-gen-warmup": 256}
    assert list(ways(options, sizes, 2 << 30, 24 << 30)) == ["--n-cpu-moe 4", "--fit"]
    program(folder, "llama-bench", """echo '[{"samples_ts": [5.0]}]'""")
    assert Peer(Path("m.gguf"), 1, where=new["--moe-cache"]).tokens_per_s(BenchCase("decode", 8)) == (5.0,)
    called = (folder / "llama-bench.called").read_text()
    assert "-ngl 99 -ncmoe 4 --moe-cache 4096 --n-gen-warmup 256 -o json" in called
    assert help_of("llama-bench") == '[{"samples_ts": [5.0]}]\n'
