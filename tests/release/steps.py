"""The lines of the gate, in the order in which they are cheap to fail."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

PYTHON = sys.executable


@dataclass(frozen=True, slots=True)
class Step:
    """A line: a command that exits with 0 where all is well."""

    name: str
    bar: str  # what it shows, in words
    command: tuple[str, ...]
    minutes: int  # about, on two cores
    alone: bool = False  # whether nothing else may run on the machine


def module(name: str, *options: str) -> tuple[str, ...]:
    """A program of the tests."""
    return (PYTHON, "-m", f"tests.{name}", *options)


STEPS: tuple[Step, ...] = (
    Step("checkout", "no file differs from the commit", module("release.checkout"), 0),
    Step("lint", "format, lint", ("make", "lint"), 1),
    Step("types", "mypy in strict mode reaches every file", ("make", "types"), 3),
    Step("contracts", "layers and forbidden imports", ("make", "contracts"), 1),
    Step("wheels", "40 MiB for both, glibc 2.28, notices, parts", (PYTHON, "scripts/build_wheels.py"), 25),
    Step(
        "installation",
        "each Python that is here: no compiler, one answer",
        (PYTHON, "-m", "pytest", "-q", "-m", "", "tests/e2e/test_wheels.py"),
        3,
    ),
    Step("truth", "each architecture and placement: the same tokens", module("truth", "--json"), 40),
    Step("faults", "every Nth failure: no crash, hang, leak, wrong token", module("faults", "--json"), 30),
    Step("crashes", "500 kills, 500 power cuts: nothing lost or trusted", module("crashes", "--json"), 30),
    Step("memory", "each mode in its budget: no kill; an hour flat", module("memory", "--json"), 80),
    Step("busy", "beside twice as many busy programs: no alarm", module("busy", "--json"), 15, alone=True),
    Step("sanitizers", "an hour of inputs: no finding", module("sanitizers", "--json"), 80),
    Step("security", "fuzzed HTTP: no 500, no leak", module("server.http_fuzz", "--seconds", "600"), 10),
    Step(
        "hostile files",
        "100,000 mutated models",
        module("hostile.fuzz", "--cases", "100000", "--jobs", "2"),
        40,
    ),
    Step("tests", "all tests, and the programs that loop", ("make", "test-all"), 240),
    Step("speed", "no cell 3 % below the last release", module("release.speed"), 30, alone=True),
)


def chosen(only: Sequence[str], skipped: Sequence[str]) -> list[Step]:
    """Those that are asked for. A name that no line has is an error."""
    names = [step.name for step in STEPS]
    if unknown := [name for name in (*only, *skipped) if name not in names]:
        raise ValueError(f"no line of the gate is called {', '.join(unknown)}: {', '.join(names)}")
    return [step for step in STEPS if (not only or step.name in only) and step.name not in skipped]
