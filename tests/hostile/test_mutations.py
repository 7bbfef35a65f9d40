"""Mutated models end with success or a sentence; and the machinery that says so sees what it should see."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from hetrun.errors import ModelFileError, OptionError
from hetrun.system.subprocesses import python
from tests.hostile import trial
from tests.hostile.mutations import Case, Edit, Patch, cases, make_case
from tests.hostile.pool import Child, Pool, write_case
from tests.hostile.seeds import named, names, parsed, seeds, written
from tests.hostile.trees import Nested, Raw, Table, children
from tests.hostile.trial import Outcome, attempt
from tests.support.tiers import exhaustive

QUICK, SLOW = 12, 2000


def outcome(child: Child, case: Case, check: bool = False) -> Outcome:
    """What becomes of a case."""
    child.start(case, check)
    return child.finish()


# --- models


@pytest.mark.parametrize("name", names())
def test_every_seed_loads(child: Child, name: str) -> None:
    assert outcome(child, Case(named(name))).end == "loaded"


def test_these_are_all_seeds() -> None:
    assert tuple(seed.name for seed in seeds()) == names()


@given(case=cases())
@settings(max_examples=QUICK, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
def test_what_hypothesis_changes_is_loaded_or_refused(child: Child, case: Case) -> None:
    found = outcome(child, case)
    assert found.end != "finding", f"{found.stage}: {found.what}\n{found.trace}"


def test_what_chance_changes_is_loaded_or_refused(child: Child) -> None:
    for i in range(QUICK):
        case = make_case(Random(f"suite/{i}"))
        found = outcome(child, case, check=i % 10 == 0)
        assert found.end != "finding", f"{found.stage}: {found.what}\n{case}\n{found.trace}"


@pytest.mark.slow
@exhaustive
def test_thousands_of_changes(tmp_path: Path) -> None:
    findings = []

    def done(case: Case, found: Outcome, model: Path) -> None:
        if found.end == "finding":
            findings.append(f"{found.stage}: {found.what}\n{case}\n{found.trace}")

    with Pool(tmp_path, 1, done) as pool:
        for i in range(SLOW):
            pool.submit(make_case(Random(f"suite/{i}")), check=i % 40 == 0)
        pool.drain()
    assert not findings, "\n".join(findings)


# --- the machinery


@pytest.mark.parametrize("seed", names())
def test_a_tree_is_written_as_it_was_read(seed: str) -> None:
    for name, raw in written(named(seed).files).items():
        assert written(Table(((name, parsed(name, raw)),)))[name] == raw


def test_cases_are_the_same_every_time_and_differ() -> None:
    made = [repr(make_case(Random(f"x/{i}"))) for i in range(300)]
    assert made == [repr(make_case(Random(f"x/{i}"))) for i in range(300)]
    assert len(set(made)) > 290


def test_every_case_can_be_written() -> None:
    kinds = set()
    for i in range(400):
        case = make_case(Random(f"y/{i}"))
        kinds.add(case.kind)
        for name, raw in case.files().items():
            assert os.sep not in name
            assert len(raw) < 16 << 20
    assert len(kinds) == 6


def test_edits() -> None:
    tree = Table((("a", 1), ("b", (1, 2, 3)), ("c", Table((("d", "x"),)))))

    def edited(*edits: Edit) -> bytes:
        changed = tree
        for edit in edits:
            changed = edit.apply(changed)
        return written(Table((("f.json", changed),)))["f.json"]

    assert edited(Edit((0,), "replace", Raw("1e999"))) == b'{"a": 1e999, "b": [1, 2, 3], "c": {"d": "x"}}'
    assert edited(Edit((1, 1), "delete")) == b'{"a": 1, "b": [1, 3], "c": {"d": "x"}}'
    assert edited(Edit((2, 0), "replace", Nested(3))) == b'{"a": 1, "b": [1, 2, 3], "c": {"d": [[[]]]}}'
    assert edited(Edit((1,), "swap", other=0)) == b'{"a": [1, 2, 3], "b": 1, "c": {"d": "x"}}'
    assert edited(Edit((0,), "repeat", other=2)) == b'{"a": 1, "b": [1, 2, 3], "a": 1, "c": {"d": "x"}}'
    assert edited(Edit((2, 0), "rename", key="\\ud800"), Edit((1,), "delete")) == (
        b'{"a": 1, "c": {"\\\\ud800": "x"}}'
    )
    assert edited(*[Edit((0,), "delete")] * 4, Edit((0, 0, 0), "insert", 1, "k")) == b"{}"
    assert Patch(0, 1, 1, b"ab", 2).apply(b"xyz") == b"xababz"
    assert len(children(tree)) == 3


class Broken:
    """Stages that do what must not happen."""

    @staticmethod
    def bug(*_: object) -> None:
        raise KeyError("a bug")

    @staticmethod
    def nameless(*_: object) -> None:
        raise ModelFileError("elsewhere", "is bad")

    @staticmethod
    def blames(*_: object) -> None:
        raise OptionError("--ctx is bad")


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ("bug", "KeyError"),
        ("nameless", "does not name the file"),
        ("blames", "options are blamed"),
    ],
)
def test_what_must_not_happen_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, says: str
) -> None:
    monkeypatch.setattr(trial, "STAGES", {stage: getattr(Broken, stage)})
    found = attempt(write_case(Case(seeds()[0]), tmp_path / "m"), lambda stage: None)
    assert (found.end, found.stage) == ("finding", stage)
    assert says in found.what


GREEDY = """
import sys
from pathlib import Path
from tests.hostile import trial
trial.STAGES = {"greedy": lambda source, path: bytearray(b"x" * (128 << 20))}
print(trial.attempt(Path(sys.argv[1]), lambda stage: None).what)
"""


def test_memory_that_grows_is_a_finding(tmp_path: Path) -> None:
    """In a process of its own: what other tests left and is given back meanwhile would hide what grows."""
    path = write_case(Case(seeds()[0]), tmp_path / "m")
    ended = subprocess.run(python(GREEDY, str(path)), capture_output=True, text=True, timeout=120)
    assert "memory grew by" in ended.stdout, ended.stderr


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_a_finding_and_is_replaced(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Case(seeds()[0])
    os.kill(child.pid, signal.SIGSTOP)  # or else it might be done before
    child.start(good, False)
    os.kill(child.pid, signal.SIGSEGV)
    os.kill(child.pid, signal.SIGCONT)
    while not (died := child.wait(0.1)):
        pass
    assert died.end == "finding"
    assert died.what.startswith("SIGSEGV")
    monkeypatch.setattr("tests.hostile.pool.HANG_WALL_S", -1.0)
    os.kill(child.pid, signal.SIGSTOP)
    child.start(good, False)
    send = child._process.send_signal

    def signalled(number: int) -> None:
        send(number)
        send(signal.SIGCONT)

    monkeypatch.setattr(child._process, "send_signal", signalled)
    hung = child.wait(0)
    assert hung
    assert hung.what.startswith("hangs")
    monkeypatch.undo()
    assert outcome(child, good).end == "loaded"
