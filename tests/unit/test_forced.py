"""Answers that are known before: the sampler looks as always, and the script's token is taken."""

from __future__ import annotations

import numpy as np

from hetrun.client.sampling_params import SamplingParams
from hetrun.graph.top_logits import TopCandidates
from hetrun.sampling.batch import choose
from hetrun.sampling.forced import ForcedSampler
from hetrun.sampling.sampler import make_sampler

ROW = np.array([0.0, 3.0, 1.0, 2.0], np.float32)


def greedy() -> ForcedSampler:
    return ForcedSampler(make_sampler(SamplingParams(temperature=0, seed=5)), (3, 0, 2))


def test_the_script_is_taken_and_then_what_the_real_one_chooses() -> None:
    sampler, found = greedy(), []
    for _ in range(4):
        found.append(sampler.sample(ROW).token)
        assert sampler.sample(ROW).token == found[-1]  # looking changes nothing
        sampler.accept(found[-1])
    assert found == [3, 0, 2, 1]
    assert (sampler.seed, sampler.finished) == (5, False)


def test_a_step_is_what_it_is_for_users() -> None:
    real = make_sampler(SamplingParams(temperature=0))
    assert greedy().enough == real.enough == 1
    assert greedy().sample(TopCandidates(np.array([1], np.int32), np.array([3.0], np.float32))).token == 3
    # Rows of several are not chosen from together: each has its own script.
    assert choose([greedy(), greedy()], np.stack([ROW, ROW])) == [None, None]


def test_tokens_are_taken_back_and_clones_go_their_own_way() -> None:
    sampler = greedy()
    sampler.accept(3)
    other = sampler.clone()
    sampler.accept(0)
    assert (sampler.sample(ROW).token, other.sample(ROW).token) == (2, 0)
    sampler.rollback(2)
    assert (sampler.sample(ROW).token, other.sample(ROW).token) == (3, 0)
