"""Choosing among the greatest logits is choosing from the row, where the sampler looks at no others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import BackendError
from hetrun.graph.top_logits import TopCandidates, TopLogits
from hetrun.sampling.interface import Sampler
from hetrun.sampling.sampler import make_sampler
from tests.support.examples import examples

WIDTH = 300


def best(row: np.ndarray, k: int) -> TopCandidates:
    """As a device gives them: what is no number first, equals by ascending id."""
    ids = np.lexsort((np.arange(len(row)), -row, ~np.isnan(row)))[:k].astype(np.int32)
    return TopCandidates(ids, row[ids])


def sampler(**given: object) -> Sampler:
    return make_sampler(SamplingParams(**given))  # type: ignore[arg-type]


USUAL = st.fixed_dictionaries(
    {"seed": st.integers(0, 1 << 20), "top_k": st.sampled_from([1, 2, 40, 128])},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
        "top_p": st.sampled_from([0.1, 0.9, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
    },
)


@given(USUAL, st.integers(0, 1 << 20), st.sampled_from(["usual", "alike", "mostly impossible"]))
@settings(max_examples=examples(300))
def test_the_same_token_as_from_the_whole_row(params: dict[str, object], seed: int, kind: str) -> None:
    row = np.random.default_rng(seed).normal(0, 3, WIDTH).astype(np.float32)
    if kind == "alike":
        row = np.round(row)
    elif kind == "mostly impossible":
        row[np.random.default_rng(seed).random(WIDTH) < 0.95] = -np.inf
        row[7] = 0.0
    mine, whole = sampler(**params), sampler(**params)
    assert mine.enough
    for _ in range(5):
        token = whole.sample(row)
        assert mine.sample(best(row, mine.enough)) == token
        assert mine.sample(best(row, 256)) == token, "more than enough"
        for each in (mine, whole):
            each.accept(token.token)


@pytest.mark.parametrize("given", [
    {"temperature": 0.8, "top_k": 0}, {"temperature": 0.8, "top_k": 200}, {"logprobs": 2},
    {"logit_bias": {3: 1.0}}, {"repeat_penalty": 1.1}, {"mirostat": 2}, {"typical_p": 0.5},
    {"temperature": 0, "frequency_penalty": 0.5}, {"xtc_probability": 0.5},
], ids=str)  # fmt: skip
def test_who_looks_at_more_wants_whole_rows(given: dict[str, object]) -> None:
    assert sampler(**given).enough == 0


def test_the_usual_ones_do_with_few() -> None:
    assert sampler(temperature=0).enough == 1
    assert sampler().enough == 40


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("given", [{"temperature": 0}, {"seed": 1}], ids=str)
def test_what_is_no_number_is_heard_of(bad: float, given: dict[str, object]) -> None:
    row = np.zeros(WIDTH, np.float32)
    row[50] = bad
    chosen = sampler(**given)
    with pytest.raises(BackendError, match="the logits hold"):
        chosen.sample(row)
    with pytest.raises(BackendError, match="the logits hold"):
        chosen.sample(best(row, chosen.enough))


def test_rows_are_cut_as_arrays_are() -> None:
    ids, logits = np.arange(12, dtype=np.int32).reshape(4, 3), np.ones((4, 3), np.float32)
    found = TopLogits(ids, logits)
    assert len(found) == 4
    assert [row.ids.tolist() for row in found[1:3]] == [[3, 4, 5], [6, 7, 8]]
    assert len(found[-1 - 1 :]) == 2
