"""A real model's answers to many schemas: always valid, or cut at max_tokens.

python -m tests.tools.schema_answers -m MODEL --schemas 200
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

from hetrun import LLM
from hetrun.client.completion import Completion
from hetrun.client.sampling_params import SamplingParams
from hetrun.sampling.grammar import token_mask
from tests.support.schemas import Schema, catalogue

VALID, CUT, INVALID = "valid", "cut", "INVALID"


@dataclass(slots=True)
class Report:
    """What came of it."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # what is wrong with each that is not valid
    rates: list[float] = field(default_factory=list)  # tokens/s of each answer that was long enough
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # of each call

    def lines(self) -> Iterator[str]:
        """For people."""
        yield ", ".join(f"{n} {kind}" for kind, n in self.kinds.items())
        if self.rates:
            yield f"{np.median(self.rates):.1f} tokens/s (median of the answers)"
        for name, seconds in self.seconds.items():
            us = np.percentile(seconds, [50, 90, 99, 100]) * 1e6
            yield f"{name}: {us[0]:.0f} us, 90 % {us[1]:.0f}, 99 % {us[2]:.0f}, most {us[3]:.0f}"
        yield from self.wrong


def answers(
    llm: LLM, schemas: Sequence[tuple[str, Schema]], max_tokens: int, bound: bool = True, together: int = 1
) -> Report:
    """Ask for an object of each schema at temperature 1, with every token that is allowed in the draw."""

    def ask(seed: int) -> Completion:
        subject, schema = schemas[seed]
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=seed,
            json_schema=schema if bound else None,
        )
        question = f"Write {subject} as JSON that follows this schema: {json.dumps(schema)[:1500]}"
        return llm.chat([{"role": "user", "content": question}], params)

    report = Report()
    with _timed(report.seconds), ThreadPoolExecutor(together) as askers:
        for (_, schema), answer in zip(schemas, askers.map(ask, range(len(schemas))), strict=True):
            kind, reason = judge(schema, answer)
            report.kinds[kind] += 1
            if kind == INVALID and bound:
                report.wrong.append(f"{json.dumps(schema)[:200]}: {answer.text[:200]!r}: {reason}")
            if len(answer.tokens) >= 20:
                report.rates.append(answer.timings.decode_tok_s)
    return report


def judge(schema: Schema, answer: Completion) -> tuple[str, str]:
    """Whether an answer satisfies its schema, and if not, why."""
    if answer.finish_reason == "length":
        return CUT, ""
    try:
        Draft202012Validator(schema).validate(json.loads(answer.text))
    except Exception as error:  # whatever is wrong with the text
        return INVALID, str(error).splitlines()[0]
    return VALID, ""


@contextmanager
def _timed(seconds: dict[str, list[float]]) -> Iterator[None]:
    """Measure every call that works out, reads or moves a mask, on whichever thread it is."""
    kind = token_mask.TokenMasks
    originals = {name: getattr(kind, name) for name in ("_work_out", "begin", "allowed", "accept")}
    for name, original in originals.items():
        setattr(kind, name, _measured(original, seconds[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)


def _measured(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    @wraps(call)
    def measured(*arguments: Any) -> Any:  # noqa: ANN401 - passed on
        began = perf_counter()
        try:
            return call(*arguments)
        finally:
            seconds.append(perf_counter() - began)

    return measured


def main() -> int:
    """0 if every answer is valid or cut."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--together", type=int, default=1, help="questions that are answered at a time")
    parser.add_argument("--compare", action="store_true", help="the same questions without a schema, too")
    asked = parser.parse_args()
    options = {"threads": asked.threads} if asked.threads else {}
    with LLM(asked.model, ctx=4096, **options) as llm:
        schemas = catalogue(asked.schemas)
        report = answers(llm, schemas, asked.max_tokens, together=asked.together)
        print(*report.lines(), sep="\n")
        if asked.compare:
            print("\nwithout a schema")
            print(*answers(llm, schemas, asked.max_tokens, False, asked.together).lines(), sep="\n")
    return 1 if report.kinds[INVALID] else 0


if __name__ == "__main__":
    sys.exit(main())
