"""The chain against llama.cpp's own samplers: the same candidates, and the same probabilities to 1e-5.

llama.cpp computes in float32, we in float64. Of that follows, and nothing else is let through:

- Each of its logits is off by 2^-24 of itself or more, so a probability is by as much of its logit: beside
  the 1e-5, a share of 2^-21 of the greatest logit is allowed. That is nothing for logits below 20.
- A candidate on the very border of a rule may be in or out. Then the same parameters, with that rule's
  threshold moved by no more than 1e-5 of itself, must give llama.cpp's answer exactly. It adds
  probabilities up one after the other, so 2^-25 for each of a long list come on top. Few cases may need it.
- typical_p computes NaN as soon as one candidate has the probability 0, and its entropy of tens of thousands
  is off by 1e-4. Neither is an answer; such cases are compared without it.

Among equal logits llama.cpp's sorting leaves the order open: the probabilities are compared, not the names.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hetrun.client.sampling_params import SamplingParams
from hetrun.sampling.candidates import Candidates
from hetrun.sampling.sampler import ChainSampler, make_sampler
from tests.support.peer import llama_cpp
from tests.support.samplers import (
    BREAKERS,
    CONTEXT,
    PIECES,
    Case,
    Left,
    Undefined,
    data_array,
    encoder,
    listed,
    llama_samplers,
    open_vocab,
    possible_of,
    random_case,
    random_params,
    random_row,
    theirs,
)
from tests.support.tiers import first


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_vocab(tmp_path_factory.mktemp("vocab") / "vocab.gguf") as opened:
        yield opened


# --- ours


def ours(case: Case, vocab: Any) -> Left:  # noqa: ANN401
    sampler = make_sampler(
        SamplingParams(**case.params, seed=1),
        prompt=case.prompt,
        context=CONTEXT,
        pieces=lambda: PIECES,
        encode=encoder(vocab),
    )
    assert isinstance(sampler, ChainSampler)
    for token in case.answer:
        sampler.accept(token)
    row = sampler.permitted(case.row)
    return possible(sampler.left(Candidates(None, row)))


def possible(c: Candidates) -> Left:
    ids = np.arange(len(c.logits)) if c.ids is None else c.ids
    kept = c.logits > -np.inf
    return ids[kept].astype(np.int64), c.logits[kept].astype(np.float64), c.size


# --- the comparison


def probabilities(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights: npt.NDArray[np.float64] = np.exp(logits - logits.max())
    return weights / float(weights.sum())


def differ(case: Case, a: Left, b: Left) -> str:
    """Why these are not the same; empty if they are."""
    if len(a[0]) != len(b[0]):
        return f"{len(a[0])} candidates, llama.cpp has {len(b[0])}"
    x, y = probabilities(a[1]), probabilities(b[1])
    i, j = (np.argsort(a[0]), np.argsort(b[0]))
    if (a[0][i] != b[0][j]).any():
        if not case.ties:
            return f"tokens {sorted(set(a[0]) ^ set(b[0]))[:5]}"
        i, j = np.argsort(x), np.argsort(y)
    room = 1e-5 + 2.0**-21 * np.abs(b[1]).max() * np.minimum(x[i], 1 - x[i])
    if (np.abs(x[i] - y[j]) > room).any():
        return f"probabilities {np.abs(x[i] - y[j]).max():.2g} apart"
    greedy = case.params["temperature"] == 0 and "temperature" in case.params["samplers"]
    if not greedy and a[2] != b[2]:  # behind greedy there is nothing to count
        return f"{a[2]} in the list, llama.cpp has {b[2]}"
    return ""


BORDERS = {
    "top_p": "top_p",
    "min_p": "min_p",
    "typ_p": "typical_p",
    "top_n_sigma": "top_n_sigma",
    "xtc": "xtc_threshold",
}


def on_the_border(case: Case, expected: Left, vocab: Any) -> bool:  # noqa: ANN401
    """Whether one rule's threshold, moved a little, gives llama.cpp's answer."""
    room = 1e-5 + len(case.row) * 2.0**-25
    for sampler, name in BORDERS.items():
        low, high = case.params[name] * (1 - room), case.params[name] * (1 + room)
        for _ in range(20 if sampler in case.params["samplers"] else 0):
            near = case.but(**{name: min((low + high) / 2, 4.0 if name == "top_n_sigma" else 1.0)})
            found = ours(near, vocab)
            if not differ(near, found, expected):
                return True
            if (len(found[0]) < len(expected[0])) == (
                name != "min_p"
            ):  # the only one that a rise makes stricter
                low = (low + high) / 2
            else:
                high = (low + high) / 2
    return False


def check(seeds: Sequence[int], vocab: Any) -> Counter[str]:  # noqa: ANN401
    counts: Counter[str] = Counter()
    for seed in seeds:
        case = random_case(seed)
        try:
            expected = theirs(case, vocab)
        except Undefined:
            counts["without typical_p"] += 1
            case = case.but(samplers=[name for name in case.params["samplers"] if name != "typ_p"])
            expected = theirs(case, vocab)
        found = ours(case, vocab)
        assert len(found[0])
        if not len(expected[0]):  # its penalties overflowed and made every token impossible
            counts["no answer"] += 1
        elif why := differ(case, found, expected):
            assert on_the_border(case, expected, vocab), f"case {seed}: {why}\n{case}"
            counts["border"] += 1
    return counts


@pytest.mark.parametrize("n", first([400, 1000]))
def test_the_chain_leaves_what_llamacpp_leaves(n: int, vocab: Any) -> None:  # noqa: ANN401
    counts = check(range(n), vocab)
    assert counts["border"] <= n // 200
    assert counts["no answer"] <= n // 200
    assert counts["without typical_p"] <= n // 5


def random_repetitions(seed: int, vocab: Any) -> Case:  # noqa: ANN401
    """A text in which repetitions meet breakers, and every token as probable as any other."""
    random = np.random.default_rng(seed)
    text: list[int] = []
    while len(text) < int(random.choice([3, 20, 100, 500])):
        if text and random.random() < 0.6:
            start = int(random.integers(0, len(text)))
            text += text[start : start + int(random.integers(1, 60))]
        else:
            text += encoder(vocab)(str(random.choice([*BREAKERS, "a", "b", "abab", "lo", "m", " "])))
    params = random_params(random, len(PIECES)) | {
        "samplers": ["dry"],
        "dry_multiplier": float(random.choice([0.1, 0.8, 5])),
        "dry_sequence_breakers": random.choice(BREAKERS, int(random.integers(0, 4))).tolist(),
    }
    cut = int(random.integers(0, len(text) + 1))
    return Case(np.zeros(len(PIECES), np.float32), params, False, text[:cut], text[cut:])


def test_repetitions_and_breakers_are_llamacpps(vocab: Any) -> None:  # noqa: ANN401
    moved = 0
    for seed in range(500):
        case = random_repetitions(seed, vocab)
        (ids, logits, _), (expected_ids, expected, _) = ours(case, vocab), theirs(case, vocab)
        with np.errstate(over="ignore"):
            assert ids.tolist() == expected_ids.tolist(), f"case {seed}: {case}"
            assert np.allclose(logits, expected, rtol=1e-5), f"case {seed}: {case}"
        moved += bool((logits != case.row).any())
    assert moved > 250


MU = {1: 24, 2: 16}  # where it lies in llama.cpp's structures, behind numbers that we know


def llama_mu(sampler: Any, version: int, params: SamplingParams) -> float:  # noqa: ANN401
    raw = ctypes.string_at(sampler.contents.ctx, MU[version] + 4)
    tau, eta, mu = np.frombuffer(raw, np.float32)[[2 if version == 2 else 3, 3 if version == 2 else 4, -1]]
    assert (tau, eta) == (np.float32(params.mirostat_tau), np.float32(params.mirostat_eta))
    return float(mu)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_goes_llamacpps_way(version: int, vocab: Any) -> None:  # noqa: ANN401
    api = llama_cpp()
    sizes, overflows = set(), 0
    for seed in range(150):
        random = np.random.default_rng(seed)
        row = random_row(random, ties=False)
        given: dict[str, Any] = {
            "mirostat": version,
            "mirostat_tau": float(random.choice([0.5, 3, 5, 12])),
            "mirostat_eta": float(random.choice([0.1, 1])),
            "temperature": float(random.choice([0, 0.6, 1, 2])),
            "dynatemp_range": 3.0,  # plays no part
        }
        case, params = Case(row, given | {"samplers": ["temperature"]}), SamplingParams(**given)
        (_, temper), (_, miro) = list(llama_samplers(case, vocab))[1:]
        sampler = make_sampler(params)
        assert isinstance(sampler, ChainSampler)
        for _ in range(5):
            array, data = data_array(row)
            api.llama_sampler_apply(temper, ctypes.byref(array))
            api.llama_sampler_apply(miro, ctypes.byref(array))
            left = listed(array)
            assert len(data)
            found = possible(sampler.left(Candidates(None, row)))
            if version == 1 and (len(found[0]), len(left)) == (len(row), 1):
                # It calls for more than 2^31 candidates, which llama.cpp's int turns into none.
                overflows += 1
                break
            sizes.add(len(found[0]))
            assert not differ(case, (*found[:2], 0), (*possible_of(left)[:2], 0)), f"case {seed}"
            sampler.accept(int(left["id"][array.selected]))
            assert sampler.mu == pytest.approx(llama_mu(miro, version, params), rel=1e-5, abs=1e-5)
    assert len(sizes) > 20
    assert overflows <= 15
