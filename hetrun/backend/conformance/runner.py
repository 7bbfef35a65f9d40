"""One case on a backend, and how far that is from what the reference makes of the same numbers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import registry
from hetrun.backend.conformance.cases import EXACT, FLOORS, OpCase
from hetrun.backend.conformance.random_weights import random_weights
from hetrun.backend.interface import Backend, Buffer, Floats, Pass, Segment, SequencePart, WeightUse
from hetrun.errors import BackendError
from hetrun.graph import Constant, Extent, KvShape, Op, Rows, StateShape, Value, Weight
from hetrun.graph.ops import Attention, Stateful
from hetrun.graph.quant import by_name
from hetrun.loader.weight_reader import FileReader
from hetrun.memory.kv.cache import KvCache
from hetrun.system.entry_points import FAILURES, in_words

REFERENCE = "reference"
MOST = 64  # tokens that a sequence gets at once
LONG = 512  # rows from which on kernels share one row's work between threads

State = Literal["ok", "wrong", "fails", "unsupported"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case came to: the op's result, and what the KV cache has then in the rows that the pass sees."""

    result: Floats
    stored: Floats


@dataclass(frozen=True, slots=True)
class CaseTrial:
    """How a case went on a backend."""

    state: State
    part: float = 0.0  # the error, in parts of what is allowed
    said: str = ""  # what is wrong, as the end of a sentence


def reference() -> Backend:
    """The oracle."""
    (descriptor,) = registry.backends_of(REFERENCE)
    return descriptor.create()


def numbers(case: OpCase, which: Literal["weights", "pass"]) -> np.random.Generator:
    """The randomness of a case; every backend gets the same."""
    return np.random.default_rng([zlib.crc32(str(case).encode()), which == "pass"])


def build(case: OpCase, folder: Path | None = None) -> Op:
    """The op of a case; its weights lie in memory, or in files of a folder."""
    rng = numbers(case, "weights")
    first: Rows = "wanted" if case.rows == "wanted" else "tokens"
    rest: Rows = "tokens" if case.kind == "attention" else first
    inputs = [Value(f"in{i}", w, rest if i else first) for i, w in enumerate(case.widths)]
    weights = []
    for i, (rows, cols, quant) in enumerate(case.weights):
        raw = random_weights(rows, cols, by_name(quant), rng)
        part: Constant | Extent = Constant(raw.tobytes(), rows)
        if folder is not None:
            path = folder / f"w{i}.bin"
            path.write_bytes(raw.tobytes())
            part = Extent(str(path), 0, rows, raw.shape[1], raw.shape[1])
        weights.append(Weight(f"w{i}", (rows, cols), by_name(quant), (part,)))
    out = Value("out", case.out, "wanted" if case.kind == "select" else first)
    return Op(case.kind, tuple(inputs), out, tuple(weights), case.attrs, "conformance")


def prepared(case: OpCase, rng: np.random.Generator) -> tuple[Pass, KvCache]:
    """A pass in the company that the case asks for, behind what the sequences have seen."""
    attrs = case.attrs if isinstance(case.attrs, Attention) else Attention(0, 1, 1, 32, 1.0)
    states = {0: StateShape({case.kind: case.attrs.floats})} if isinstance(case.attrs, Stateful) else {}
    kv = KvCache({0: KvShape.of(attrs)}, by_name(case.kv_type), 1024, 4, MOST, states=states)
    parent = kv.alloc()
    if case.company.forked:
        _fill(kv, parent, case.company.parts[0][0], rng)
    parts, tokens, positions, wanted = [], [], [], []
    slots: list[np.ndarray] = []
    at = wanted_at = 0
    for before, now, n_wanted in case.company.parts:
        seq = kv.fork(parent) if case.company.forked else kv.alloc()
        _fill(kv, seq, before - kv.length(seq), rng)
        given = kv.extend(seq, now)
        if attrs.sharing == "borrows":  # another layer has written this pass's rows, too
            _write(kv, given[0], rng)
        slots += given
        views, own = kv.views(seq, before, before + now), kv.state_view(seq, before, before + now)
        parts.append(SequencePart(at, at + now, wanted_at, wanted_at + n_wanted, views, own))
        tokens.append(rng.integers(0, 50, now))
        positions.append(np.arange(before, before + now))
        wanted.append(np.arange(at + now - n_wanted, at + now))
        at, wanted_at = at + now, wanted_at + n_wanted
    ids, at_positions, rows, chosen = (
        np.concatenate(x).astype(np.int64) for x in (tokens, positions, slots, wanted)
    )
    return Pass(ids, at_positions, (rows,), chosen, tuple(parts)), kv


def _fill(kv: KvCache, seq: int, n: int, rng: np.random.Generator) -> None:
    for done in range(0, n, MOST):
        now = min(n - done, MOST)
        (rows,) = kv.extend(seq, now)
        _write(kv, rows, rng)
        if kv.states:
            slot = kv.states.view(seq, done, done + now).write[-1]
            for state in kv.states.tables:
                state[slot] = rng.standard_normal(state.shape[1], dtype=np.float32)


def _write(kv: KvCache, rows: NDArray[np.int64], rng: np.random.Generator) -> None:
    for table in kv.kept[0]:
        table.write(rows, rng.standard_normal((len(rows), table.n_heads * table.head_dim), dtype=np.float32))


def threads_for(case: OpCase) -> int:
    """As many threads as a case can tell apart; for most of them a second one only waits for the first."""
    return 2 if any(before + now > LONG for before, now, _ in case.company.parts) else 1


@contextmanager
def brought_in(backend: Backend, op: Op) -> Iterator[Mapping[WeightUse, Buffer]]:
    """The op's weights where the backend wants them; they are given back in any case."""
    with ExitStack() as held:
        buffers: dict[WeightUse, Buffer] = {}
        with closing(FileReader()) as reader:
            for use in backend.wants([op]):
                buffers[use] = backend.upload(use, reader.read)
                held.callback(backend.release, buffers[use])
        yield buffers


def outcome(case: OpCase, op: Op, backend: Backend) -> Outcome:
    """The case on a backend, with the threads that it has."""
    rng = numbers(case, "pass")
    work, kv = prepared(case, rng)
    given = {v.name: rng.standard_normal((work.rows(v), v.width), dtype=np.float32) for v in op.inputs}
    work.values.update({name: array.copy() for name, array in given.items()})
    segment = Segment("conformance", backend.name, (op,), op.inputs, (op.out,), "it is tried")
    with brought_in(backend, op) as buffers:
        with closing(backend.compile(segment, work.shape, buffers, kv)) as runner:
            runner.submit(work).wait()
            # Where no row is wanted, a backend need not make a value of wanted rows.
            result = np.empty((0, case.out), np.float32)
            if work.rows(op.out):
                if op.out.name not in work.values:
                    raise BackendError("it returns no result")
                result = np.array(work.values[op.out.name])
    for name, array in given.items():
        if not np.array_equal(array, work.values[name]):
            raise BackendError("it overwrites its inputs, which other ops read too")
    seen = np.concatenate([part.kv[0].rows for part in work.parts])
    kv.settle()
    stored = [table.read(seen) for table in kv.tables[0]]
    if kv.states:
        slots = [part.states.write[-1] for part in work.parts if part.states]
        for slot, part in zip(slots, work.parts, strict=True):
            kv.states.settle(int(slot), int(work.positions[part.b - 1]) + 1)
        stored += [table[slots] for table in kv.states.tables]
    return Outcome(result, np.concatenate([kept.reshape(-1) for kept in stored]))


def allowed(case: OpCase, backend: Backend) -> float:
    """How far a result may be from the reference's."""
    return max(case.limit, FLOORS.get(backend.arithmetic, {}).get(case.kind, 0.0))


def nmse(expected: np.ndarray, found: np.ndarray) -> float:
    """The mean square of the error as a part of that of the result."""
    if not expected.any():
        return 0.0 if not found.any() else np.inf
    with np.errstate(all="ignore"):  # what a backend makes may be anything
        error = np.square(found.astype(np.float64) - expected).sum()
    return float(error / np.square(expected.astype(np.float64)).sum())


def compared(case: OpCase, expected: Outcome, found: Outcome, limit: float) -> CaseTrial:
    """Whether a backend found what it should; `limit` is of the result, and of a state, which is one too."""
    shape = expected.result.shape
    if found.result.shape != shape:
        return CaseTrial("wrong", np.inf, f"the result is of shape {found.result.shape}, not {shape}")
    if found.result.dtype != np.float32:
        return CaseTrial("wrong", np.inf, f"the result is {found.result.dtype}, not float32")
    if not np.isfinite(found.result).all():
        return CaseTrial("wrong", np.inf, "the result has numbers that are NaN or infinite")
    error = nmse(expected.result, found.result)
    if not error <= limit:
        said = f"the error is {error:.1e} of the result (mean squares), and {limit:.0e} is allowed"
        return CaseTrial("wrong", error / limit, said)
    kept, most = nmse(expected.stored, found.stored), limit if isinstance(case.attrs, Stateful) else EXACT
    if not kept <= most:
        said = f"the error of what is in the KV cache is {kept:.1e}, and {most:.0e} is allowed"
        return CaseTrial("wrong", kept / most, said)
    return CaseTrial("ok", max(error / limit, kept / most))


def tried(case: OpCase, op: Op, expected: Outcome, backend: Backend, threads: int | None = None) -> CaseTrial:
    """A case on a backend that may do anything; None leaves its threads as they are."""
    try:
        if not backend.supports(op):
            return CaseTrial("unsupported")
        if threads is not None:
            backend.set_threads(threads)
        return compared(case, expected, outcome(case, op, backend), allowed(case, backend))
    except FAILURES as e:
        return CaseTrial("fails", np.inf, in_words(e))
