"""What a sampler remembers: taking tokens back, forking, constraints; and what no chain may do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings, strategies as st

from hetrun.client.sampling_params import SAMPLERS, SamplingParams
from hetrun.errors import BackendError, OptionError
from hetrun.sampling.interface import Sampler
from hetrun.sampling.logprobs import of_prompt
from hetrun.sampling.sampler import ChainSampler, make_sampler
from tests.support.examples import examples

Row = npt.NDArray[np.float32]

SIZE = 120
PIECES = [bytes([i]) for i in range(SIZE)]

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "default": {},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "penalties of all": {"repeat_penalty": 1.5, "repeat_last_n": -1},
    "greedy with penalties": {"temperature": 0, "repeat_penalty": 1.5, "repeat_last_n": 3},
    "dry": {"dry_multiplier": 0.8, "dry_penalty_last_n": -1, "dry_allowed_length": 0, "temperature": 0.3},
    "greedy with dry": {"dry_multiplier": 2, "temperature": 0},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "typical": {"typical_p": 0.5, "top_k": 0},
    "top_n_sigma": {"top_n_sigma": 1.0, "top_k": 0},
    "dynamic temperature": {"dynatemp_range": 0.7, "top_k": 0},
    "mirostat 1": {"mirostat": 1, "mirostat_eta": 0.5, "mirostat_tau": 3},
    "mirostat 2": {"mirostat": 2, "mirostat_eta": 0.5, "mirostat_tau": 3},
    "any order": {"samplers": tuple(reversed(SAMPLERS)), "repeat_penalty": 1.2, "typical_p": 0.9},
    "nothing": {"samplers": ()},
}


def rows(n: int) -> list[Row]:
    random = np.random.default_rng(7)
    return [random.normal(0, 2, SIZE).astype(np.float32) for _ in range(n)]


ROWS = rows(60)


def sampler_of(way: str, prompt: Sequence[int] = (1, 2, 3, 1, 2), **more: Any) -> Sampler:  # noqa: ANN401
    params = SamplingParams(**{"seed": 5, **WAYS[way], **more})
    return make_sampler(
        params, prompt=prompt, context=50, pieces=lambda: PIECES, encode=lambda text: [*text.encode()]
    )


def texts(sampler: Sampler, start: int, n: int) -> list[int]:
    """The next n tokens, the first of them at `start` of the answer."""
    found = []
    for row in ROWS[start : start + n]:
        found.append(sampler.sample(row).token)
        sampler.accept(found[-1])
    return found


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=examples(20))
@given(detours=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=4, max_size=4))
@example(detours=[(20, 5), (1, 0), (0, 3), (7, 1)])
def test_taking_tokens_back_leaves_no_trace(way: str, detours: list[tuple[int, int]]) -> None:
    straight, winding = sampler_of(way), sampler_of(way)
    expected = texts(straight, 0, 40)
    done = 0
    for n, others in detours:
        for token in range(others):  # speculated, and wrong
            winding.sample(ROWS[-1])
            winding.accept(token)
        winding.rollback(others)
        ahead = texts(winding, done, n)
        winding.rollback(n)
        for token in ahead[: n // 2]:  # taken again without being sampled
            winding.accept(token)
        done += n // 2
    assert texts(winding, done, 40 - done) == expected[done:]


@pytest.mark.parametrize("way", WAYS)
def test_a_clone_goes_its_own_way(way: str) -> None:
    sampler = sampler_of(way)
    texts(sampler, 0, 10)
    before, after = sampler.clone(), sampler.clone()
    assert sampler.seed == before.seed
    expected = texts(after, 10, 20)
    for token in (3, 4, 5):
        sampler.accept(token)
    sampler.rollback(3)
    assert texts(sampler, 10, 20) == expected == texts(before, 10, 20)
    before.rollback(30)
    assert texts(before, 0, 10) == texts(sampler_of(way), 0, 10)


def test_a_clone_after_a_sample_knows_what_it_sampled() -> None:
    sampler = sampler_of("mirostat 2")
    token = sampler.sample(ROWS[0]).token
    clone = sampler.clone()
    sampler.accept(token)
    clone.accept(token)
    assert isinstance(sampler, ChainSampler)
    assert isinstance(clone, ChainSampler)
    assert sampler.mu == clone.mu != 6.0


def test_mirostat_learns_nothing_of_tokens_it_did_not_sample() -> None:
    sampler = sampler_of("mirostat 1")
    assert isinstance(sampler, ChainSampler)
    sampler.accept(4)
    assert sampler.mu == 6.0
    sampler.sample(ROWS[0])
    sampler.accept(int(ROWS[0].argmin()))
    assert sampler.mu == 6.0


@pytest.mark.parametrize("way", WAYS)
def test_sampling_changes_neither_sampler_nor_row(way: str) -> None:
    sampler, row = sampler_of(way), ROWS[0].copy()
    row.flags.writeable = False
    assert len({sampler.sample(row).token for _ in range(5)}) == 1
    assert sampler.sample(ROWS[0]) == sampler.clone().sample(ROWS[0])


@pytest.mark.parametrize("way", ["penalties", "dry"])
def test_the_prompt_counts_as_text(way: str) -> None:
    chosen = {tuple(texts(sampler_of(way, prompt), 0, 30)) for prompt in [(), (1, 2, 3), tuple(range(SIZE))]}
    assert len(chosen) > 1


def test_how_far_penalties_look_back() -> None:
    """Each token is a bit less probable than the one before it; penalised ones are out of question."""
    row = -np.arange(SIZE, dtype=np.float32)
    for last_n, first in {1: 0, 3: 0, 4: 1, 0: 0, -1: 2, 1000: 2}.items():
        sampler = sampler_of("greedy", (1, 0, 9, 8, 7), repeat_last_n=last_n, presence_penalty=50.0)
        assert sampler.sample(row).token == first
    # The tokens of the answer push those of the prompt out.
    sampler = sampler_of("greedy", (0,), repeat_last_n=2, presence_penalty=50.0)
    assert texts_of(sampler, row, 5) == [1, 2, 0, 1, 2]


def texts_of(sampler: Sampler, row: Row, n: int) -> list[int]:
    found = []
    for _ in range(n):
        found.append(sampler.sample(row).token)
        sampler.accept(found[-1])
    return found


def test_greedy_sees_what_comes_before_it() -> None:
    flat = np.zeros(SIZE, np.float32)
    flat[[4, 5, 6]] = 3, 2.9, 2.8
    assert sampler_of("greedy", xtc_probability=1, xtc_threshold=0.1).sample(flat).token == 6
    assert sampler_of("greedy", (4, 4), repeat_penalty=1.1).sample(flat).token == 5
    # What followed "9 9" was a 4; behind a single 9 it would not repeat enough.
    assert sampler_of("greedy", (9, 9, 4, 9, 9), dry_multiplier=1).sample(flat).token == 5
    assert sampler_of("greedy", (1, 9, 4, 8, 9), dry_multiplier=1).sample(flat).token == 4


# --- what no chain may do


@st.composite
def any_params(draw: Callable[[st.SearchStrategy[Any]], Any]) -> SamplingParams:
    names = draw(st.permutations(SAMPLERS))
    return SamplingParams(
        samplers=names[: draw(st.integers(0, len(names)))],
        temperature=draw(st.sampled_from([0, 1e-6, 0.7, 1, 1e300])),
        top_k=draw(st.sampled_from([0, 1, 3, 1000])),
        top_p=draw(st.sampled_from([0.0, 0.5, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.3, 1.0])),
        typical_p=draw(st.sampled_from([0.0, 0.5, 1.0])),
        top_n_sigma=draw(st.sampled_from([-1, 1e-6, 1.0, 1e6])),
        xtc_probability=draw(st.sampled_from([0.0, 0.5, 1.0])),
        xtc_threshold=draw(st.sampled_from([0.0, 0.1, 0.5])),
        min_keep=draw(st.sampled_from([0, 1, 10**9])),
        dynatemp_range=draw(st.sampled_from([0.0, 0.5, 1e6])),
        dynatemp_exponent=draw(st.sampled_from([0.0, 1.0, 1e6])),
        repeat_penalty=draw(st.sampled_from([1e-6, 1.0, 1e6])),
        frequency_penalty=draw(st.sampled_from([-1e6, 0.0, 1e6])),
        presence_penalty=draw(st.sampled_from([-1e6, 0.0, 1e6])),
        repeat_last_n=draw(st.sampled_from([-1, 0, 5, 10**9])),
        dry_multiplier=draw(st.sampled_from([0.0, 1e6])),
        dry_base=draw(st.sampled_from([0.0, 1.0, 1.0000001, 2.0, 1e6])),
        dry_allowed_length=draw(st.sampled_from([0, 1, 10**9])),
        dry_penalty_last_n=draw(st.sampled_from([-1, 0, 5, 10**9])),
        mirostat=draw(st.sampled_from([0, 0, 1, 2])),
        mirostat_tau=draw(st.sampled_from([0.0, 5.0, 1e6])),
        mirostat_eta=draw(st.sampled_from([0.0, 0.1, 1e6])),
        seed=3,
    )


def hard_row(kind: str, size: int) -> Row:
    most = np.finfo(np.float32).max
    row = np.random.default_rng(1).normal(0, 3, size).astype(np.float32)
    match kind:
        case "one possible":
            row[np.arange(size) != size // 2] = -np.inf
        case "few possible":
            row[np.arange(size) % 7 != 0] = -np.inf
        case "equal":
            row[:] = 1
        case "greatest":
            row[: size // 2] = most
        case "least":
            row[size // 3 :] = -most
    return row


@settings(max_examples=examples(100))
@given(
    params=any_params(),
    kind=st.sampled_from(["plain", "one possible", "few possible", "equal", "greatest", "least"]),
    size=st.sampled_from([1, 2, 50, 2000]),
    prompt=st.lists(st.integers(0, 1), max_size=20),
)
def test_a_chain_always_leaves_a_token_that_is_possible(
    params: SamplingParams, kind: str, size: int, prompt: list[int]
) -> None:
    row = hard_row(kind, size)
    sampler = make_sampler(params, prompt=prompt, context=100)
    for _ in range(4):
        token = sampler.sample(row).token
        assert row[token] > -np.inf
        sampler.accept(token)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("value", "said"), [(np.nan, "hold NaN"), (np.inf, "infinite"), (-np.inf, "no token to choose")]
)
def test_bad_logits_are_named(way: str, value: float, said: str) -> None:
    for place in (0, SIZE // 2, SIZE - 1):
        row = ROWS[0].copy()
        row[place if value != -np.inf else slice(None)] = value
        with pytest.raises(BackendError, match=said):
            sampler_of(way, logit_bias={3: 1.0}).sample(row)


# --- constraints


class Even:
    """Allows even tokens, in the order of the calls that are promised."""

    def __init__(self, calls: list[str], length: int = 0) -> None:
        self.calls, self.length = calls, length

    def begin(self) -> None:
        self.calls.append("begin")

    def allowed(self) -> npt.NDArray[np.bool_]:
        self.calls.append("allowed")
        even: npt.NDArray[np.bool_] = np.arange(SIZE - 20) % 2 == 0  # a vocabulary shorter than the row
        return even

    @property
    def finished(self) -> bool:
        return self.length >= 3

    def accept(self, token: int) -> None:
        self.calls.append(f"accept {token}")
        self.length += 1

    def rollback(self, n: int) -> None:
        self.calls.append(f"rollback {n}")
        self.length -= n

    def clone(self) -> Even:
        return Even([], self.length)


@pytest.mark.parametrize("way", WAYS)
def test_a_constraint_comes_before_everything(way: str) -> None:
    calls: list[str] = []
    params = SamplingParams(**{"seed": 1, "logprobs": 2, **WAYS[way]})
    sampler = make_sampler(params, constraint=Even(calls))
    assert sampler.finished is False
    for row in ROWS[:3]:
        choice = sampler.sample(row)
        assert choice.token % 2 == 0
        assert choice.token < SIZE - 20
        assert choice.top[0][0] == row.argmax()  # the model's own opinion, forbidden or not
        sampler.accept(choice.token)
    assert [sampler.finished] == [True]
    first = calls[2].removeprefix("accept ")
    assert calls[:5] == ["begin", "allowed", f"accept {first}", "begin", "allowed"]
    clone = sampler.clone()
    sampler.rollback(2)
    assert calls[-1] == "rollback 2"
    assert (sampler.finished, clone.finished) == (False, True)


def test_who_forbids_everything_is_told() -> None:
    forbidden = dict.fromkeys(range(SIZE), -math.inf)
    with pytest.raises(OptionError, match="logit_bias forbids every token"):
        make_sampler(SamplingParams(logit_bias=forbidden)).sample(ROWS[0])
    odd = {i: -math.inf for i in range(0, SIZE, 2)}
    with pytest.raises(OptionError, match="the grammar with logit_bias forbids every token"):
        make_sampler(SamplingParams(logit_bias=odd), constraint=Even([])).sample(ROWS[0])


# --- log-probabilities of a prompt


def test_log_probabilities_of_a_prompt() -> None:
    block = np.stack(ROWS[:6])
    tokens = [3, 1, 4, 1, 5, 9]
    found = of_prompt(block, tokens, 4)
    exact = block.astype(np.float64)
    norms = np.log(np.exp(exact).sum(1))
    for i, (logprob, top) in enumerate(found):
        assert logprob == pytest.approx(exact[i, tokens[i]] - norms[i], abs=1e-9)
        ranked = np.argsort(-exact[i], kind="stable")[:4]
        assert [token for token, _ in top] == ranked.tolist()
        assert [p for _, p in top] == pytest.approx((exact[i, ranked] - norms[i]).tolist(), abs=1e-9)
    assert of_prompt(block[:2], [0, 1], 0)[0][1] == ()
    with pytest.raises(BackendError, match="hold NaN"):
        of_prompt(np.full((1, 4), np.nan, np.float32), [0], 1)


def test_log_probabilities_of_a_prompt_need_little_memory() -> None:
    import tracemalloc

    block = np.random.default_rng(1).normal(0, 1, (50, 40_000)).astype(np.float32)
    of_prompt(block[:1], [5], 5)
    tracemalloc.start()
    try:
        of_prompt(block, [5] * 50, 5)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
