"""Qwen 3.5 on the emulator, beside the reference: layers with states, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hetrun import LLM, SamplingParams
from hetrun.backend import Available, Backend, Descriptor, registry
from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.cuda.states.mirror import StateMirror
from hetrun.backends.reference import descriptor
from hetrun.executor.steps import Chunk, Step
from hetrun.memory.kv.states import StateMark
from hetrun.planner.plan import BUCKETS, PlanSet, make_plans
from tests.cuda.emulated.device import NAME, emulated
from tests.cuda.emulated.kernels import needs_compiler
from tests.support.rig import Placed, Rig, graph_of, placements, rig

if TYPE_CHECKING:
    from tests.models.hf import Row

pytestmark = [needs_compiler, pytest.mark.slow]
ALL = {"": "cuda"}
FEW = BUCKETS[:4]  # up to 16 tokens
# For passes of few tokens, and for longer ones.
PLACES = {
    "all": (ALL, ALL),
    "beside others": ({"": "cuda", "blk.1": "reference", "blk.2.attn.score": "reference"},) * 2,
    "by turns": ({"": "cuda", "blk.0": "reference"}, {"": "reference", "blk.0": "cuda", "blk.1": "cuda"}),
}
STEPS = {"all": 7, "beside others": 9, "by turns": 34}


def close(found: np.ndarray, right: np.ndarray) -> None:
    assert found.shape == right.shape
    assert np.square(found - right).sum() <= 1e-4 * np.square(right).sum()


def tokens_of(n: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 100, n)]


def ran(r: Rig, seqs: Sequence[int], n: int, seed: int, mark: int) -> np.ndarray:
    """A step of some sequences, each with the same tokens."""
    text, wanted = np.array(tokens_of(n, seed)), np.arange(n)[-3:]  # more would make passes short
    chunks = [Chunk(seq, text, wanted, (StateMark(r.kv.length(seq) + mark),)) for seq in seqs]
    return r.executor.run(Step(tuple(chunks))).copy()


def plain() -> Row:
    """The usual Qwen 3.5."""
    pytest.importorskip("torch", reason="needs torch, which writes the model")
    from tests.models import cases_hf

    return next(row for row in cases_hf.QWEN35 if row.name == "plain")


def both(few: Placed, many: Placed) -> tuple[Rig, Rig]:
    """A model with layers on the GPU, and the same on the reference."""
    row = plain()
    backends: dict[str, Backend] = {"cuda": emulated(name="cuda"), "reference": descriptor.create()}
    by_bucket = {b: (1, placements(few if b in FEW else many)) for b in BUCKETS}
    plans = PlanSet(make_plans(graph_of(row), by_bucket, ["cuda"]), 32, "a test")
    mine = rig(row, backends, plans=plans, context=256)
    return mine, rig(row, {"reference": descriptor.create()}, ubatch=32, context=256)


@pytest.mark.parametrize("placed", PLACES)
def test_a_model_is_the_same_wherever_its_layers_are(placed: str) -> None:
    """With forks, cuts, and texts that are longer than a pass."""
    mine, right = both(*PLACES[placed])
    rng = np.random.default_rng(4)
    pairs = [(mine.kv.alloc(), right.kv.alloc())]
    for i in range(STEPS[placed]):
        a, b = pairs[int(rng.integers(len(pairs)))]
        length = mine.kv.length(a)
        match int(rng.integers(5)):
            case 0 if length and len(pairs) < 4:
                pairs.append((mine.kv.fork(a), right.kv.fork(b)))
            case 1 if length:
                n = int(rng.choice([n for n in range(length) if mine.kv.keepable(a, n)][-3:]))
                mine.kv.truncate(a, n)
                right.kv.truncate(b, n)
            case 2 if len(pairs) > 2:
                pairs.remove((a, b))
                mine.kv.free(a)
                right.kv.free(b)
            case _:
                n = int(rng.choice([1, 1, 1, 5, 33]))
                some = pairs if i % 2 else [(a, b)]
                if all(mine.kv.length(seq) + n <= 250 for seq, _ in some):
                    mark = int(rng.integers(n))  # a token after which the state is kept
                    close(
                        ran(mine, [seq for seq, _ in some], n, i, mark),
                        ran(right, [seq for _, seq in some], n, i, mark),
                    )
    mine.close()
    right.close()


def mirrors(r: Rig) -> list[StateMirror]:
    """What the device has of states."""
    backend = r.backends["cuda"]
    assert isinstance(backend, CudaBackend)
    return list(backend.gpu._states.values())


def emptied(mirror: StateMirror) -> None:
    """Without any state."""
    mirror._in_use = frozenset()
    while mirror.drop_oldest():
        pass


def test_what_others_wrote_since_is_not_written_over() -> None:
    """A slot that the device had in the first pass of a step, and the host in the last; between them a state
    was kept, from which the host went on."""
    mine, right = both({"": "reference"}, ALL)
    a, b = mine.kv.alloc(), right.kv.alloc()
    close(ran(mine, [a], 80, 0, 64), ran(right, [b], 80, 0, 64))
    (mirror,) = mirrors(mine)
    emptied(mirror)
    close(mine.logits(a, tokens_of(1, 1)), right.logits(b, tokens_of(1, 1)))
    mine.close()
    right.close()


def test_a_chat_on_the_device_is_the_same_as_on_the_host() -> None:
    """With states that turns begin from, several sequences at once, and drafts."""
    pytest.importorskip("torch", reason="needs torch, which writes the model")
    from tests.models import hf, tiny

    add = Descriptor(NAME, lambda: Available(""), emulated, preference=1000, own_memory=True)
    remove, found = registry.register(add), list[list[object]]()
    usual = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    try:
        for name in (NAME, "reference"):
            with LLM(hf.folder(plain()), backends=[name], ctx=256) as llm:
                text, answers = tiny.random_tokens(60, seed=1), list[object]()
                for i in range(2):
                    answer = llm.generate([text], usual)[0]
                    answers += [answer.tokens, answer.usage.cached_tokens]
                    text = [*text, *answer.tokens, *tiny.random_tokens(20, seed=i + 2)]
                texts = [[*text[:40], *tiny.random_tokens(9, seed=n)] for n in (5, 6)]
                answers += [answer.tokens for answer in llm.generate([*texts, [5, 6, 7, 8] * 12], usual)]
                found.append(answers)
    finally:
        remove()
    assert found[0] == found[1]


def test_a_state_is_brought_once() -> None:
    """Token by token the device goes on with what it wrote itself."""
    mine, right = both(ALL, ALL)
    a, b = mine.kv.alloc(), right.kv.alloc()
    close(mine.logits(a, tokens_of(9, 0)), right.logits(b, tokens_of(9, 0)))
    (mirror,) = mirrors(mine)
    assert mirror.brought == 0
    for i in range(4):
        close(mine.logits(a, tokens_of(1, i)), right.logits(b, tokens_of(1, i)))
    assert mirror.brought == 0
    emptied(mirror)
    close(mine.logits(a, tokens_of(1, 9)), right.logits(b, tokens_of(1, 9)))
    assert mirror.brought == 1
    mine.close()
    right.close()


def test_states_of_layers_on_both_sides_stay_on_their_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of 4B they are 50 MiB, which would cross for each token."""
    home, brought = StateMirror.home, list[int]()

    def noted(mirror: StateMirror, slot: int) -> None:
        brought.append(slot)
        home(mirror, slot)

    monkeypatch.setattr(StateMirror, "home", noted)
    mine, right = both(*PLACES["beside others"])
    a, b = mine.kv.alloc(), right.kv.alloc()
    for i, n in enumerate((9, 1, 1, 1)):
        close(mine.logits(a, tokens_of(n, i)), right.logits(b, tokens_of(n, i)))
    assert brought == []
    fork, other = mine.kv.fork(a), right.kv.fork(b)
    close(mine.logits(fork, tokens_of(2, 5)), right.logits(other, tokens_of(2, 5)))
    for x, y in zip(mine.kv.export(fork, 14), right.kv.export(other, 14), strict=True):
        close(np.frombuffer(x, np.float32), np.frombuffer(y, np.float32))
    assert brought
    mine.close()
    right.close()
