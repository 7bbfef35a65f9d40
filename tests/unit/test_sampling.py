"""Sampling: pruning changes nothing, the frequencies are right, seeds repeat, and bad logits are named."""

from __future__ import annotations

import math
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, example, given, settings, strategies as st

from hetrun.client.sampling_params import SAMPLERS, SamplingParams
from hetrun.errors import BackendError, OptionError
from hetrun.sampling import native, top_k as pruning
from hetrun.sampling.batch import choose
from hetrun.sampling.candidates import Candidates, Past
from hetrun.sampling.chain import Setting, build
from hetrun.sampling.fast_path import FastPath
from hetrun.sampling.interface import Sampler
from hetrun.sampling.rng import falls_on, uniform
from hetrun.sampling.sampler import ChainSampler, make_sampler
from hetrun.sampling.top_k import best
from tests.support.examples import examples

Row = npt.NDArray[np.float32]

# Every way in which the vocabulary is pruned, and the greedy one.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "default": {},
    "top_k alone": {"top_k": 7, "top_p": 1, "min_p": 0},
    "top_p alone": {"top_k": 0, "min_p": 0},
    "top_p and min_p": {"top_k": 0},
    "min_p alone": {"top_k": 0, "top_p": 1},
    "temperature alone": {"top_k": 0, "top_p": 1, "min_p": 0},
}


def row(seed: int, size: int, scale: float, ties: bool, holes: float) -> Row:
    """Logits as models have them: a bulk and a few that stand out; perhaps with equals, perhaps with -inf."""
    random = np.random.default_rng(seed)
    values = random.normal(0, scale, size)
    out = random.integers(0, size, max(1, size // 50))
    values[out] += random.exponential(2 * scale, len(out))
    if ties:
        values = np.round(values)
    values[random.random(size) < holes] = -np.inf
    values[random.integers(0, size)] = scale  # one at least is finite
    return values.astype(np.float32)


rows = st.builds(
    row,
    seed=st.integers(0, 2**32),
    size=st.one_of(st.integers(1, 60), st.sampled_from([2047, 2048, 5000, 12_345])),
    scale=st.sampled_from([0.01, 0.5, 2.0, 9.0]),
    ties=st.booleans(),
    holes=st.sampled_from([0.0, 0.0, 0.5, 0.999]),
)


def ranked(logits: npt.NDArray[np.floating[Any]]) -> list[int]:
    """All possible tokens, the best first, the lowest id first among equals."""
    values = logits.tolist()
    return sorted((i for i, value in enumerate(values) if value > -math.inf), key=lambda i: (-values[i], i))


def naive(logits: Row, params: SamplingParams, temperature: float) -> dict[int, float] | None:
    """The distribution by the book: a sorted list of the whole vocabulary, in double precision.

    None where the sum of top-p meets its bar within rounding, and either answer would be right.
    """
    values = logits.tolist()
    kept = ranked(logits)
    if params.top_k > 0:
        kept = kept[: params.top_k]
    best = values[kept[0]]
    if params.top_p < 1:
        mass = np.cumsum([math.exp(values[i] - best) for i in kept])
        bar = params.top_p * mass[-1]
        if np.abs(mass - bar).min() < 1e-9 * mass[-1]:
            return None
        kept = kept[: int(np.argmax(mass >= bar)) + 1]
    if params.min_p > 0:
        kept = [i for i in kept if values[i] >= best + math.log(params.min_p)]
    weights = [math.exp((values[i] - best) / temperature) for i in kept]
    total = math.fsum(weights)
    return {i: weight / total for i, weight in zip(kept, weights, strict=True)}


def pruned(logits: Row, params: SamplingParams, temperature: float) -> dict[int, float]:
    chain, past = build(Setting(params, temperature, 0, None, None)), Past(0, array("i"))
    kept = reduce(lambda candidates, rule: rule(candidates, past), chain, Candidates(None, logits))
    weights = kept.weights()
    ids = range(len(weights)) if kept.ids is None else kept.ids.tolist()
    return dict(zip(ids, (weights / weights.sum()).tolist(), strict=True))


@settings(max_examples=examples(200))
@given(
    logits=rows,
    top_k=st.sampled_from([-1, 0, 1, 2, 40, 300, 20_000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    temperature=st.sampled_from([0.05, 0.8, 1.0, 3.0]),
)
@example(logits=np.zeros(5000, np.float32), top_k=40, top_p=1.0, min_p=0.0, temperature=1.0)
@example(logits=np.zeros(5000, np.float32), top_k=0, top_p=0.30001, min_p=0.0, temperature=1.0)
@example(logits=np.arange(9000, dtype=np.float32), top_k=40, top_p=0.9, min_p=0.0, temperature=3.0)
def test_pruning_leaves_the_distribution_as_it_is(
    logits: Row, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    expected = naive(logits, params, temperature)
    assume(expected is not None)
    assert expected is not None
    found = pruned(logits, params, temperature)
    assert set(expected) == {token for token, p in found.items() if p > 0 or token in expected}
    for token, p in expected.items():
        assert found[token] == pytest.approx(p, rel=1e-9, abs=1e-300)


@given(logits=rows, k=st.integers(1, 3000))
@example(logits=np.zeros(4096, np.float32), k=40)
@example(logits=np.tile(np.arange(1024, dtype=np.float32), 8), k=40)  # all the best in the same columns
@example(logits=np.arange(300_000, dtype=np.float32), k=128)  # more than the library has blocks for
@example(logits=np.full(70, -np.inf, np.float32), k=3)
def test_the_k_best_are_found_without_sorting(logits: Row, k: int) -> None:
    expected = ranked(logits)[:k]
    if expected:
        assert best(logits, k).tolist() == expected
        assert pruning._best(logits, k).tolist() == expected  # where there is no library
    if (lib := native.greatest()) and k <= native.MOST:
        found = lib.find(logits, min(k, len(logits)))
        assert found == (expected, logits[expected].tolist())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("n", [1, 7, 64, 65, 1000, 300_001])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_what_is_no_logit_is_found_wherever_it_stands(bad: float, n: int, place: float) -> None:
    logits = row(1, n, 2.0, False, 0.0)
    logits[int(place * (n - 1))] = bad
    with pytest.raises(BackendError, match="NaN" if np.isnan(bad) else "infinite"):
        best(logits, 3)


def test_rows_that_the_library_does_not_take_are_looked_at_without_it() -> None:
    logits = row(1, 3000, 2.0, False, 0.0)
    for other in (logits[::3], logits.astype(np.float64), logits[::-1]):
        assert best(other, 40).tolist() == ranked(other)[:40]


def test_threads_have_results_of_their_own() -> None:
    logits = [row(seed, 5000, 2.0, False, 0.0) for seed in range(64)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda x: best(x, 40).tolist(), logits))
    assert found == [ranked(x)[:40] for x in logits]


def test_a_library_from_another_source_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    assert native.greatest.__wrapped__() is None
    monkeypatch.setattr(native, "VERSION", native.VERSION - 1)
    monkeypatch.setattr(native, "NAME", "not_there.so")
    assert native.greatest.__wrapped__() is None


@settings(max_examples=examples(200))
@given(
    logits=rows,
    params=st.builds(
        SamplingParams,
        top_k=st.integers(1, 130),
        top_p=st.sampled_from([0, 0.3, 0.95, 1]),
        min_p=st.sampled_from([0, 0.05, 0.7, 1]),
        temperature=st.sampled_from([1e-6, 0.8, 1, 3]),
        min_keep=st.sampled_from([0, 0, 3]),
        samplers=st.sampled_from([SAMPLERS, SAMPLERS[::-1], ("top_k", "min_p"), ("top_k",)]),
        seed=st.integers(0, 9),
    ),
)
def test_plain_floats_choose_as_numpy_does(logits: Row, params: SamplingParams) -> None:
    sampler = make_sampler(params)
    assert isinstance(sampler, ChainSampler)
    assert params.seed is not None
    left = sampler.left(Candidates(None, logits))
    assert sampler.sample(logits).token == left.draw(uniform(params.seed, 0))


@pytest.mark.skipif(not native.greatest(), reason="hetrun was installed without a C compiler")
@settings(max_examples=examples(300))
@given(
    logits=rows,
    usual=st.builds(
        FastPath,
        k=st.integers(1, native.MOST),
        p=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
        min_p=st.sampled_from([0.0, 0.05, 0.7, 1.0]),
        temperature=st.sampled_from([1e-6, 0.8, 1.0, 3.0]),
    ),
    u=st.floats(0, 1, exclude_max=True),
)
def test_c_draws_what_plain_floats_draw(logits: Row, usual: FastPath, u: float) -> None:
    lib = native.greatest()
    assert lib is not None
    usual = replace(usual, k=min(usual.k, len(logits)))
    ids, leading = pruning.leaders(logits, usual.k)
    assert lib.draw(logits, usual, u) == ids[usual.draw(leading, u)]


def test_the_default_rules_sort_a_handful(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def watched(values: Row, k: int) -> tuple[list[int], list[float]]:
        least = np.partition(pruning._maxima(values, k), -k)[-k]
        sizes.append(int((values >= least).sum()))
        return pruning.leaders(values, k)

    monkeypatch.setattr("hetrun.sampling.sampler.leaders", watched)
    monkeypatch.setattr("hetrun.sampling.sampler.greatest", lambda: None)
    for seed in range(20):
        make_sampler(SamplingParams(seed=seed)).sample(row(seed, 49_152, 2.0, False, 0.0))
    assert len(sizes) == 20
    assert max(sizes) < 150


@pytest.mark.parametrize(("p", "kept"), [(0.0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_top_p_meets_its_bar_and_stops(p: float, kept: int) -> None:
    params = SamplingParams(top_k=0, top_p=p, min_p=0)
    assert sorted(pruned(np.zeros(4, np.float32), params, 1.0)) == list(range(kept))


@given(logits=rows, temperature=st.sampled_from([0.05, 1.0, 3.0]), u=st.floats(0, 1, exclude_max=True))
@example(logits=row(1, 20_000, 2.0, False, 0.0), temperature=1.0, u=math.nextafter(1, 0))
@example(logits=row(1, 20_000, 2.0, False, 0.5), temperature=1.0, u=0.0)
def test_a_draw_falls_where_the_probabilities_say(logits: Row, temperature: float, u: float) -> None:
    everything = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    ends = everything.cumsum() / everything.sum()
    whole = Candidates(None, logits.astype(np.float64) / temperature)
    assert everything[whole.draw(u)] > 0
    assume(np.abs(ends - u).min() > 1e-9)
    expected = int(np.argmax(ends > u))
    assert whole.draw(u) == expected
    ids = np.flatnonzero(logits > -np.inf)
    assert whole.pick(ids).draw(u) == expected


def test_a_draw_never_falls_behind_the_last_candidate() -> None:
    assert Candidates(None, np.array([0.0, 0.0, -800.0])).draw(math.nextafter(1, 0)) == 1
    assert falls_on(np.array([0.5, 1.0, 1.0]), 1.0) == 1


def chi_square_limit(freedom: int) -> float:
    """What chi-square exceeds once in a thousand times (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("way", [way for way in WAYS if way != "greedy"])
def test_frequencies_are_the_probabilities(way: str) -> None:
    logits = row(3, 50, 0.4, False, 0.1)
    params = SamplingParams(seed=11, temperature=0.9, **WAYS[way])
    sampler = make_sampler(params)
    n = 6000
    counts = dict.fromkeys(range(50), 0)
    for token in tokens(sampler, logits, n):
        counts[token] += 1
    expected = naive(logits, params, 0.9)
    assert expected is not None
    assert {token for token, count in counts.items() if count} <= set(expected)
    common = {token for token, p in expected.items() if p * n >= 5}
    chi = sum((counts[t] - expected[t] * n) ** 2 / (expected[t] * n) for t in common)
    assert len(common) >= 7
    assert chi < chi_square_limit(len(common) - 1)


def test_random_numbers_are_even_and_in_range() -> None:
    numbers = np.array([uniform(seed, i) for seed in range(30) for i in range(200)])
    assert 0 <= numbers.min()
    assert numbers.max() < 1
    counts = np.bincount((numbers * 20).astype(int), minlength=20)
    assert ((counts - 300.0) ** 2 / 300).sum() < chi_square_limit(19)
    assert len(set(numbers.tolist())) == len(numbers)


def tokens(sampler: Sampler, logits: Row, n: int) -> list[int]:
    found = []
    for _ in range(n):
        found.append(sampler.sample(logits).token)
        sampler.accept(found[-1])
    return found


FLAT = row(5, 3000, 0.5, False, 0.0)


def test_a_seed_repeats_and_another_differs() -> None:
    first, again, other = (make_sampler(SamplingParams(seed=seed, top_k=0)) for seed in (1, 1, 2))
    assert first.seed == 1
    assert tokens(first, FLAT, 200) == tokens(again, FLAT, 200)
    assert tokens(first, FLAT, 50) != tokens(other, FLAT, 50)


def test_seeds_mean_the_same_everywhere() -> None:
    # Written down once: a seed noted today must give the same text tomorrow.
    assert uniform(1, 0) == pytest.approx(0.30356803, abs=1e-8)
    assert uniform(2**64 - 1, 100) == pytest.approx(0.02539801, abs=1e-8)


@pytest.mark.parametrize("seed", [None, -1])
def test_a_random_seed_is_chosen_once_and_told(seed: int | None) -> None:
    one, other = (make_sampler(SamplingParams(seed=seed)) for _ in range(2))
    assert one.seed != other.seed
    assert one.seed == one.clone().seed
    repeated = make_sampler(SamplingParams(seed=one.seed))
    assert tokens(repeated, FLAT, 100) == tokens(one, FLAT, 100)


def test_sampling_twice_is_the_same_until_a_token_is_accepted() -> None:
    sampler = make_sampler(SamplingParams(seed=4))
    assert len({sampler.sample(FLAT).token for _ in range(10)}) == 1


@given(detours=st.lists(st.integers(0, 100), min_size=5, max_size=5))
def test_taking_tokens_back_leaves_no_trace(detours: list[int]) -> None:
    straight = make_sampler(SamplingParams(seed=9))
    winding = make_sampler(SamplingParams(seed=9))
    for n in detours:
        tokens(winding, FLAT, n)
        winding.rollback(n)
        assert tokens(winding, FLAT, 3) == tokens(straight, FLAT, 3)


def test_more_cannot_be_taken_back_than_was_accepted() -> None:
    sampler = make_sampler(SamplingParams(seed=9))
    sampler.accept(1)
    with pytest.raises(ValueError, match="2 tokens, 1 were accepted"):
        sampler.rollback(2)
    with pytest.raises(ValueError, match="-1 tokens"):
        sampler.rollback(-1)


def test_a_clone_goes_its_own_way() -> None:
    sampler = make_sampler(SamplingParams(seed=9))
    tokens(sampler, FLAT, 10)
    clone = sampler.clone()
    ahead = tokens(clone, FLAT, 20)
    assert tokens(sampler, FLAT, 20) == ahead


def test_the_temperature_is_the_requests_else_the_models() -> None:
    greedy = [int(FLAT.argmax())] * 20
    assert tokens(make_sampler(SamplingParams(seed=1), default_temperature=0), FLAT, 20) == greedy
    assert tokens(make_sampler(SamplingParams(seed=1, temperature=0), 1.0), FLAT, 20) == greedy
    assert tokens(make_sampler(SamplingParams(seed=1, temperature=1), 0), FLAT, 20) != greedy
    default = tokens(make_sampler(SamplingParams(seed=1)), FLAT, 50)
    assert default == tokens(make_sampler(SamplingParams(seed=1, temperature=0.8)), FLAT, 50)
    with pytest.raises(OptionError, match="default_temperature must be 0"):
        make_sampler(SamplingParams(), math.nan)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.zeros(3000, np.float32)
    logits[[7, 2999, 1500]] = 4.0
    assert make_sampler(SamplingParams(temperature=0)).sample(logits).token == 7
    assert make_sampler(SamplingParams(top_k=1, seed=0)).sample(logits).token == 7


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("value", "said"), [(np.nan, "hold NaN"), (np.inf, "infinite"), (-np.inf, "no token to choose")]
)
@pytest.mark.parametrize("size", [1, 50, 5001])
def test_bad_logits_are_named(way: str, value: float, said: str, size: int) -> None:
    sampler = make_sampler(SamplingParams(**WAYS[way]))
    for place in {0, size // 3, size - 1}:
        logits = row(1, size, 2.0, False, 0.0)
        logits[place if value != -np.inf else slice(None)] = value
        with pytest.raises(BackendError, match=said):
            sampler.sample(logits)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 5000])
def test_extreme_logits_are_no_trouble(way: str, size: int) -> None:
    most = np.finfo(np.float32).max
    logits = np.full(size, -most, np.float32)
    logits[1] = most
    for temperature in (1e-6, 1.0, 1e300):
        params = SamplingParams(**{"temperature": temperature, "seed": 1, "logprobs": 1, **WAYS[way]})
        if way not in ("temperature alone", "top_k alone") or temperature < 2:
            assert make_sampler(params).sample(logits).token == 1
        else:
            assert make_sampler(params).sample(logits).token < size


def test_a_single_possible_token_is_chosen_by_every_way() -> None:
    logits = np.full(5000, -np.inf, np.float32)
    logits[4321] = -3.0
    for way in WAYS.values():
        choice = make_sampler(SamplingParams(seed=1, logprobs=3, **way)).sample(logits)
        assert choice.token == 4321
        assert choice.logprob == pytest.approx(0)
        assert [token for token, _ in choice.top] == [4321]


@pytest.mark.parametrize("way", WAYS)
def test_a_bias_moves_and_forbids(way: str) -> None:
    best = int(FLAT.argmax())
    forbidden = make_sampler(SamplingParams(seed=3, logit_bias={best: -math.inf}, **WAYS[way]))
    assert best not in tokens(forbidden, FLAT, 300)
    wanted = make_sampler(SamplingParams(seed=3, logit_bias={17: 100}, **WAYS[way]))
    assert tokens(wanted, FLAT, 30) == [17] * 30
    assert FLAT.argmax() == best  # the caller's logits are as they were


def test_a_bias_on_a_token_that_does_not_exist_is_refused() -> None:
    params = SamplingParams(logit_bias={3000: 1})
    params.check_vocabulary(3001)
    with pytest.raises(OptionError, match="token 3000 does not exist, the model has 3000 tokens"):
        params.check_vocabulary(3000)
    with pytest.raises(OptionError, match="token 3000 does not exist"):
        make_sampler(params).sample(FLAT)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=examples(25))
@given(logits=rows)
def test_logprobs_are_the_models_own(way: str, logits: Row) -> None:
    params = SamplingParams(seed=1, logprobs=5, logit_bias={0: -50.0}, **WAYS[way])
    choice = make_sampler(params).sample(logits)
    exact = logits.astype(np.float64)
    norm = float(exact.max()) + math.log(np.exp(exact - exact.max()).sum())
    assert choice.logprob == pytest.approx(exact[choice.token] - norm, abs=1e-9)
    assert [token for token, _ in choice.top] == ranked(logits)[:5]
    assert [p for _, p in choice.top] == pytest.approx(
        [exact[i] - norm for i in ranked(logits)[:5]], abs=1e-9
    )


def test_logprobs_only_when_asked() -> None:
    assert make_sampler(SamplingParams()).sample(FLAT).logprob is None
    none_of_the_best = make_sampler(SamplingParams(logprobs=0)).sample(FLAT)
    assert none_of_the_best.logprob is not None
    assert none_of_the_best.top == ()


# --- the rows of a step together


@given(
    st.lists(st.tuples(st.integers(0, 2**32), st.sampled_from([0.0, np.nan, np.inf, -np.inf])), min_size=1),
    st.booleans(),
)
def test_rows_of_a_step_are_chosen_from_as_one_by_one(drawn: list[tuple[int, float]], ties: bool) -> None:
    """But for rows that cannot be right: of those each sampler says itself what is wrong."""
    logits = np.stack([row(seed, 300, 2.0, ties, 0.5) for seed, _ in drawn])
    for r, (seed, value) in zip(logits, drawn, strict=True):
        r[slice(None) if value == -np.inf else seed % 300] = value or r[seed % 300]
    samplers = [make_sampler(SamplingParams(temperature=0)) for _ in drawn]
    for sampler, r, (_, value), choice in zip(samplers, logits, drawn, choose(samplers, logits), strict=True):
        if value:
            assert choice is None
            with pytest.raises(BackendError):
                sampler.sample(r)
        else:
            assert choice == sampler.sample(r)
            assert choice is not None
            assert type(choice.token) is int


NOT_ONLY_THE_BEST: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "logit_bias": {3: 50.0}},
    {"temperature": 0, "repeat_penalty": 1.5},
    {"temperature": 0, "mirostat": 2},
]


@pytest.mark.parametrize("other", NOT_ONLY_THE_BEST)
def test_a_sampler_that_looks_at_more_than_the_greatest_logit_is_asked(other: dict[str, Any]) -> None:
    samplers = [make_sampler(SamplingParams(temperature=0)), make_sampler(SamplingParams(**other))]
    assert choose(samplers, np.eye(2, 9, dtype=np.float32)) == [None, None]
    assert choose([], np.empty((0, 9), np.float32)) == []
