"""How fast a backend multiplies at its best: large matrices, many tokens, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import numpy as np

from hetrun.backend import Backend, Pass, Runner, Segment, SequencePart
from hetrun.backend.op_profile import ActivityTimes
from hetrun.graph import Constant, Op, Value, Weight
from hetrun.graph.ops import NONE, flops
from hetrun.graph.quant import by_name
from hetrun.loader.weight_reader import FileReader
from hetrun.memory.kv.cache import KvCache

WIDTH = 2048  # a matrix that wide fills any matrix unit
TOKENS = 512
LINKS = 8  # products behind each other, so that what goes in and comes out is little beside them
LEAST_RUNS = 2  # the first one also touches memory and makes what libraries keep
ENOUGH_S = 0.25


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a backend reached here."""

    backend: str
    weights: str  # their type
    arithmetic: str  # what the products are computed in, where it is not their own type
    threads: int
    rate: float  # multiplications and additions per second

    @property
    def name(self) -> str:
        """`amx in bf16`, or `llamacpp on Q4_0`."""
        return (
            f"{self.backend} in {self.arithmetic}" if self.arithmetic else f"{self.backend} on {self.weights}"
        )


@dataclass(frozen=True, slots=True)
class Multiplier:
    """The backend that makes most of a plan's products, and the largest weight that it does so with."""

    backend: str
    weight: Weight


def multiplier(segments: Sequence[Segment]) -> Multiplier | None:
    """The backend that multiplies most in one pass; None where none does."""
    work: dict[tuple[str, str], int] = {}
    largest: dict[tuple[str, str], Weight] = {}
    for segment in segments:
        for op in segment.ops:
            made = flops(op.kind, op.attrs, [w.shape for w in op.weights], 1)
            if not made or op.kind == "head":  # of a prompt only one token needs logits
                continue
            weight = max(op.weights, key=lambda w: w.nbytes)
            key = segment.backend, weight.quant.name
            work[key] = work.get(key, 0) + made
            largest[key] = max(largest.get(key, weight), weight, key=lambda w: w.nbytes)
    if not work:
        return None
    key = max(work, key=lambda k: work[k])
    return Multiplier(key[0], largest[key])


def measure_peak(backend: Backend, weight: Weight, threads: int) -> Peak:
    """Multiply by a large square matrix that has the blocks of this weight. On the engine's thread only."""
    segment = _segment(backend.name, square(weight, WIDTH))
    reader, uses = FileReader(), backend.wants(segment.ops)
    buffers = {use: backend.upload(use, reader.read) for use in uses}
    work = _pass(TOKENS, segment.reads[0])
    before = backend.spent
    try:
        runner = backend.compile(segment, work.shape, buffers, KvCache({}, by_name("F16"), 1, 1, TOKENS))
        try:
            seconds = _best(backend, runner, work)
        finally:
            runner.close()
    finally:
        backend.watch(before)
        for buffer in buffers.values():
            backend.release(buffer)
    made = LINKS * 2 * WIDTH * WIDTH * TOKENS
    return Peak(backend.name, weight.quant.name, backend.arithmetic, threads, made / seconds)


def _best(backend: Backend, runner: Runner, work: Pass) -> float:
    """Of several runs: others slow most of them down."""
    best, runs, end = float("inf"), 0, perf_counter() + ENOUGH_S
    while runs < LEAST_RUNS or perf_counter() < end:
        best, runs = min(best, _seconds(backend, runner, work)), runs + 1
    return best


def _seconds(backend: Backend, runner: Runner, work: Pass) -> float:
    """Of the products alone where the backend tells, of all that it does otherwise."""
    spent = ActivityTimes()
    backend.watch(spent)
    start = perf_counter()
    runner.submit(work).wait()
    return spent.seconds["products"] or perf_counter() - start


def square(weight: Weight, width: int) -> Weight:
    """A matrix of the weight's own blocks, repeated: random bytes would be scales that no model has."""
    quant = weight.quant
    needed = width * quant.row_bytes(width)
    some = weight.rows(0, min(weight.shape[0], -(-needed // quant.row_bytes(weight.shape[1]))))
    raw, reader = np.empty(some.nbytes, np.uint8), FileReader()
    try:
        reader.read(some, raw)
    finally:
        reader.close()
    return Weight("peak", (width, width), quant, (Constant(np.resize(raw, needed).tobytes(), width),))


def _segment(backend: str, weight: Weight) -> Segment:
    values = [Value(f"peak.{i}", weight.shape[1], "tokens") for i in range(LINKS + 1)]
    ops = tuple(Op("linear", (x,), y, (weight,), NONE, "peak") for x, y in pairwise(values))
    return Segment("peak", backend, ops, (values[0],), (values[-1],), "to know the limit")


def _pass(tokens: int, x: Value) -> Pass:
    numbers, none = np.arange(tokens), np.empty(0, np.int64)
    part = SequencePart(0, tokens, 0, 0, ())
    given = np.random.default_rng(0).standard_normal((tokens, x.width), np.float32)
    return Pass(np.zeros(tokens, np.int64), numbers, (), none, (part,), {x.name: given})
