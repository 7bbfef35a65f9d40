"""Measured plans as users have them: what a short prompt leaves alone, and what a long one brings in."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hetrun.planner.options import this_machine
from tests.support.tiers import exhaustive

pytestmark = pytest.mark.slow

SHORT = """
import json, sys
from hetrun.cli import main
sys.argv = ["hetrun", "run", "Write a short poem about the sea and the mountains, the rivers and the woods, "
            "and about what the wind says to all of them at night.", "-n", "4", "--json=full"]
try:
    main()
finally:
    print(json.dumps({"torch": "torch" in sys.modules, "highspy": "highspy" in sys.modules}), file=sys.stderr)
"""
# With threads of its own: else a plan follows the cores that other programs leave, to numbers of threads for
# which passes of some lengths were not measured.
EAGER = """
import json, sys
from hetrun import LLM, SamplingParams
with LLM(eager=True, threads=int(sys.argv[1])) as llm:
    answer = llm.generate([list(range(1000, 1600))], SamplingParams(max_tokens=4, temperature=0))[0]
    known = {"tokens": answer.tokens, "plan": llm.plan.to_json(), "torch": "torch" in sys.modules}
    print(json.dumps(known))
"""


def in_a_process(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that plans by what it measures."""
    env = {**os.environ, "HETRUN_PLANNER": "measured"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True)


def test_a_short_prompt_never_loads_what_only_long_ones_need() -> None:
    done = in_a_process(SHORT)
    answer = json.loads(done.stdout)
    assert 30 <= answer["usage"]["prompt_tokens"] <= 64
    assert json.loads(done.stderr.splitlines()[-1]) == {"torch": False, "highspy": False}
    bucket = answer["plan"]["plans"][0]
    assert bucket["expected"]["predicted_s"] > 0
    assert all(s["predicted_s"] for stage in bucket["stages"] for s in stage)


def test_an_eager_start_measures_everything_that_works_here() -> None:
    found = json.loads(in_a_process(EAGER, str(this_machine().cores)).stdout.splitlines()[-1])
    assert len(found["tokens"]) == 4
    assert found["torch"]
    for plan in found["plan"]["plans"]:
        assert plan["expected"]["predicted_s"] > 0
        for stage in plan["stages"]:
            assert all(s["why"] for s in stage)


WITH_LITTLE = """
import json, sys
from hetrun import LLM
with LLM(eager=True, ram=sys.argv[1], ctx=2048) as llm:
    print(json.dumps("torch" in sys.modules))
"""


@pytest.mark.parametrize(("ram", "loaded"), [("320MiB", False), pytest.param("2GiB", True, marks=exhaustive)])
def test_libraries_that_a_budget_has_no_room_for_are_not_even_tried(ram: str, loaded: bool) -> None:
    """They are where there is no budget, as the test before this one sees."""
    env = {**os.environ, "HETRUN_PLANNER": "measured"}
    command = [sys.executable, "-c", WITH_LITTLE, ram]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) is loaded
