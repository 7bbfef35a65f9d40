"""The page that a release is signed with: docs/release.md, written by the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.release.gate import Outcome
from tests.release.machine import Place
from tests.release.steps import Step
from tests.support.pages import write_section
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "release.md"
BEGIN, END = "<!-- gate -->\n", "<!-- end -->\n"


def table(steps: Sequence[Step], outcomes: Mapping[str, Outcome], here: Place) -> str:
    """A row for each line of the gate, those that were not run among them."""
    rows = [("line", "bar", "came out", "s", "load before"), ("---",) * 5]
    for step in steps:
        outcome = outcomes.get(step.name)
        if outcome is None:
            rows.append((step.name, step.bar, "**not run**", "", ""))
            continue
        word = "passed" if outcome.passed else "**failed**"
        said = f"{word}: {outcome.last}".replace("|", "\\|")
        rows.append((step.name, step.bar, said, f"{outcome.seconds:.0f}", f"{outcome.load:.1f}"))
    body = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    cores = "one core" if here.cores == 1 else f"{here.cores} cores"
    return f"Commit {here.commit}, {here.date}, {cores} of {here.cpu}.\n\n{body}"


def write(text: str) -> None:
    """Put it into the page."""
    write_section(PAGE, BEGIN, END, f"\n{text}\n")
