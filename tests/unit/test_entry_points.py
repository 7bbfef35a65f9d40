"""What packages registered: found without importing, left out by name when it is no good."""

from __future__ import annotations

import logging
import pickle

import pytest

from hetrun.errors import PluginError
from hetrun.system import entry_points
from hetrun.system.entry_points import API, PluginPoint
from tests.plugins.strangers import Register, point


def test_what_is_registered_is_found_and_loaded_on_use(register: Register) -> None:
    made = register("samplers", "mine", "the thing")
    assert entry_points.find("samplers", "mine") == made
    assert entry_points.named("samplers", "mine") == "the thing"
    assert entry_points.named("samplers", "no one's") is None
    assert entry_points.points("samplers")["mine"].whose == "stranger 0.1"


def test_everything_of_ours_is_there() -> None:
    assert {"reference", "llamacpp"} <= entry_points.points("backends").keys()
    assert all(
        p.is_ours and not p.fault for p in entry_points.points("backends").values() if p.package == "hetrun"
    )


@pytest.mark.parametrize(
    ("apis", "said"),
    [
        (
            ("0",),
            f"it was written for version 0 of hetrun's interface, but this is {API}: get a newer stranger",
        ),
        (
            (str(API + 1),),
            f"for version {API + 1} of hetrun's interface, but this is {API}: get a newer hetrun",
        ),
        (("one",), "for version one of hetrun's interface"),
    ],
)
def test_one_for_another_version_is_not_even_imported(
    register: Register, apis: tuple[str, ...], said: str
) -> None:
    register("samplers", "old", None, *apis, fails=AssertionError("imported"))
    with pytest.raises(PluginError, match=said):
        entry_points.named("samplers", "old")


def test_one_that_does_not_say_its_version() -> None:
    made = point("samplers", "mute", lambda: None)
    mute = PluginPoint(made.group, made.name, made.package, made.version, made.entry, ())
    assert 'needs [project.entry-points."hetrun.api"]' in mute.fault


def test_one_of_several_versions_will_do(register: Register) -> None:
    register("samplers", "both", "the thing", str(API + 1), str(API))
    assert entry_points.named("samplers", "both") == "the thing"


@pytest.mark.parametrize("error", [ImportError("no such library"), SystemExit(3), RuntimeError()])
def test_one_that_fails_is_named_once(
    register: Register, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    made = register("backends", "broken", fails=error)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(PluginError, match=r"^the backend broken of stranger 0\.1 is left out: "):
                entry_points.load(made)
    assert len(caplog.records) == 1
    assert made in entry_points.left_out()


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


def test_an_exception_that_has_no_text() -> None:
    assert entry_points.in_words(Hostile()) == "Hostile"
    assert entry_points.in_words(ValueError("a\x1b[31mb")) == r"ValueError: a\x1b[31mb"


def test_the_error_crosses_a_pipe(register: Register) -> None:
    error = entry_points.leave_out(register("backends", "broken"), "it is no good")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason) == (str(error), "it is no good")


def test_a_name_that_is_taken_stays_whose_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = next(iter(entry_points.points("backends").values()))
    thief = point("backends", ours.name, lambda: "stolen")
    monkeypatch.setattr(entry_points, "_left_out", {})
    monkeypatch.setattr(entry_points, "_all", lambda: [thief, ours])
    found = entry_points._points.__wrapped__()
    assert found["backends", ours.name] is ours
    assert entry_points.left_out()[thief] == f"{ours.whose} already has that name"
