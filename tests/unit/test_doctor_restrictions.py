"""What `hetrun doctor` says of the restrictions that this kernel has."""

from __future__ import annotations

import pytest

from hetrun.system.sandbox import landlock, seccomp
from hetrun.tools import doctor


@pytest.mark.parametrize(
    ("version", "filters", "state", "words"),
    [
        (7, True, "ok", "restricted by Landlock (version 7) and seccomp"),
        (3, True, "note", "only seccomp stops it"),
        (0, True, "note", "restricted by seccomp; not here: Landlock"),
        (0, False, "note", "restricted by nothing; not here: Landlock"),
    ],
)
def test_restrictions(
    version: int, filters: bool, state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "version", lambda: version)
    monkeypatch.setattr(seccomp, "is_there", lambda: filters)
    (finding,) = doctor._restrictions()
    assert finding.state == state
    assert words in finding.text
    monkeypatch.setenv("HETRUN_SANDBOX", "off")
    (finding,) = doctor._restrictions()
    assert (finding.state, finding.text) == ("note", "turned off by the setting sandbox")
