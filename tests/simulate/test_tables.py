"""The tables in the documentation are what the script makes, and the command says the same."""

from __future__ import annotations

import json

import pytest

from hetrun import cli
from tests.support.tiers import exhaustive
from tests.tools import planner_tables
from tests.tools.planner_tables import DOCUMENT, PARTS, between, made

QUICK = ("twinpilots", "lia", "laptop")
ALIKE = ("twinpilots-a10g", "lia-spr-a100")  # the same policies as server-h200, on other machines
MARKS = {
    part: [*([] if part in QUICK else [pytest.mark.slow]), *([exhaustive] if part in ALIKE else [])]
    for part in PARTS
}


@pytest.mark.parametrize("part", [pytest.param(part, marks=marks) for part, marks in MARKS.items()])
def test_the_document_has_what_the_script_makes(part: str) -> None:
    found = between(part).search(DOCUMENT.read_text(encoding="utf-8"))
    assert found is not None
    again = f"python -m {planner_tables.__name__} writes it again"
    assert found[0] == f"{found[1]}{made(part)}\n{found[2]}", again


Run = tuple[int, str, str]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> Run:
    code = cli.exit_code(["plan", *arguments])
    return (code, *capsys.readouterr())


def test_the_command_says_first_that_it_is_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, "--machine", "server-h200", "--shape", "opt-6.7b", "--prompt", "64")
    assert code == 0
    assert out.startswith("A prediction")
    assert "not measured" in out.splitlines()[0]
    for word in (
        "prefill",
        "513+",
        "TwinPilots",
        "LIA",
        "layer split",
        "streaming",
        "hetrun",
        "memory   GPU",
    ):
        assert word in out


def test_programs_get_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, "--machine", "laptop", "--shape", "llama-8b:q4_0", "--batch", "2", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["prediction"].startswith("A prediction")
    assert found["case"] == {"batch": 2, "prompt": 512, "generate": 128}
    assert [row["bucket"] for row in found["buckets"]][:2] == ["prefill", "1"]
    assert {p["policy"] for p in found["policies"]} == {"processor only", "hetrun"}
    for row in found["buckets"]:
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])


def test_a_batch_that_fits_nowhere_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, "--machine", "laptop", "--shape", "opt-30b", "--batch", "64")
    assert code == 0
    assert "nothing fits: keys and values take" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "opt-30b"], "--shape is for another machine"),
        (["--batch", "4"], "--batch is for another machine"),
        (
            ["--machine", "laptop", "--shape", "opt-30b", "--threads", "2"],
            "--threads applies to this machine only",
        ),
        (["--machine", "laptop", "--shape", "opt-30b", "-m", "x.gguf"], "name two models"),
        (["--machine", "laptop", "--shape", "opt-30b", "--batch", "0"], "--batch must be an integer from 1"),
        (["--machine", "laptop", "--shape", "gpt"], "unknown shape gpt"),
        (["--machine", "desktop", "--shape", "opt-30b"], "unknown machine desktop"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, out, err = plan(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
