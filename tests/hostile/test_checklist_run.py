"""The checklist of bad files through `hetrun run`: the same sentences, and neither time nor memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetrun.system import subprocesses
from tests.hostile.all_cases import CASES, arguments
from tests.hostile.checklist import Case, good_gguf
from tests.hostile.trees import write_gguf
from tests.support.tiers import exhaustive

MOST_MIB = 64
MOST_S = 2.0  # half of it on an idle machine: there, nothing takes a second
ROOT = Path(__file__).parents[2]

# What only a path says, is said before anything is opened.
NO_PATH = ("nothing", "loop of links", "link to nowhere")

REAL = (
    "empty",
    "pipe",
    "5 GiB of zeros",
    "a text of 4 GiB",
    "one byte less behind 4 GiB",
    "header: strings absurd",
    "header: the next string has no room",
    "cut behind a tensor",
    "block_count 0",
    "context_length 4294967295",
    "attention.layer_norm_rms_epsilon nan",
    "vocabulary: a byte that is none",
    "vocabulary: eos 2^32-1",
    "architecture unknown",
    "split: parts of two models",
    "shard: 100,000 tensors, one cut",
    "index leads out of the folder",
    "config: code",
    "tokenizer.json: 500 MB",
)


def whole_list(command: str) -> dict[str, dict[str, object]]:
    """What one process says of each case."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.all_cases", command],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=600, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"it died of {lines[-1:]}"
    found = {line["case"]: line for line in lines if "case" in line}
    assert found.keys() == {case.name for case in CASES if command == "check" or not case.weights}
    return found


# What `check` says of each case is seen in test_checklist.py, too.
@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", pytest.param("check", marks=exhaustive)])
def test_one_process_survives_the_whole_list(command: str) -> None:
    for name, line in whole_list(command).items():
        says = "does not exist; give" if command == "run" and name in NO_PATH else str(line["says"])
        err = str(line["err"])
        assert (name, line["code"], line["out"]) == (name, 2, "")
        assert says in err, name
        assert err.count("\n") == 1, name
        assert str(line["folder"]) in err or "template" in name, name


# Of time, and of memory that the cases before have left to be used again: not for a machine that does other
# things meanwhile.
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("command", ["check", "run"])
def test_no_case_takes_long_or_much(command: str) -> None:
    for name, line in whole_list(command).items():
        assert float(str(line["seconds"])) < MOST_S, name
        assert float(str(line["mib"])) < MOST_MIB, name


# One of each kind: no file, a large one, a header, a value, a folder.
DAILY = {"pipe", "a text of 4 GiB", "header: strings absurd", "block_count 0", "tokenizer.json: 500 MB"}
CHOSEN = [
    pytest.param(case, id=case.name, marks=() if case.name in DAILY else exhaustive)
    for case in CASES
    if case.name in REAL
]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    code: int
    err: str
    seconds: float  # computed, by its children too
    mib: float  # at most


def run(path: Path) -> Ended:
    """`hetrun run` in a process of its own."""
    process = subprocess.Popen(
        subprocesses.python("from hetrun.cli import main; main()", *arguments("run", path)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    with process.stderr:
        err = process.stderr.read().decode()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(process.returncode, err, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """What a good model of the same size takes."""
    path = tmp_path_factory.mktemp("good") / "good.gguf"
    path.write_bytes(write_gguf(good_gguf()))
    ended = run(path)
    assert ended.code == 0
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("case", CHOSEN)
def test_a_process_of_its_own(case: Case, tmp_path: Path, good: Ended) -> None:
    ended = run(case.make(tmp_path))
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith(f"hetrun: {tmp_path}")
    assert case.says in ended.err
    assert ended.mib < good.mib + MOST_MIB


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("case", [case for case in CASES if case.name in REAL], ids=str)
def test_no_process_of_its_own_takes_long(case: Case, tmp_path: Path, good: Ended) -> None:
    assert run(case.make(tmp_path)).seconds < good.seconds + MOST_S


def test_the_names_are_those_of_cases() -> None:
    assert {case.name for case in CASES} >= {*REAL, *NO_PATH}
    assert set(REAL) > DAILY
