"""llama.cpp's own measuring programs, built on the machine with the GPU: what ours is compared with there.

They are built from the sources that llama-cpp-python carries, with CUDA for the GPU that is there. Where the
toolkit has no cuBLAS, the one of the Python package is linked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from hetrun.tools.bench.cases import BenchCase
from tests.cuda.needs import PACK
from tests.cuda.rows import Line, Table

FOLDER = "llama.cpp"  # of a pack, with the project that builds the two programs
PROGRAMS = "llama-bench", "llama-batched-bench"
PROJECT = """cmake_minimum_required(VERSION 3.18)
project(peer C CXX)
add_subdirectory(llama.cpp)
add_subdirectory(llama.cpp/tools/llama-bench)
add_subdirectory(llama.cpp/tools/batched-bench)
"""
OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"),
    *("-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_OPENSSL=OFF", "-DGGML_CUDA_NCCL=OFF"),
)
SPARED_CORES = 2  # for what runs meanwhile
ALL_LAYERS = "99"
PROMPT = 128  # tokens that each of several sequences reads before it answers
RUN_S, BUILD_S = 300.0, 1800.0


class PeerError(Exception):
    """It cannot be built or does not run; the message says why."""


def sources() -> Path:
    """The folder with the project, in the pack that this runs from."""
    folder = Path(os.environ.get(PACK, ""), FOLDER)
    if not (folder / "CMakeLists.txt").is_file():
        raise PeerError("llama.cpp's sources are not here: they are in a pack")
    return folder


def built_folder() -> Path:
    """Where it is built, for all later stages."""
    return Path(tempfile.gettempdir(), "hetrun-llama-bench")


def program(name: str) -> Path:
    """One of the two; PeerError where it is not built."""
    found = next((path for path in built_folder().rglob(name) if path.is_file()), None)
    if found is None:
        raise PeerError(f"{name} is not built: run the stage peer first")
    return found


def configured(source: Path, capability: tuple[int, int] | None) -> list[str]:
    """The command that prepares the build; without a capability it is one for the CPU."""
    command = ["cmake", "-S", str(source), "-B", str(built_folder()), *OPTIONS]
    if capability is None:
        return command
    architecture = f"-DCMAKE_CUDA_ARCHITECTURES={capability[0]}{capability[1]}"
    return [*command, "-DGGML_CUDA=ON", "-DGGML_CUDA_NO_VMM=ON", architecture, *_cublas_of_packages()]


def _cublas_of_packages() -> Sequence[str]:
    """cuBLAS as pip installed it, where the toolkit has none."""
    nvcc = shutil.which("nvcc")
    toolkit = Path(nvcc).resolve().parents[1] if nvcc else Path()
    if list(toolkit.glob("**/libcublas.so")):
        return ()
    from hetrun.backends.cuda.nvrtc import installed

    library = Path(installed("cublas", "cuBLAS is not installed: pip install nvidia-cublas")._name)
    headers = library.parents[1] / "include"
    return (
        f"-DCUDA_cublas_LIBRARY={library}",
        f"-DCUDA_cublasLt_LIBRARY={library.with_name(library.name.replace('cublas', 'cublasLt'))}",
        f"-DCMAKE_CUDA_FLAGS=-I{headers}",
    )


def build(
    capability: tuple[int, int] | None, log: Path, source: Path | None = None, seconds: float | None = None
) -> None:
    """Both programs, with most of the cores; PeerError with the end of what was said."""
    jobs = max(1, len(os.sched_getaffinity(0)) - SPARED_CORES)
    making = ["cmake", "--build", str(built_folder()), "-j", str(jobs), "--target", *PROGRAMS]
    with log.open("w") as file:
        for command in (configured(source or sources(), capability), making):
            try:
                ended = subprocess.run(command, stdout=file, stderr=file, timeout=seconds, check=False)
            except (OSError, subprocess.TimeoutExpired) as e:
                raise PeerError(f"{command[0]} --build: {e}") from None
            if ended.returncode:
                raise PeerError(f"{' '.join(command[:2])} failed:\n{log.read_text()[-2000:]}")


def build_here(table: Table) -> None:
    """For the GPU of this machine; how long it took."""
    from hetrun.backends.cuda.cupy_driver import properties

    began, left = monotonic(), table.seconds_left
    try:
        build(properties(0).capability, built_folder().with_suffix(".log"), seconds=min(left, BUILD_S))
    except PeerError as e:
        print(e, flush=True)
    done = all(any(built_folder().rglob(name)) for name in PROGRAMS)
    table.add(Line("llama.cpp's programs are built", "", (done,), 1, note=f"{monotonic() - began:.0f} s"))


@dataclass(frozen=True, slots=True)
class Peer:
    """llama.cpp on one file, all layers on the GPU if nothing else is said."""

    path: Path
    rounds: int
    seconds: float = RUN_S  # that one run may take
    where: Mapping[str, object] = field(default_factory=lambda: {"-ngl": ALL_LAYERS})

    def tokens_per_s(self, case: BenchCase) -> tuple[float, ...]:
        """As its own programs measure; of all sequences together."""
        return self._batched(case) if case.batch > 1 else self._single(case)

    def _single(self, case: BenchCase) -> tuple[float, ...]:
        prompt, answer = (case.tokens, 0) if case.kind == "prefill" else (0, case.tokens)
        given = {"-p": prompt, "-n": answer, "-d": case.depth, "-r": self.rounds, "-fa": 1}
        given |= {"-ub": min(2048, max(512, prompt)), "-b": 2048}
        (found,) = json.loads(self._said("llama-bench", {**given, **self.where, "-o": "json"}))
        return tuple(map(float, found["samples_ts"]))

    def _batched(self, case: BenchCase) -> tuple[float, ...]:
        context = case.batch * (PROMPT + case.tokens + 1)
        # One more than is wanted: it may end before its last line is written.
        times = ",".join([str(case.batch)] * (self.rounds + 1))
        given = {"-npp": PROMPT, "-ntg": case.tokens, "-npl": times, "-c": context, "-fa": "on"}
        given |= {**self.where, "--output-format": "jsonl"}
        return rates(self._said("llama-batched-bench", given))[: self.rounds]

    def _said(self, name: str, given: Mapping[str, object]) -> str:
        command = [str(program(name)), "-m", str(self.path)]
        command += [str(part) for pair in given.items() for part in pair]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=self.seconds, check=False)
        except subprocess.TimeoutExpired:
            raise PeerError(f"{name} was not done after {self.seconds:.0f} s") from None
        if ended.returncode:
            raise PeerError(f"{name} failed: {ended.stderr[-1000:]}")
        return ended.stdout


def help_of(name: str) -> str:
    """What a program says of its options: they differ from release to release."""
    ended = subprocess.run([program(name), "--help"], capture_output=True, text=True, check=False)
    return ended.stdout + ended.stderr


def rates(said: str) -> tuple[float, ...]:
    """Tokens of answers per second, from the lines of JSON among others."""
    found = tuple(float(json.loads(line)["speed_tg"]) for line in said.splitlines() if line.startswith("{"))
    if not found:
        raise PeerError(f"llama-batched-bench has written no line of JSON: {said[-500:]}")
    return found
