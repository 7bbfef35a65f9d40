"""`hetrun doctor`, as people read it and as scripts do."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import click

from hetrun.cli.exit_codes import WRONG_INPUT
from hetrun.cli.output import in_json
from hetrun.system.terminal_text import visible
from hetrun.system.units import counted
from hetrun.tools.doctor import DoctorFinding, State, examine

COLOURS: Mapping[State, str] = {"ok": "green", "note": "blue", "warning": "yellow", "error": "red"}
SIGNS: Mapping[State, str] = {"ok": "ok", "note": "-", "warning": "!", "error": "no"}
WIDEST = 110
NAME = 12  # columns


def doctor(as_json: bool) -> int:
    """Say what is found; the exit code."""
    found: list[DoctorFinding] = []
    for finding in examine():
        if not as_json:
            _print(finding, is_first=all(before.group != finding.group for before in found))
        found.append(finding)
    broken = [finding for finding in found if finding.state == "error"]
    if as_json:
        print(in_json({"ok": not broken, "findings": [asdict(finding) for finding in found]}, indent=1))
    else:
        print(f"\n{conclusion(found)}")
    return WRONG_INPUT if broken else 0


def conclusion(found: Sequence[DoctorFinding]) -> str:
    """The last line, which counts and names all that is not plainly well."""
    broken = [finding for finding in found if finding.state == "error"]
    remarks = [finding for finding in found if finding.state in ("warning", "note")]
    some = f"{counted(len(remarks), 'remark')}: {_named(remarks)}" if remarks else ""
    if broken:
        what = "1 thing is" if len(broken) == 1 else f"{len(broken)} things are"
        return f"{what} broken: {_named(broken)}" + (f"; {some}." if some else ".")
    return f"All that hetrun needs works; {some}." if some else "All is well."


def _named(findings: Sequence[DoctorFinding]) -> str:
    """By group and name, each once."""
    groups: dict[str, dict[str, None]] = {}
    for finding in findings:
        groups.setdefault(finding.group, {})[visible(finding.name)] = None
    return "; ".join(f"{group} {', '.join(names)}" for group, names in groups.items())


def _print(finding: DoctorFinding, is_first: bool) -> None:
    if is_first:
        print("" if finding.group == "hetrun" else "\n", _styled(finding.group), sep="")
    sign = _styled(f"{SIGNS[finding.state]:>2}", COLOURS[finding.state])
    text = visible(finding.text).replace("\n", " ")
    if finding.mend and text.endswith(finding.mend):  # it has a line of its own
        text = text.removesuffix(finding.mend).rstrip(": ")
    lines = _wrapped(text)
    print(f" {sign}  {visible(finding.name):<{NAME}} {lines[0]}")
    for line in lines[1:]:
        print(f"{'':{NAME + 6}}{line}")
    if finding.mend:
        print(f"{'':{NAME + 6}}-> {visible(finding.mend)}")


def _wrapped(text: str) -> list[str]:
    wide = min(WIDEST, shutil.get_terminal_size().columns) - NAME - 6
    return textwrap.wrap(text, max(20, wide), break_long_words=False, break_on_hyphens=False) or [""]


def _styled(text: str, colour: str | None = None) -> str:
    """Coloured, or else bold; on a terminal only."""
    return click.style(text, fg=colour, bold=colour is None) if sys.stdout.isatty() else text
