"""The checklist of bad files through `hetrun check`: one sentence with place and reason.

How long each takes is measured in test_checklist_run.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrun import cli
from tests.hostile import cases_folder
from tests.hostile.all_cases import CASES, arguments
from tests.hostile.checklist import Case, good_gguf, write_folder
from tests.hostile.trees import write_gguf
from tests.support.tiers import exhaustive

# Each of these starts processes or is large; these few are for every day, and `hetrun run` has them all.
LONG = ("vocabulary:", "tokenizer.json:", "shard: 100,000")
DAILY = {"vocabulary: eos 2^32-1", "tokenizer.json: a pipe"}
PARAMETERS = [
    pytest.param(
        case,
        id=case.name,
        marks=exhaustive if case.name.startswith(LONG) and case.name not in DAILY else (),
    )
    for case in CASES
]


def test_the_good_models_are_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or else the cases below would prove nothing."""
    path = tmp_path / "good.gguf"
    path.write_bytes(write_gguf(good_gguf()))
    folder = write_folder(tmp_path)
    assert cli.exit_code(["check", str(path), str(folder)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    facts = (
        "ok: llama, 328 k parameters, F32, 21 tensors, vocabulary of 320, chat template, all weights finite, "
        "no long runs of zeros"
    )
    found = [line for line in captured.out.splitlines() if ": ok: " in line]
    assert found == [f"{path}: {facts}", f"{folder}: {facts}"]


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_bad_model_is_refused(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = case.make(tmp_path)
    code = cli.exit_code(arguments("check", path, case.weights))
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith(f"hetrun: {tmp_path}")
    assert case.says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.rstrip("\n").isprintable()
    assert not (tmp_path / cases_folder.RAN).exists()


def test_names_of_cases_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.name for case in CASES} > DAILY
