"""The release gate: what it runs, what it keeps, and the figures that it writes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.release import checklist, figures, gate, speed
from tests.release.__main__ import main
from tests.release.checkout import faults
from tests.release.figures import BudgetCell, Figures, SpeedCell
from tests.release.machine import Place
from tests.release.steps import STEPS, Step, chosen
from tests.support.paths import ROOT

HERE = Place(cpu="Some CPU @ 2.5GHz (avx2)", cores=2, commit="0123abcde", date="2026-11-29", load=0.2)
CELL = SpeedCell(
    "a model", "prompt of 512 tokens", (100.0, 110.0, 120.0), 0.5, "llama.cpp", (50.0, 52.0), 0.25, 2.1
)
PASSES = Step("passes", "ends with 0", (sys.executable, "-c", "print('all well')"), 0)
FAILS = Step("fails", "ends with 1", (sys.executable, "-c", "print('a | b'); raise SystemExit(1)"), 0)


def test_each_line_of_the_gate_is_a_program_that_is_there() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        if step.command[0] == "make":
            assert f"\n{step.command[1]}:" in (ROOT / "Makefile").read_text("utf-8")
        elif step.command[1] == "-m" and step.command[2].startswith("tests."):
            path = ROOT.joinpath(*step.command[2].split("."))
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), step.name


def test_lines_are_chosen_by_name() -> None:
    assert [step.name for step in chosen(["lint"], [])] == ["lint"]
    assert "lint" not in [step.name for step in chosen([], ["lint"])]
    with pytest.raises(ValueError, match="no line of the gate is called lnt"):
        chosen(["lnt"], [])
    with pytest.raises(SystemExit):
        main(["--only", "lnt"])


def test_a_line_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    records = gate.Records(tmp_path, HERE)
    good, bad = gate.run([PASSES, FAILS], records, again=False)
    assert (good.passed, good.last) == (True, "all well")
    assert (bad.passed, bad.last) == (False, "a | b")
    assert "FAILED" in bad.to_text()
    assert records.log(FAILS).read_text("utf-8") == "a | b\n"


def test_what_passed_for_a_commit_is_not_run_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    program = f"from pathlib import Path; p = Path({str(count)!r}); p.write_text(p.read_text() + 'x')"
    step = replace(PASSES, command=(sys.executable, "-c", program))
    count.write_text("", "utf-8")
    for here, again, runs in (
        (HERE, False, 1),
        (HERE, False, 1),
        (HERE, True, 2),
        (replace(HERE, commit="other"), False, 3),
        (replace(HERE, commit="other-dirty"), False, 4),
        (replace(HERE, commit="other-dirty"), False, 5),
    ):
        list(gate.run([step], gate.Records(tmp_path / "out", here), again))
        assert len(count.read_text("utf-8")) == runs


def test_a_failed_line_is_run_again(tmp_path: Path) -> None:
    records = gate.Records(tmp_path, HERE)
    list(gate.run([FAILS], records, again=False))
    (outcome,) = gate.run([replace(FAILS, command=PASSES.command)], records, again=False)
    assert outcome.passed


def test_the_checklist_has_all_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {one.name: one for one in gate.run([FAILS], gate.Records(tmp_path, HERE), again=False)}
    text = checklist.table([PASSES, FAILS], outcomes, HERE)
    assert "| passes | ends with 0 | **not run** |" in text
    assert "| fails | ends with 1 | **failed**: a \\| b |" in text
    monkeypatch.setattr(checklist, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(f"before\n{checklist.BEGIN}old\n{checklist.END}after\n", "utf-8")
    checklist.write(text)
    page = (tmp_path / "page.md").read_text("utf-8")
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert HERE.commit in page


def test_a_folder_without_git_is_no_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.release.machine.ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert faults() == ["this is no git checkout"]


def test_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    here = Figures(HERE, (CELL,), "a larger model", (BudgetCell(0.38, (5.0, 5.2), None),))
    older = replace(here, place=replace(HERE, cpu="Another", date="2026-01-01"))
    assert older.write(tmp_path) != here.write(tmp_path)
    assert figures.read(tmp_path) == [here, older]
    assert json.loads(here.write(tmp_path).read_text("utf-8"))["place"]["commit"] == HERE.commit


def test_the_faster_side_is_bold_and_the_place_is_named() -> None:
    text = Figures(HERE, (CELL, replace(CELL, ratio=0.9))).to_markdown()
    assert "2 cores of Some CPU @ 2.5GHz (avx2), 2026-11-29, commit 0123abcde, load average 0.2" in text
    assert "| **110 ± 10** | 50 % | 51.0 ± 1.0 | 25 % | 2.10 |" in text
    assert "| 110 ± 10 | 50 % | **51.0 ± 1.0** | 25 % | 0.90 |" in text


def test_the_readme_has_the_figures_that_were_measured() -> None:
    tables = "\n".join(one.to_markdown() for one in figures.read())
    assert figures.in_readme() == tables.strip()


def test_a_page_without_a_place_for_figures_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no place", "utf-8")
    with pytest.raises(ValueError, match="has no place for it"):
        figures.write_readme([], page)
    assert page.read_text("utf-8") == "no place"


def test_only_what_the_spread_does_not_explain_is_a_fall() -> None:
    assert not speed.fell([1.0, 0.99, 1.01])
    assert not speed.fell([0.97, 0.97, 0.97])
    assert not speed.fell([0.9, 1.06, 0.92])  # as far apart as machines that others use
    assert speed.fell([0.95, 0.94, 0.96])


def test_cases_have_words() -> None:
    assert (speed.title("pp512"), speed.title("tg64@512")) == (
        "prompt of 512 tokens",
        "answer after 512 tokens",
    )
