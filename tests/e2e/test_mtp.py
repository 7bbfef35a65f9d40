"""Guesses by the block inside a file, most of them right: tokens are those that come without, whatever
sequences share, give up and begin in the middle of."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.client.events import Event
from hetrun.engine.speculation.combined import CombinedGuesser
from hetrun.engine.speculation.mtp import AcceptanceRates, MtpSequence
from tests.models import tiny
from tests.support import streamed
from tests.tools import make_model

PARAMS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
SYSTEM = tiny.random_tokens(150, seed=1)
PROMPTS = [
    tiny.random_tokens(5, seed=2),
    tiny.random_tokens(200, seed=3),
    [*SYSTEM, *tiny.random_tokens(20, seed=4)],
    [*SYSTEM, *tiny.random_tokens(9, seed=5)],
    [*SYSTEM, *tiny.random_tokens(20, seed=4)],
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that its weights are most of what it takes."""
    path = tmp_path_factory.mktemp("mtp") / "model.gguf"
    shape = replace(make_model.SHAPES["qwen35-tiny"], ffn=4096, layers=8, predicting=1)
    make_model.write_model(path, shape, "Q4_K_M", 0, make_model.Making(same_layers=True))
    return path


@pytest.fixture(scope="module")
def plain(file: Path) -> list[list[int]]:
    """The answers without guesses."""
    with LocalModel(file, backends=["llamacpp"], spec="off", ctx=512, deterministic=True) as llm:
        return [llm.generate([prompt], PARAMS)[0].tokens for prompt in PROMPTS]


@dataclass
class Knowing:
    """What knows the answers, and is wrong now and then."""

    texts: list[list[int]]
    asked: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def propose(self, mine: MtpSequence, n: int) -> list[int]:
        real(mine, n)
        self.asked += 1
        tokens = mine._tokens
        text = next((t for t in self.texts if t[: len(tokens)] == tokens), tokens)
        coming = [*text[len(tokens) :], *[0] * n][:n]
        return [token if self.chance.random() < 0.75 else token ^ 1 for token in coming]


real = MtpSequence.propose


@pytest.fixture
def knowing(plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Knowing]:
    found = Knowing([[*prompt, *answer] for prompt, answer in zip(PROMPTS, plain, strict=True)])
    monkeypatch.setattr(MtpSequence, "propose", lambda mine, n: found.propose(mine, n))
    # A guess of so small a model takes as long as a step: here it is to be made nevertheless.
    monkeypatch.setattr(AcceptanceRates, "chances", lambda mine, n: [0.95**i for i in range(1, n + 1)])
    monkeypatch.setattr(CombinedGuesser, "seconds", 0.0)
    yield found
    assert found.asked > 5


@contextmanager
def in_memory(file: Path) -> Iterator[LocalModel]:
    with LocalModel(file, backends=["llamacpp"], spec="mtp", ctx=512, deterministic=True) as llm:
        yield llm


@contextmanager
def from_disk(file: Path) -> Iterator[LocalModel]:
    with streamed.opened(file, 4 * streamed.MIB, spec="mtp", ctx=512, planner="static") as (llm, _, _):
        yield llm


@pytest.mark.parametrize("opened", [in_memory, from_disk])
def test_together_and_one_after_the_other(
    file: Path,
    plain: list[list[int]],
    knowing: Knowing,
    opened: Callable[[Path], AbstractContextManager[LocalModel]],
) -> None:
    with opened(file) as llm:
        assert [c.tokens for c in llm.generate(PROMPTS, PARAMS)] == plain
        found = [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    assert [c.tokens for c in found] == plain
    assert sum(c.timings.accepted for c in found) > 20
    if opened is in_memory:
        assert found[-1].usage.cached_tokens > len(SYSTEM)


def test_an_answer_that_is_cancelled_leaves_the_others(
    file: Path, plain: list[list[int]], knowing: Knowing
) -> None:
    with LocalModel(file, backends=["llamacpp"], spec="mtp", ctx=512, deterministic=True) as llm:
        for prompt, answer in zip(PROMPTS[:3], plain, strict=False):
            with closing(cast(Generator[Event], llm.stream(prompt, PARAMS))) as events:
                assert [next(events).token for _ in range(5)] == answer[:5]
        assert [c.tokens for c in llm.generate(PROMPTS, PARAMS)] == plain
