"""Prompts that were computed are not computed again: by the next request, and by the next process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetrun import SamplingParams, UserError
from hetrun.api.local_model import LocalModel
from hetrun.client.events import GenerateRequest
from hetrun.engine import factory
from hetrun.engine.loaded_model import LoadedModel, prompts_of
from hetrun.errors import OptionError
from hetrun.memory.kv.prefix_cache import LEAST
from tests.engine.fakemodel import FakeModel, loaded as fake
from tests.models.cases import GQA, WIDE
from tests.models.tiny import TinyLlama, random_tokens
from tests.support.rig import model_file

PROMPT = random_tokens(60, seed=1)
ANSWER = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., LocalModel]:
    """A model with a file of prompts; deterministic, so that answers are the same to the last bit."""

    def open_(case: TinyLlama = GQA, **options: object) -> LocalModel:
        given: dict[str, Any] = {
            "ctx": 128,
            "backends": ["reference"],
            "deterministic": True,
            "precision": "fast",
        }
        given |= {"prompt_cache": tmp_path / "prompts"} | options
        return LocalModel(model_file(case), **given)

    return open_


def entries(loaded: LoadedModel) -> list[list[int]]:
    assert loaded.prefixes
    return [e.tokens.tolist() for e in loaded.prefixes.entries()]


def test_the_next_request_begins_where_the_last_one_was(opened: Callable[..., LocalModel]) -> None:
    with opened() as llm:
        first = llm.generate([PROMPT], ANSWER)[0]
        assert first.usage.cached_tokens == 0
        again = llm.generate([PROMPT], ANSWER)[0]
        assert (again.usage.cached_tokens, again.tokens) == (len(PROMPT) - 1, first.tokens)
        longer = llm.generate([[*PROMPT, *first.tokens, 3]], ANSWER)[0]
        assert longer.usage.cached_tokens == len(PROMPT) + 4  # the last token of an answer has no row
    with opened(prompt_cache=None) as llm:
        assert llm.generate([[*PROMPT, *first.tokens, 3]], ANSWER)[0].tokens == longer.tokens


def test_the_next_process_begins_where_the_last_one_was(
    opened: Callable[..., LocalModel], tmp_path: Path
) -> None:
    with opened() as llm:
        first = [llm.generate([[*PROMPT[:n], n]], ANSWER)[0] for n in (60, 40, 20)]
        kept = llm.call(entries)
    assert os.listdir(tmp_path) == ["prompts"]
    with opened() as llm:
        assert llm.call(entries) == kept
        again = [llm.generate([[*PROMPT[:n], n]], ANSWER)[0] for n in (60, 40, 20)]
        assert [c.usage.cached_tokens for c in again] == [60, 40, 20]
        assert [c.tokens for c in again] == [c.tokens for c in first]


def test_who_still_runs_at_the_end_is_kept_as_well(opened: Callable[..., LocalModel]) -> None:
    """It may have begun with an entry, and taken it."""
    begun = threading.Event()
    with opened() as llm:
        llm.generate([PROMPT[:40]], ANSWER)
        request = GenerateRequest(SamplingParams(max_tokens=60, ignore_eos=True), tokens=tuple(PROMPT))
        llm.submit(request, lambda event: begun.set())
        assert begun.wait(30)
    with opened() as llm:
        assert llm.call(entries)[0][: len(PROMPT)] == PROMPT


@pytest.mark.parametrize(
    "other", [{"case": WIDE}, {"kv_type": "f32"}, {"deterministic": False}, {"precision": "exact"}]
)
def test_prompts_of_another_model_or_of_other_options_are_not_used(
    opened: Callable[..., LocalModel],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    other: dict[str, object],
) -> None:
    with opened() as llm:
        llm.generate([PROMPT], ANSWER)
    with opened(**other) as llm:
        assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
            f"{tmp_path / 'prompts'} belongs to another model, or to other options of it; "
            "prompts are computed again"
        ]
        assert llm.generate([PROMPT], ANSWER)[0].usage.cached_tokens == 0
    caplog.clear()
    with opened(**other) as llm:  # it has been replaced
        assert llm.generate([PROMPT], ANSWER)[0].usage.cached_tokens == len(PROMPT) - 1


def test_a_damaged_file_is_a_fresh_start(
    opened: Callable[..., LocalModel], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with opened() as llm:
        llm.generate([PROMPT], ANSWER)
    path = tmp_path / "prompts"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with opened() as llm:
        assert llm.call(entries) == []
        assert llm.call(lambda loaded: loaded.model.kv.used_bytes) == 0  # type: ignore[attr-defined]
        assert "prompts is damaged: its checksum is wrong; prompts are computed again" in caplog.text
    assert path.read_bytes() == content  # nothing was computed, so nothing replaces it


def test_a_file_of_something_else_stays(
    opened: Callable[..., LocalModel], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("a shopping list")
    with opened() as llm:
        llm.generate([PROMPT], ANSWER)
        with pytest.raises(UserError, match=r"prompts is not a prompt cache$"):
            llm.load_prompts(tmp_path / "prompts")
    assert (tmp_path / "prompts").read_text() == "a shopping list"
    assert "prompts is not a prompt cache; prompts are computed again" in caplog.text
    assert "a file of that name exists and is not a prompt cache; choose another name" in caplog.text


def test_prompts_are_saved_on_request(opened: Callable[..., LocalModel], tmp_path: Path) -> None:
    path = tmp_path / "mine"
    with opened(prompt_cache=None) as llm:
        assert llm.save_prompts(path) == 0
        assert not path.exists()
        llm.generate([PROMPT], ANSWER)
        assert llm.save_prompts(path) == 1
        assert llm.load_prompts(path) == 1  # which it has already
        assert len(llm.call(entries)) == 1
    with opened(prompt_cache=None) as llm:
        assert llm.load_prompts(tmp_path / "none") == 0
        assert llm.load_prompts(path) == 1
        assert llm.generate([PROMPT], ANSWER)[0].usage.cached_tokens == len(PROMPT) - 1


def test_a_file_without_a_folder_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"^--prompt-cache .*none/p: the folder .*none does not exist; create it$"
    ):
        LocalModel(model_file(GQA), backends=["reference"], prompt_cache=tmp_path / "none" / "p")


def test_what_a_library_runs_as_a_whole_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="prompts cannot be saved: this model runs through libllama"):
        prompts_of(fake(FakeModel()))
    factory.remembering(None, tmp_path / "p")()
    assert os.listdir(tmp_path) == []


def test_the_probabilities_of_a_prompt_are_computed_whole(opened: Callable[..., LocalModel]) -> None:
    with opened() as llm:
        scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        first, again = (llm.generate([PROMPT], scored)[0] for _ in range(2))
        assert again.usage.cached_tokens == 0
        assert again.prompt_logprobs == first.prompt_logprobs
        assert len(again.prompt_logprobs) == len(PROMPT)
        # Others may begin with what it computed.
        assert llm.generate([PROMPT], ANSWER)[0].usage.cached_tokens == len(PROMPT) - 1


def test_short_prompts_are_not_kept(opened: Callable[..., LocalModel]) -> None:
    with opened() as llm:
        llm.generate([PROMPT[: LEAST - 5]], ANSWER)
        assert llm.call(entries) == []
