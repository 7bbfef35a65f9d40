"""--deterministic: one numeric path, whatever runs beside it and however a step is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetrun import LLM, SamplingParams
from tests.models import cases, cases_hf, tiny
from tests.support.part_backends import backends
from tests.support.rig import Case, model_file

PROMPTS = [tiny.random_tokens(n, seed=n) for n in (3, 37, 12)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
FILES = (cases.GQA, cases.QUANTISED[3], cases.QUANTISED[5])
MODELS = [
    *(pytest.param(case, name, id=f"{case}-{name}") for case in FILES for name in backends()),
    *cases_hf.crossed(cases_hf.NAMES, cases_hf.EACH, backends()),
]

LONG = replace(cases.QUANTISED[3], name="long", context=1024)


def open_llm(case: Case, backend: str, ubatch: int | None = None, threads: int = 1) -> LLM:
    file = model_file(case)
    return LLM(file, backends=[backend], deterministic=True, ubatch=ubatch, threads=threads)


@pytest.mark.parametrize(("case", "backend"), MODELS)
def test_answers_together_are_answers_alone(case: Case, backend: str) -> None:
    with open_llm(case, backend, threads=2) as llm:
        together = [c.tokens for c in llm.generate(PROMPTS, GREEDY)]
        alone = [llm.generate([prompt], GREEDY)[0].tokens for prompt in PROMPTS]
        sampled = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
        drawn = [c.tokens for c in llm.generate(PROMPTS, sampled)]
        assert drawn == [llm.generate([prompt], sampled)[0].tokens for prompt in PROMPTS]
    assert together == alone
    assert all(len(tokens) == 12 for tokens in together)


@pytest.mark.parametrize(("case", "backend"), MODELS)
def test_logits_do_not_depend_on_the_ubatch(case: Case, backend: str) -> None:
    found = []
    for ubatch in (1, 5, 512):
        with open_llm(case, backend, ubatch) as llm:
            found.append(llm.logits(PROMPTS[1]))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@pytest.mark.skipif("llamacpp" not in backends(), reason="llama-cpp-python is not installed")
def test_nor_where_a_pass_reaches_into_more_keys_than_its_first_rows_see() -> None:
    """Attention takes keys piece by piece; passes of 20 tokens lie across the edges, those of 32 never do."""
    found, text = [], tiny.random_tokens(700, seed=5)
    for ubatch in (20, 31, 32):
        with open_llm(LONG, "llamacpp", ubatch, threads=2) as llm:
            found.append(llm.logits(text))
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(found[1], found[2])


@pytest.mark.parametrize(("case", "backend"), MODELS)
def test_an_answer_continues_what_a_prompt_would_have_said(case: Case, backend: str) -> None:
    """Teacher-forced along its own answer, the model chooses the same tokens."""
    with open_llm(case, backend) as llm:
        prompt = PROMPTS[2]
        answer = llm.generate([prompt], GREEDY)[0].tokens
        logits = llm.logits([*prompt, *answer[:-1]])
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == answer
