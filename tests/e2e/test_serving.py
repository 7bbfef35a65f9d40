"""Servers as users have them: measured by `hetrun bench`, and pressed hard by many clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools import stress

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with stress.tiny_model() as path:
        yield path


def bench(model: Path, *options: str) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "hetrun", "bench", "-m", str(model), "-o", "json", "-r", "1", *options]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


def test_clients_of_a_server_are_measured(model: Path) -> None:
    (row,) = bench(model, "--clients", "2", "-p", "64", "-n", "8", "--requests", "2")
    assert row["test"] == "pp64+tg8 x2"
    assert row["prompt_tokens"] == 64
    assert isinstance(row["tok_s"], float)
    assert row["tok_s"] > 0


def test_a_shared_beginning_and_an_arrival_are_measured(model: Path) -> None:
    options = ("--shared-prefix", "300", "--arrival", "400", "--clients", "2", "-p", "64", "-n", "16")
    prefix, arrival = bench(model, *options)
    assert (prefix["test"], arrival["test"]) == ("prefix300", "arrival400 x2")
    for row, number in ((prefix, "times_faster"), (arrival, "p99_ratio"), (arrival, "newcomer_ratio")):
        value = row[number]
        assert isinstance(value, float)
        assert value > 0


def test_none_of_many_answers_is_lost_or_mixed_up(model: Path) -> None:
    outcome = stress.run(stress.settings_of(model, 30), count=60, at_once=30, leaving=0.2)
    assert outcome.complaints == []
    assert outcome.answers + outcome.left == 60
    assert outcome.left > 0
