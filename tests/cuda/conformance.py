"""Whether the GPU computes what the reference computes: op by op, and in models placed at random."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cuda.emulated.real import SWITCH
from tests.cuda.rows import Line, Table
from tests.run import counted

ROOT = Path(__file__).parents[2]
FILES = ("tests/conformance", "tests/cuda")
TOOLS = ("memcheck", "racecheck")
# Tests of the emulator's kernels and of the backend on it, which a switch brings to the GPU.
KERNELS = tuple(
    f"tests/cuda/test_{name}.py"
    for name in ("small", "attention", "matmul", "tiles", "recurrent", "recurrent_models", "backend")
)
EVERY_ROW = "-m", ""  # also what `make test` leaves to `make test-all`
LIMIT_S = 240  # for each of the tools
TIMED_OUT = 124  # as `timeout` has it
FOUND = 9  # the exit code with which a tool says that it found something


class Counted:
    """How many tests passed, failed and were skipped."""

    def __init__(self) -> None:
        self.passed = self.failed = self.skipped = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        if report.failed:
            self.failed += 1
        elif report.skipped:
            self.skipped += 1
        elif report.when == "call":
            self.passed += 1


def conformance(table: Table, files: Sequence[str] = FILES, chosen: str = "cuda and not emulated") -> None:
    """The suite for the GPU's backend and the tests of this folder; then the same under NVIDIA's tools."""
    counted = Counted()
    settings = ("-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "-q", *EVERY_ROW, "-k", chosen)
    pytest.main([*settings, *(str(ROOT / f) for f in files)], [counted])
    note = f"{counted.skipped} skipped"
    table.add(Line("tests that passed", "", (counted.passed,), 1, note=note))
    table.add(Line("tests that failed", "", (counted.failed,), 0, "most"))
    for tool in TOOLS:
        sanitized(table, tool)


def kernels(table: Table, files: Sequence[str] = KERNELS) -> None:
    """Each file in a process of its own: an error of a kernel ends what its process has of CUDA."""
    for file in files:
        if not table.has_time(Path(file).stem):
            continue
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *EVERY_ROW, file]
        environment = {**os.environ, SWITCH: "1"}
        try:
            ended = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=min(LIMIT_S, table.seconds_left),
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            _took_too_long(table, f"{Path(file).stem} on the GPU", e.timeout)
            continue
        said = ended.stdout.splitlines() or ended.stderr.splitlines() or [""]
        if ended.returncode:
            print(ended.stdout[-4000:], ended.stderr[-2000:], flush=True)
        name, counts = f"{Path(file).stem} on the GPU", counted(said[-1])
        table.add(Line(f"{name} ended with", "", (ended.returncode,), 0, "most", note=said[-1]))
        # Where all are skipped nothing has run, and pytest is content.
        table.add(Line(f"{name}: tests that passed", "", (counts["passed"],), 1))


def _took_too_long(table: Table, what: str, seconds: float) -> None:
    note = f"not done after {seconds:.0f} s"
    table.add(Line(f"{what} ended with", "", (TIMED_OUT,), 0, "most", note=note))


def sanitized(table: Table, tool: str) -> None:
    """A model placed at random under one of compute-sanitizer's tools."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        print(f"{tool}: compute-sanitizer is not installed, so nothing was looked for", flush=True)
        return
    code = "from tests.cuda.placements import one; one(0)"
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-c", code]
    if not table.has_time(tool):
        return
    limit = min(LIMIT_S, table.seconds_left)
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        _took_too_long(table, tool, limit)
        return
    if ended.returncode:
        print(ended.stdout[-4000:], ended.stderr[-2000:], flush=True)
    table.add(Line(f"{tool} ended with", "", (ended.returncode,), 0, "most"))
