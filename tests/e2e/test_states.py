"""Models whose layers keep states: what is shared, kept, given up and computed again changes no token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.client.completion import Completion
from hetrun.engine.loaded_model import LoadedModel
from hetrun.executor.planned_model import PlannedModel
from hetrun.memory.kv.cache import KvCache
from tests.models import cases_hf, hf, tiny

(ROW,) = (row for row in cases_hf.ROWS if str(row) == "qwen3_5_text-plain")
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SYSTEM = tiny.random_tokens(100, seed=1)
QUESTIONS = [tiny.random_tokens(24, seed=n) for n in (2, 3, 4)]


def opened() -> LocalModel:
    return LocalModel(hf.folder(ROW), backends=["llamacpp"], deterministic=True, spec="off")


def ask(llm: LocalModel, tokens: Sequence[int]) -> Completion:
    return llm.generate([list(tokens)], PARAMS)[0]


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalModel]:
    """One that keeps nothing from one prompt to the next: what each text's answer is."""
    with opened() as llm:
        yield llm


def fresh(llm: LocalModel, tokens: Sequence[int]) -> list[int]:
    """The answer, computed from the first token on: such a prompt shares nothing."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=0)
    return llm.generate([list(tokens)], params)[0].tokens


def test_the_next_turn_of_a_chat_begins_where_the_last_one_ended(alone: LocalModel) -> None:
    with opened() as llm:
        text = [*SYSTEM, *QUESTIONS[0]]
        for question in QUESTIONS:
            found = ask(llm, text)
            assert found.tokens == fresh(alone, text)
            text = [*text, *found.tokens, *question]
        last = ask(llm, text)
    assert last.usage.cached_tokens == len(text) - len(QUESTIONS[-1]) - 1
    assert last.tokens == fresh(alone, text)


def test_an_answer_that_is_written_anew_begins_just_before_it(alone: LocalModel) -> None:
    with opened() as llm:
        text = [*SYSTEM, *QUESTIONS[0]]
        ask(llm, text)
        other = [*text[:-8], *tiny.random_tokens(20, seed=9)]  # the turn's end is another one now
        found = ask(llm, other)
    assert found.usage.cached_tokens == len(text) - 16
    assert found.tokens == fresh(alone, other)


def test_a_beginning_that_several_share_is_computed_twice_at_most(alone: LocalModel) -> None:
    with opened() as llm:
        found = [ask(llm, [*SYSTEM, *question]) for question in QUESTIONS]
    assert [c.usage.cached_tokens for c in found] == [0, 0, len(SYSTEM)]
    assert [c.tokens for c in found] == [fresh(alone, [*SYSTEM, *question]) for question in QUESTIONS]


def test_several_at_once_are_each_alone(alone: LocalModel) -> None:
    texts = [[*SYSTEM[: 40 * n], *question] for n, question in enumerate(QUESTIONS)]
    with opened() as llm:
        found = [c.tokens for c in llm.generate(texts, PARAMS)]
    assert found == [fresh(alone, text) for text in texts]


def test_prompts_come_back_from_a_file(alone: LocalModel, tmp_path: Path) -> None:
    file, text = tmp_path / "prompts", [*SYSTEM, *QUESTIONS[0]]
    with opened() as llm:
        first = ask(llm, text)
        assert llm.save_prompts(file) == 1
    again = [*text, *first.tokens, *QUESTIONS[1]]
    with opened() as llm:
        assert llm.load_prompts(file) == 1
        found = ask(llm, again)
    assert found.usage.cached_tokens == len(text) + len(first.tokens) - 1
    assert found.tokens == fresh(alone, again)


def test_memory_that_runs_out_changes_no_token(alone: LocalModel) -> None:
    """Checkpoints and cached prompts go, requests give their places up and come back; drafts have no room."""
    texts = [[*SYSTEM[: 11 * n], *tiny.random_tokens(9 * n, seed=n)] for n in range(1, 9)]
    expected = [fresh(alone, text) for text in texts]
    with opened() as llm:
        llm.call(lambda loaded: squeeze(loaded, states=5))
        for _ in range(2):
            found = llm.generate(texts, PARAMS)
            assert [c.tokens for c in found] == expected
        assert llm.call(lambda loaded: kv_of(loaded).used_bytes <= (kv_of(loaded).limit_bytes or 0))


def kv_of(loaded: LoadedModel) -> KvCache:
    model = loaded.model
    assert isinstance(model, PlannedModel)
    return model.kv


def squeeze(loaded: LoadedModel, states: int) -> None:
    """Leave room for that many states beside the rows of one full sequence."""
    kv = kv_of(loaded)
    assert kv.states
    kv.limit_bytes = kv.least_bytes + states * kv.states.bytes
