"""Mixtures whose experts do not fit into memory: from slots, they say what they say in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hetrun import LLM, SamplingParams
from hetrun.engine.loaded_model import Loaded
from hetrun.executor.loading.load_plan import Deciding, Prepared
from hetrun.executor.planned_model import PlannedModel
from hetrun.prefetch import cached_experts, expert_cache
from hetrun.prefetch.cached_experts import FromExperts
from hetrun.prefetch.expert_records import Records
from hetrun.tools.convert import Wish, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from tests.models import cases_hf, hf

pytestmark = pytest.mark.skipif(not expert_cache.library(), reason="there was no C compiler")
OPTIONS: dict[str, Any] = {"backends": ["llamacpp"], "planner": "static", "ctx": 256, "spec": "off"}
TEXT = [int(t) for t in np.random.default_rng(1).integers(3, 90, 40)]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
ROWS = ["mixtral-plain", "qwen3_moe-normalised", "qwen3_5_moe_text-plain"]


@pytest.fixture(scope="module", params=ROWS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    row = next(row for row in cases_hf.ROWS if str(row) == request.param)
    path = tmp_path_factory.mktemp("cached") / "m.gguf"
    return Path(convert_model(Wish(hf.folder(row), by_option("q8_0"), path, threads=1)).path)


def decide(deciding: Deciding) -> Prepared | None:
    """What is decided where experts do not fit: so small a model would fit anywhere."""
    return deciding._cached("llamacpp")


@contextmanager
def opened(path: Path, share: float, **options: Any) -> Iterator[LLM]:
    """A model of whose experts such a share has slots."""

    def divided(records: Records, room: int, worth: object = None) -> list[int]:
        least = cached_experts.least_slots(records)
        return [max(n, int(share * count)) for n, count in zip(least, records.counts, strict=True)]

    patched = mock.patch.object(cached_experts, "divided", divided)
    with patched, mock.patch.object(Deciding, "decide", decide), LLM(path, **OPTIONS | options) as llm:
        yield llm


def experts_of(llm: LLM) -> FromExperts:
    def found(loaded: Loaded) -> FromExperts:
        assert isinstance(loaded.model, PlannedModel)
        assert loaded.model._experts is not None
        return loaded.model._experts

    return llm.call(found)


def tokens(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(out.tokens) for out in llm.generate([list(p) for p in prompts], GREEDY)]


def test_experts_from_slots_give_the_same_bits(model: Path) -> None:
    """Whatever has a slot: through evictions, prompts, several sequences and shared beginnings."""
    prompts = [TEXT[:8], TEXT[:20], TEXT, TEXT[5:30]]
    with LLM(model, **OPTIONS, deterministic=True) as llm:
        held, logits = tokens(llm, prompts), llm.logits(TEXT)
    for share in (0.0, 0.4, 1.0):
        with opened(model, share, deterministic=True) as llm:
            assert tokens(llm, prompts) == held
            assert [tokens(llm, [p])[0] for p in prompts] == held
            np.testing.assert_array_equal(llm.logits(TEXT), logits)
            counts = experts_of(llm).cache.counts
            assert counts.wanted > 0
            assert 0 < counts.missed < counts.wanted
