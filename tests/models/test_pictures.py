"""Prompts with pictures through real towers: the tokens that llama.cpp says, with libllama and libmtmd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hetrun.loader.vision import read_vision
from tests.engine.seeing import MARK, ask, opened
from tests.support.llama_pictures import Oracle
from tests.support.once import once
from tests.support.picture_encoder import drawn
from tests.support.tiers import first
from tests.support.towers import FAMILIES, Seeing, write_pair

LONG = "the quick brown fox jumps over the lazy dog and then over the next one, "
PROMPTS = (
    f"{MARK}What is this?",
    f"Look: {MARK} and {MARK} what?",
    f"<|im_start|>user\n{LONG}{MARK}who?<|im_end|>\n<|im_start|>assistant\nit<|im_end|>\n"
    f"<|im_start|>user\n{MARK}<|im_end|>\n<|im_start|>assistant\n",
)
SIZES = ((48, 32), (40, 64))
# Two ways to add in another order: ggml's attention in float16, and ours.
CLOSE = 0.02

Pair = Callable[[str], Seeing]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model and its tower."""

    def pair_of(family: str) -> Seeing:
        def make(folder: Path) -> None:
            write_pair(family, folder)

        folder = once(tmp_path_factory, f"pair-{family}", make)
        text, mmproj = sorted(folder.glob("*.gguf"), key=lambda path: path.name.startswith("mmproj"))
        return Seeing(text, mmproj)

    return pair_of


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: pytest.FixtureRequest, pair: Pair) -> Iterator[tuple[Seeing, Oracle]]:
    found = pair(request.param)
    oracle = Oracle(*found)
    yield found, oracle
    oracle.close()


@pytest.mark.parametrize("backend", first(["llamacpp", "reference"]))
def test_the_tokens_of_llama_cpp(seen: tuple[Seeing, Oracle], backend: str) -> None:
    """Greedily, and the first token's log-probabilities, up to where the two best are about equal."""
    (text, mmproj), oracle = seen
    with opened(text, read_vision(mmproj), backends=backend, ubatch=128) as engine:
        for prompt in PROMPTS:
            pictures = [drawn(w, h, i) for i, (w, h) in enumerate(SIZES[: prompt.count(MARK)])]
            expected, margins, scores = oracle.greedy(prompt, pictures, 12)
            answer = ask(engine, prompt, *pictures, max_tokens=12, ignore_eos=True, logprobs=5).wait()
            assert answer.last.error is None
            sure = next((i for i, margin in enumerate(margins) if margin < 2 * CLOSE), len(expected))
            assert answer.tokens[:sure] == expected[:sure]
            score = answer.events[0].logprob
            assert score is not None
            for token, logprob in score.top:
                assert logprob == pytest.approx(scores[token], abs=CLOSE)
            assert np.isfinite(scores).all()


@pytest.mark.parametrize(
    "family", first(sorted(FAMILIES, key=("qwen35", "gemma4").__contains__, reverse=True), 2)
)
def test_deterministic_and_guesses(pair: Pair, family: str) -> None:
    """The same bits with other requests beside, with guesses, and from the cache."""
    text, mmproj = pair(family)
    prompt, pictures = PROMPTS[1], [drawn(w, h, i) for i, (w, h) in enumerate(SIZES)]
    options = {"backends": "llamacpp", "deterministic": True}
    with opened(text, read_vision(mmproj), **options) as engine:
        alone = ask(engine, prompt, *pictures, max_tokens=12, ignore_eos=True).wait().tokens
    with opened(text, read_vision(mmproj), **options, spec="lookup") as engine:
        both = engine.call(
            lambda _: [
                ask(engine, prompt, *pictures, max_tokens=12, ignore_eos=True),
                ask(engine, LONG, max_tokens=20, ignore_eos=True),
                ask(engine, PROMPTS[0], pictures[1], max_tokens=20, ignore_eos=True),
            ]
        )
        for answer in both:
            assert answer.wait().last.error is None
        assert both[0].tokens == alone
        again = ask(engine, prompt, *pictures, max_tokens=12, ignore_eos=True).wait()
        assert again.tokens == alone
        assert again.last.usage.cached_tokens > again.last.usage.prompt_tokens // 2
        assert engine.held.counts.pictures == len(SIZES)
