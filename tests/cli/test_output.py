"""Remarks that come while an answer is written."""

from __future__ import annotations

import io
import logging

import pytest

from hetrun.cli import REMARKS
from hetrun.cli.output import AnswerText, say
from hetrun.cli.run import shown
from hetrun.client.events import Event

LOG = logging.getLogger("hetrun.tests.remarks")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What stdout and stderr both are from now on."""
    both = Terminal()
    monkeypatch.setattr("sys.stdout", both)
    monkeypatch.setattr("sys.stderr", both)
    return both


def test_a_log_line_in_the_middle_of_an_answer_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr(LOG, "handlers", [REMARKS])
    for event in shown(
        iter([Event("token", text="The sky"), Event("token", text=" is"), Event("token", text=" blue")]), True
    ):
        if event.text == " is":
            LOG.warning("plan in force")
            LOG.warning("once more")
    assert terminal.getvalue() == "The sky is\nhetrun: plan in force\nhetrun: once more\n blue\n"


def test_a_line_that_has_ended_is_not_ended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    for _ in shown(iter([Event("token", text="The sky\n")]), True):
        say("plan in force")
    for event in shown(iter([Event("token", text="is"), Event("token", text="")]), True):
        if not event.text:
            say("once more")
    assert terminal.getvalue() == "The sky\nhetrun: plan in force\nis\nhetrun: once more\n"


def test_a_file_gets_the_answer_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    answer = AnswerText()
    answer.write("The sky\x1b")
    answer.remark("plan in force")
    answer.write(" is")
    answer.end()
    answer.end()
    assert capsys.readouterr() == ("The sky\x1b is\n", "plan in force\n")
