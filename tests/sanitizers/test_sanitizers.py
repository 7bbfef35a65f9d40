"""A sample of the sanitizers' line of the gate: two small libraries, some hundred inputs, and faults that
are found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.sanitizers import builds, trial
from tests.sanitizers.builds import ADDRESS, LEVELS, THREAD, Build, compile_all, levels, missing, sources
from tests.sanitizers.checkout import copy_checkout
from tests.sanitizers.fuzz import BY_NAME, CASES
from tests.sanitizers.races import PROGRAMS, Program
from tests.sanitizers.trial import TESTS, Wish, fuzz, race, report_of
from tests.support.paths import ROOT
from tests.support.tiers import exhaustive

pytestmark = pytest.mark.slow
SMALL = ("top_logits.c", "experts.c")
SAMPLE = {"top_logits": 150, "pairs": 150}  # inputs
needs_gcc = pytest.mark.skipif(bool(missing()), reason=missing() or "-")
needs_tsan = pytest.mark.skipif(bool(missing(THREAD)), reason=missing(THREAD) or "-")
needs_libraries = pytest.mark.skipif(
    not all(path.with_suffix(".so").exists() for path in sources() if path.name in SMALL),
    reason="hetrun was installed without a C compiler",
)


@pytest.fixture
def sanitized(tmp_path: Path) -> Path:
    """A copy of the checkout with two libraries."""
    return copy_checkout(tmp_path, compile_all(Build(optimise="-O1"), SMALL))


@needs_gcc
@needs_libraries
def test_a_sample_of_inputs_finds_nothing(sanitized: Path) -> None:
    rows = fuzz(sanitized, Wish(seconds=300, inputs=600, cases=tuple(SAMPLE)))
    assert {row.library: row.inputs for row in rows} == {"top_logits": 150, "experts": 150}
    assert not [fault for row in rows for fault in row.faults]


@exhaustive
@needs_gcc
@needs_libraries
def test_planted_faults_are_found(sanitized: Path, tmp_path: Path) -> None:
    """One number too many is written, one is added wrongly: each input says how it is repeated."""
    for library, of, planted in (
        ("top_logits", "for (; i < n; i++) {", "for (; i <= n; i++) {"),
        ("experts", "to[c] += share * from[c];", "to[c] -= share * from[c];"),
    ):
        source = next(path for path in sources() if path.stem == library)
        text = source.read_text()
        assert of in text
        changed = tmp_path / source.name
        changed.write_text(text.replace(of, planted))
        made = builds.compile_library(changed, Build(optimise="-O1"))
        shutil.copy2(made, (sanitized / source.relative_to(ROOT)).with_suffix(".so"))
    (over,) = fuzz(sanitized, Wish(seconds=300, inputs=1, cases=("top_logits",)))
    (wrong,) = fuzz(sanitized, Wish(seconds=300, inputs=4, cases=("pairs",)))
    assert any("heap-buffer-overflow" in fault and "--only" in fault for fault in over.faults), over.faults
    assert any("not what numpy adds up" in fault for fault in wrong.faults), wrong.faults


@needs_tsan
def test_threads_of_a_program_have_no_race() -> None:
    row = race(next(p for p in PROGRAMS if p.name == "ring_threads"), seconds=1, seed=1)
    assert row.inputs
    assert not row.faults


def test_every_library_has_inputs_tests_and_threads() -> None:
    names = {path.stem for path in sources()}
    assert CASES.keys() == names
    assert {name for found in TESTS.values() for name in found} == names
    assert all((ROOT / file.split()[0]).is_file() for file in TESTS)
    assert {Path(x).stem for p in PROGRAMS for x in p.libraries} <= names
    assert all(p.source.is_file() for p in PROGRAMS)
    assert sum(map(len, CASES.values())) == len(BY_NAME)


def test_levels_are_those_of_the_cpu_and_all_others() -> None:
    here, absent = levels()
    assert here[0] == "portable"
    assert sorted([*here, *absent]) == sorted(LEVELS)


def test_a_report_is_the_line_that_says_it_and_where() -> None:
    log = "noise\n==1==ERROR: AddressSanitizer: overflow on x\nREAD\n    #0 f /hetrun/a.c:3\n    #1 g\n"
    assert report_of(log) == "==1==ERROR: AddressSanitizer: overflow on x | #0 f /hetrun/a.c:3"
    assert report_of("a\nb") == "a | b"


@needs_gcc
def test_options_of_setup_are_kept() -> None:
    assert builds.own_flags()["products.c"] == ["-ffp-contract=off"]
    assert Build(most="portable").options[-1].startswith("-D__builtin_cpu_supports")
    assert trial.repeat("ring", 3, 5) == "--case ring --seed 3 --only 5"


@exhaustive
@needs_gcc
@needs_tsan
@pytest.mark.parametrize("sanitizer", [ADDRESS, THREAD])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_all_programs_of_threads(program: Program, sanitizer: str) -> None:
    row = race(program, seconds=5, seed=2, sanitizer=sanitizer)
    assert row.inputs
    assert not row.faults


def test_the_command_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert missing() == "there is no gcc"
    assert missing(THREAD) == "there is no gcc"
