"""From outside: processes whose libraries are sanitized, begun anew where one has ended, and what they
found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from tests.sanitizers.builds import ADDRESS, THREAD, Build, compile_program, levels, sources
from tests.sanitizers.checkout import OPTIONS, environment, python
from tests.sanitizers.fuzz import BY_NAME, CASES
from tests.sanitizers.races import PROGRAMS, Program
from tests.support.paths import ROOT

MOST_FAULTS = 20  # after this number a run ends
SAYING = re.compile(
    r"ERROR: \w+Sanitizer.*|WARNING: ThreadSanitizer.*|\S+: runtime error:.*|.*ours .*is not.*"
)
SPARE_S = 300  # what one round may take beyond the time that a program is given


@dataclass
class Row:
    """What ran of one library, and what was found."""

    what: str  # fuzzed, tests, threads
    library: str
    sanitizer: str
    inputs: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """For a line of JSON."""
        return {**self.__dict__, "seconds": round(self.seconds, 1)}


def report_of(log: str) -> str:
    """What a sanitizer said, and where, in a few lines."""
    lines = log.splitlines()
    for i, line in enumerate(lines):
        if SAYING.search(line):
            frames = [x.strip() for x in lines[i : i + 40] if x.lstrip().startswith("#") and "hetrun" in x][
                :3
            ]
            return " | ".join([line.strip(), *frames])[:700]
    return " | ".join(lines[-3:])[:700]


@dataclass(frozen=True, slots=True)
class Wish:
    """How long inputs are made, or how many of each case; which, and with which instructions."""

    seconds: float
    inputs: int = 0
    seed: int = 1
    cases: Sequence[str] = ()
    levels: Sequence[str] = ()


class _Count:
    """The rows of the fuzzer, as its processes say them."""

    def __init__(self, names: Sequence[str]) -> None:
        chosen = {library: [c for c in cases if c in names] for library, cases in CASES.items()}
        self.rows = {name: Row("fuzzed", name, ADDRESS) for name, cases in chosen.items() if cases}
        self._of = {case: self.rows[name] for name, cases in chosen.items() for case in cases}
        self.last: tuple[str, int] | None = None
        self.ended = False
        self._since = monotonic()

    @property
    def faults(self) -> int:
        return sum(len(row.faults) for row in self.rows.values())

    def hear(self, said: dict[str, Any], seed: int) -> None:
        """One line of a process."""
        now = monotonic()
        if self.last:
            self._of[self.last[0]].seconds += now - self._since
        self._since = now
        if "begin" in said:
            self.last = said["begin"], said["number"]
            self._of[said["begin"]].inputs += 1
        elif "wrong" in said:
            row = self._of[said["wrong"]]
            row.faults.append(
                f"{repeat(said['wrong'], seed, said['number'])}: {said['why'].strip().splitlines()[-1]}"
            )
        elif "end" in said:
            self.ended = True

    def died(self, code: int, log: str, seed: int) -> None:
        """The process has ended in the middle of an input."""
        assert self.last is not None
        name, number = self.last
        self._of[name].faults.append(f"{repeat(name, seed, number)}: ended with {code}: {report_of(log)}")


def repeat(name: str, seed: int, number: int) -> str:
    """How an input is tried again."""
    return f"--case {name} --seed {seed} --only {number}"


def fuzz(where: Path, wish: Wish, plain: Path = ROOT) -> list[Row]:
    """Inputs in processes of which each goes on behind the input that ended the one before."""
    names = list(wish.cases or BY_NAME)
    count, first, end = _Count(names), 0, monotonic() + wish.seconds
    while count.faults < MOST_FAULTS and monotonic() < end and (not wish.inputs or first < wish.inputs):
        options = [
            "--seconds",
            str(end - monotonic()),
            "--inputs",
            str(wish.inputs and wish.inputs - first),
            "--seed",
            str(wish.seed),
        ]
        options += ["--first", str(first), *[x for name in names for x in ("--case", name)]]
        options += ["--levels", *(wish.levels or levels()[0])]
        command = python("-m", "tests.sanitizers.fuzz", str(plain), *options)
        before = count.last
        code, log = _follow(command, where, count, wish.seed)
        if count.ended:
            break
        if count.last in (None, before):
            raise RuntimeError(f"the fuzzer did not begin: {log[-3000:]}")
        count.died(code, log, wish.seed)
        assert count.last is not None
        first = count.last[1] + 1
    return list(count.rows.values())


def _follow(command: list[str], where: Path, count: _Count, seed: int) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(
            command, cwd=where, env=environment(where), stdout=subprocess.PIPE, stderr=log, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):
                    count.hear(json.loads(line), seed)
        log.seek(0)
        return child.returncode, log.read()


# --- the tests of the suite that use the libraries

# Files of tests, with a choice of them where there are many, and the libraries that each runs.
TESTS = {
    "tests/unit/test_matmul_kernels.py": ("products",),
    "tests/unit/test_weight_packing.py": ("products",),
    "tests/unit/test_streamed_matmul.py": ("products",),
    "tests/unit/test_expert_kernels.py": ("products",),
    "tests/unit/test_recurrent_kernels.py": ("recurrent",),
    "tests/unit/test_ring_buffer.py": ("ring_reader",),
    "tests/unit/test_streamer.py": ("ring_reader",),
    "tests/unit/test_expert_cache.py": ("expert_slots",),
    "tests/unit/test_top_logits.py": ("top_logits",),
    "tests/unit/test_thread_affinity.py": ("affinity_calls",),
    "tests/unit/test_bench_memory.py": ("read_loops",),
    "tests/backends/test_kernels.py": ("attention", "products"),
    "tests/backends/test_mapped.py": ("pages", "sigbus", "products"),
    "tests/conformance/test_ops.py -k moe-": ("experts",),
}


def run_tests(
    where: Path, files: Sequence[str] = (), sanitizer: str = ADDRESS, more: Sequence[str] = ()
) -> list[Row]:
    """The files one by one, each in a process; a row for each."""
    rows = []
    for file in files or TESTS:
        began = monotonic()
        plugins = ("-p", "no:cacheprovider", "-p", "tests.sanitizers.loaded")
        command = python("-m", "pytest", "-q", *plugins, *file.split(), *more)
        done = subprocess.run(
            command, cwd=where, env=environment(where, sanitizer), capture_output=True, text=True, check=False
        )
        row = Row("tests", file, sanitizer, seconds=monotonic() - began)
        row.inputs = sum(int(n) for n in re.findall(r"(\d+) (?:passed|failed)", done.stdout))
        if done.returncode:
            failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))][:5]
            said = report_of(done.stderr + done.stdout)
            row.faults.append(f"ended with {done.returncode}: {' | '.join(failed)} {said}")
        loaded = re.search(r"sanitized libraries: (.*)", done.stdout)
        absent = set(TESTS.get(file, ())) - set(loaded[1].split() if loaded else ())
        if absent and not row.faults:
            row.faults.append(f"did not load {', '.join(sorted(absent))}")
        rows.append(row)
    return rows


# --- threads


def race(program: Program, seconds: float, seed: int, sanitizer: str = THREAD, optimise: str = "-O1") -> Row:
    """A program of C in which threads share work as ggml's do, or as readers and runners."""
    row, began = Row("threads", program.name, sanitizer), monotonic()
    linked = [path for path in sources() if path.name in program.libraries]
    made = compile_program(program.source, linked, Build(sanitizer, optimise))
    environ = {**os.environ, **OPTIONS, "ASAN_OPTIONS": "detect_leaks=1:exitcode=99"}
    with tempfile.TemporaryDirectory(prefix="sanitizers-") as room:
        code, out, log = _run([str(made), str(seconds), str(seed), room], environ, seconds + SPARE_S)
    row.seconds = monotonic() - began
    row.inputs = sum(int(n) for n in re.findall(r"^rounds (\d+)", out, re.MULTILINE))
    if code or not row.inputs:
        row.faults.append(f"seed {seed}: ended with {code}: {report_of(log)}")
    return row


def _run(command: list[str], environ: dict[str, str], limit_s: float) -> tuple[int, str, str]:
    """How a program ended and what it wrote; one that is still running then waits for what does not come."""
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return -1, "", f"it was still running after {limit_s:.0f} s"
    return done.returncode, done.stdout, done.stderr


def races(seconds: float, seed: int, sanitizer: str = THREAD) -> list[Row]:
    """All programs, for so long each."""
    return [race(program, seconds, seed, sanitizer) for program in PROGRAMS]
