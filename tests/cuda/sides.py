"""What a change of sides costs: a pass goes from the GPU to the CPU and back many times, and neither computes
while Python and C prepare the next segment.

`python -m tests.cuda sides`: on the GPU, or where there is none over a CUDA that takes no time. It counts
what the engine's thread computes, without ggml's own work and without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from time import thread_time
from typing import ParamSpec, TypeVar

import numpy as np
import pytest

from hetrun.backend import Available, registry
from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.llamacpp.backend import LlamacppBackend
from hetrun.executor.steps import Step
from hetrun.planner.costmodel import WorkTimes
from tests.cuda.emulated import real
from tests.cuda.idle import idle_backend
from tests.cuda.rows import Line, Table
from tests.models.tiny import TinyLlama
from tests.support.rig import Rig, rig, step

P = ParamSpec("P")
R = TypeVar("R")

BAR_US = 30.0
FEW, MANY = 4, 16  # layers: what a pass costs in any case is the same in both
WARM, PASSES, ROUNDS = 8, 60, 5
PROMPT, ALL = 20, 200  # tokens
SEVERAL = 4  # sequences


def layers_in_turn(layers: int) -> dict[str, str]:
    """Every second layer on the GPU."""
    return {"": "llamacpp", **{f"blk.{i}": "cuda" for i in range(0, layers, 2)}}


def attention(layers: int) -> dict[str, str]:
    """All attention there."""
    return {"": "llamacpp", **{f"blk.{i}.attn": "cuda" for i in range(layers)}}


def feed_forward(layers: int) -> dict[str, str]:
    """All that is not attention."""
    return {"": "llamacpp", **{f"blk.{i}.ffn": "cuda" for i in range(layers)}}


WAYS: dict[str, Callable[[int], dict[str, str]]] = {
    "layers in turn": layers_in_turn,
    "attention on the GPU": attention,
    "feed-forward on the GPU": feed_forward,
}


@dataclass
class Other:
    """Time that is not ours."""

    seconds: float = 0.0

    def of(self, work: Callable[P, R]) -> Callable[P, R]:
        """The same work, its time counted here."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            start = thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                self.seconds += thread_time() - start

        return timed


def model(layers: int) -> TinyLlama:
    """One whose own work is next to nothing."""
    return TinyLlama(f"sides{layers}", layers=layers, embd=128, ffn=128, heads=4, kv_heads=2, head_dim=32)


def sides(cuda: CudaBackend, placed: Callable[[int], dict[str, str]], layers: int) -> Rig:
    """It on both sides."""
    backends = {"llamacpp": LlamacppBackend(), "cuda": cuda}
    return rig(model(layers), backends, placed(layers), forecast=WorkTimes(), kv_type="F16", context=ALL + 64)


def changes(r: Rig) -> int:
    """Of sides, in a pass of one token."""
    return len(r.executor.plans.plan(1).stages) - 1


def tokens(r: Rig, sequences: int = 1) -> Iterator[Step]:
    """A prompt for each sequence, then one token of each at a time, for ever: sequences that are long begin
    anew."""
    while True:
        seqs = [r.kv.alloc() for _ in range(sequences)]
        for seq in seqs:
            yield step((seq, range(PROMPT), [PROMPT - 1]))
        for _ in range(ALL - PROMPT):
            yield step(*((seq, [3], [0]) for seq in seqs))
        for seq in seqs:
            r.kv.free(seq)


def seconds(r: Rig, sequences: int = 1) -> list[float]:
    """Of our own, for some passes."""
    cuda, host, other = r.backends["cuda"], r.backends["llamacpp"], Other()
    assert isinstance(cuda, CudaBackend)
    assert isinstance(host, LlamacppBackend)
    driver, found = cuda.gpu.memory.driver, list[float]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_run", other.of(host._run))
        for name in ("synchronize", "happened"):
            patch.setattr(driver, name, other.of(getattr(driver, name)))
        for each in tokens(r, sequences):
            before, start = other.seconds, thread_time()
            r.executor.run(each)
            found.append(thread_time() - start - (other.seconds - before))
            if len(found) == sequences + WARM + PASSES * ROUNDS:
                break
    return found[sequences + WARM :]


Opened = Callable[[], AbstractContextManager[CudaBackend]]


def microseconds(opened: Opened, way: str, sequences: int = 1) -> tuple[float, ...]:
    """Of a change of sides, in each of some rounds."""
    rounds, counts = [], []
    for layers in (FEW, MANY):
        with opened() as cuda:
            r = sides(cuda, WAYS[way], layers)
            rounds.append([median(some) for some in np.split(np.array(seconds(r, sequences)), ROUNDS)])
            counts.append(changes(r))
            r.close()
    few, many = rounds
    return tuple(1e6 * (b - a) / (counts[1] - counts[0]) for a, b in zip(few, many, strict=True))


@contextmanager
def idle() -> Iterator[CudaBackend]:
    """A GPU that takes no time."""
    with idle_backend() as (cuda, _):
        yield cuda


@contextmanager
def there() -> Iterator[CudaBackend]:
    """The machine's."""
    yield real.backend("cuda")


def measure(table: Table) -> None:
    """A line for each way to go from side to side."""
    is_there = isinstance(registry.backends()["cuda"].probe(), Available)
    note = "" if is_there else "over a CUDA that takes no time"
    for way in WAYS:
        for n in (1, SEVERAL):
            what = f"a change of sides, {way}, {n} sequence" + ("s" if n > 1 else "")
            if table.has_time(what, 5.0):
                found = microseconds(there if is_there else idle, way, n)
                table.add(Line(what, "us", found, BAR_US, "most", note))
