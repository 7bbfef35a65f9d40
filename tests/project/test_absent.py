"""Which tests are skipped where this Python cannot have a package: those that end with it, and no others."""

from __future__ import annotations

import pytest

from tests.support import absent

pytest_plugins = ["pytester"]

TESTS = {
    "test_above": "import no_wheel.part\ndef test_it(): ...",
    "test_below": """
import pytest
@pytest.fixture
def part():
    import no_wheel
def test_inside():
    from no_wheel import part
def test_fixture(part): ...
def test_without(): ...
def test_not_installed():
    import not_installed
""",
    "test_other": "import not_installed",
}


def test_what_needs_it_is_skipped(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "REASONS", {"no_wheel": "no_wheel has no wheel for Python 9.9"})
    pytester.makepyfile(**TESTS)
    options = ("-p", "no:asyncio", "-rs", "--continue-on-collection-errors")
    run = pytester.runpytest_inprocess(*options, plugins=[absent])
    run.assert_outcomes(passed=1, skipped=3, failed=1, errors=1)
    run.stdout.fnmatch_lines(["SKIPPED * no_wheel has no wheel for Python 9.9"])
