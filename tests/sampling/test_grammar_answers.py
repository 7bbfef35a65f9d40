"""A real model, bound to schemas: `python -m tests.tools.schema_answers` asks for all of them."""

from __future__ import annotations

import pytest

from hetrun import LLM
from tests.support.schemas import catalogue
from tests.support.tiers import first
from tests.tools.make_model import smollm2_file
from tests.tools.schema_answers import INVALID, VALID, answers


@pytest.mark.slow
@pytest.mark.parametrize("apart", first([42, 14]))
def test_answers_at_temperature_one_are_valid_or_cut(apart: int) -> None:
    schemas = catalogue(200)[5::apart]
    with LLM(smollm2_file(), ctx=2048, threads=1) as llm:
        report = answers(llm, schemas, max_tokens=100, together=4)
    assert not report.kinds[INVALID], "\n".join(report.wrong)
    assert report.kinds[VALID] > len(schemas) // 5


def test_the_schemas_are_distinct() -> None:
    assert len(catalogue(200)) == 200
