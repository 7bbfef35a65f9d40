"""What `hetrun plan` says beside what a run with the same options does.

    python -m tests.tools.plan_table demo 1b-q4_k_m.gguf

For each model five budgets (none, and parts of what all of it takes) with four sets of --ctx, --kv-type and
--threads. Each runs twice: the first run measures, the second is compared with the plan made between both.
Each plan and each run is a process of its own; all share a cache that is empty at first. No tokens are
guessed, so each pass gives one. Weights in memory, bytes that a token reads (the run counts whole pages) and
context must be the same. The last two columns: the speed of the run divided by that of the plan, and the
speed of a third run divided by that of the second. Only the machine causes this second ratio, so no plan can
be nearer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

SHARES = (None, 0.55, 0.75, 0.95, 1.3)  # of what the model takes with everything in memory
SETS: tuple[Mapping[str, object], ...] = (
    {"spec": "off"},
    {"ctx": 2048, "spec": "off"},
    {"kv_type": "q8_0", "threads": 1, "spec": "off"},
    {"ctx": 1024, "kv_type": "q8_0", "threads": 2, "spec": "off"},
)
PROMPT = (
    "Tell me about the rivers of the world, from the longest one on, and about the people beside them. " * 3
)
ANSWER = 96

PLAN = """
import json, sys
from hetrun.api.local_model import make_plan
from hetrun.config import Settings
print(json.dumps(make_plan(Settings.resolve(environ=None, **json.loads(sys.argv[1]))).to_json()))
"""
RUN = """
import json, sys
from dataclasses import asdict
from hetrun import LLM, SamplingParams
options, prompt, n = json.loads(sys.argv[1])
with LLM(**options) as llm:
    plan = llm.plan.to_json()
    done = llm.generate([prompt], SamplingParams(max_tokens=n, temperature=0, ignore_eos=True))[0]
    streaming = llm.stats.streaming
    print(json.dumps({
        "plan": plan, "context": llm.info.context, "answers": done.timings.decode_tok_s,
        "prompts": done.timings.prompt_tok_s, "streaming": streaming and asdict(streaming)}))
"""


@dataclass(frozen=True)
class Row:
    """One combination: what was planned, what ran."""

    options: Mapping[str, object]
    plan: Mapping[str, Any]
    run: Mapping[str, Any]
    again: Mapping[str, Any]

    @property
    def weights(self) -> tuple[float, float]:
        """In memory, MiB."""
        streaming = self.run["streaming"]
        planned = self.plan["weights"]
        there = planned["total"] if not streaming else streaming["locked_bytes"]
        return planned["short"] / 2**20, there / 2**20

    @property
    def read(self) -> tuple[float, float]:
        """Of each token, MB."""
        streaming = self.run["streaming"]
        return self.plan["weights"]["read"] / 1e6, (streaming["bytes_per_token"] if streaming else 0) / 1e6

    @property
    def context(self) -> tuple[int, int]:
        """Tokens."""
        return self.plan["context"], self.run["context"]

    @property
    def speed(self) -> tuple[float | None, float]:
        """Tokens per second of answers."""
        rates = self.plan["rates"] or {}
        return rates.get("answers"), self.run["answers"]

    def __str__(self) -> str:
        planned, ran = self.speed
        ratio = f"{ran / planned:.2f}" if planned else "-"
        words = " ".join(f"{name}={value}" for name, value in self.options.items())
        return (
            f"{words:<70} {self.weights[0]:>8.1f} {self.weights[1]:>8.1f}  {self.read[0]:>8.1f} "
            f"{self.read[1]:>8.1f}  {self.context[0]:>7} {self.context[1]:>7}  "
            f"{planned or 0:>7.1f} {ran:>7.1f} {ratio:>5} {self.again['answers'] / ran:>5.2f}"
        )


def rows(model: str) -> Iterator[Row]:
    """Every combination of a model."""
    whole = sum_of(planned({"model": model}))
    for share, others in product(SHARES, SETS):
        options = {"model": model, **({"ram": f"{int(share * whole) >> 20}MiB"} if share else {}), **others}
        try:
            ran(options)
            yield Row(options, planned(options), ran(options), ran(options))
        except RuntimeError as e:
            print(f"{options}: {e}", flush=True)


def planned(options: Mapping[str, object]) -> dict[str, Any]:
    """What `hetrun plan --json` says."""
    return _child(PLAN, options)


def ran(options: Mapping[str, object], tokens: int = ANSWER) -> dict[str, Any]:
    """What a run of one prompt did."""
    return _child(RUN, [options, PROMPT, tokens])


def sum_of(plan: Mapping[str, Any]) -> int:
    """What everything takes that a plan with all weights in memory has, for a text of a usual length."""
    memory: Mapping[str, int] = plan["memory"]
    parts = ("interpreter", "libraries", "weights", "graphs and scratch", "helper processes", "reserve")
    return sum(memory.get(name, 0) for name in parts) + int(memory["KV of one full sequence"] * 0.5)


def _child(code: str, argument: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(argument)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """All models that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    arguments = parser.parse_args()
    print(f"{'':<70} weights, MiB       MB a token          context          tokens/s")
    print(
        f"{'options':<70} {'plan':>8} {'run':>8}  {'plan':>8} {'run':>8}  {'plan':>7} {'run':>7}  "
        f"{'plan':>7} {'run':>7} ratio again"
    )
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for model in arguments.models:
            for row in rows(model):
                print(row, flush=True)
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
