"""Every backend that is installed, against the reference, op by op."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from hetrun import registry
from hetrun.backend import Backend, Pass, Segment, SequencePart, Unavailable
from hetrun.backends.llamacpp.device import LlamacppBackend
from hetrun.graph import Extent, KvShape, Op, Value, Weight
from hetrun.kv import KvCache
from hetrun.ops import Attention, Moe
from hetrun.quant import by_name
from hetrun.reader import FileReader
from tests.conformance.table import CASES, EXACT, FLOORS, Case
from tests.emulated.device import emulated
from tests.emulated.kernels import has_compiler
from tests.models.cases import COMMON
from tests.packing import packed

REFERENCE = "reference"
EMULATED = "cuda emulated"  # its kernels, run by the CPU
WITHOUT_KERNELS = "llamacpp without kernels"  # as it is where there was no C compiler
MOST = 64  # tokens that a sequence gets at once


def others() -> list[str]:
    known = registry.backends().items()
    parts = [n for n, d in known if d.whole is None and not isinstance(d.probe(), Unavailable)]
    return [n for n in parts if n != REFERENCE] + [EMULATED] * has_compiler()


def tried() -> list[ParameterSet]:
    """The same for tests that try each; the emulator's kernels have to be built, which takes its time."""
    return [pytest.param(n, marks=(pytest.mark.slow,) if n == EMULATED else ()) for n in others()]


def is_quick(case: Case) -> bool:
    """Whether the quick tests have it: of the products, those of types that people use every day."""
    return case.kind != "linear" or any(w[2] in COMMON for w in case.weights)


def create(name: str) -> Backend:
    return emulated() if name == EMULATED else registry.backends()[name.split()[0]].create()


def is_for(case: Case, name: str) -> bool:
    """CUDA's kernels take eight weights at a time. On the emulator of the products everyday types only: all
    have tests of their own."""
    if not name.startswith("cuda"):
        return True
    left_out = isinstance(case.attrs, Moe) and case.attrs.without  # such a share is the host's
    quick = is_quick(case) or name != EMULATED
    return quick and not left_out and not any(w[1] % 8 for w in case.weights)


@cache
def device(name: str) -> Backend:
    made = create(name)
    made.start()
    if name == WITHOUT_KERNELS:
        assert isinstance(made, LlamacppBackend)
        made.kernels = made.sorter = None
    return made


def limit(case: Case, backend: Backend) -> float:
    """How far a result may be from the reference's."""
    return max(case.limit, FLOORS[backend.arithmetic].get(case.kind, 0.0))


def build(case: Case, folder: Path, rng: np.random.Generator) -> Op:
    """The op of a case, its weights in a file."""
    first = "wanted" if case.rows == "wanted" else "tokens"
    names = [
        Value(f"in{i}", w, "wanted" if i == 0 and first == "wanted" else "tokens")
        for i, w in enumerate(case.widths)
    ]
    weights = []
    for i, (rows, cols, quant) in enumerate(case.weights):
        raw = packed(
            rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(cols**-0.5), by_name(quant)
        )
        path = folder / f"w{i}.bin"
        path.write_bytes(raw.tobytes())
        weights.append(
            Weight(
                f"w{i}",
                (rows, cols),
                by_name(quant),
                (Extent(str(path), 0, rows, raw.shape[1], raw.shape[1]),),
            )
        )
    out_rows = "wanted" if case.kind == "select" else first
    return Op(case.kind, tuple(names), Value("out", case.out, out_rows), tuple(weights), case.attrs, "test")  # type: ignore[arg-type]


def prepared(case: Case, rng: np.random.Generator) -> tuple[Pass, KvCache]:
    """A pass in the company that the case asks for, behind what the sequences have seen."""
    attrs = case.attrs if isinstance(case.attrs, Attention) else Attention(0, 1, 1, 32, 1.0)
    shape = KvShape(attrs.first + attrs.n_kv_heads, attrs.head_dim, attrs.window)
    kv = KvCache({0: shape}, by_name(case.kv_type), 1024, 4, MOST)
    parent = kv.alloc()
    if case.company.forked:
        fill(kv, parent, case.company.parts[0][0], rng)
    parts, tokens, positions, wanted = [], [], [], []
    slots: list[np.ndarray] = []
    at = wanted_at = 0
    for before, now, n_wanted in case.company.parts:
        seq = kv.fork(parent) if case.company.forked else kv.alloc()
        fill(kv, seq, before - kv.length(seq), rng)
        slots += kv.extend(seq, now)
        views = kv.views(seq, before, before + now)
        parts.append(SequencePart(at, at + now, wanted_at, wanted_at + n_wanted, views))
        tokens.append(rng.integers(0, 50, now))
        positions.append(np.arange(before, before + now))
        wanted.append(np.arange(at + now - n_wanted, at + now))
        at, wanted_at = at + now, wanted_at + n_wanted
    ids, at_positions, rows, chosen = (
        np.concatenate(x).astype(np.int64) for x in (tokens, positions, slots, wanted)
    )
    return Pass(ids, at_positions, (rows,), chosen, tuple(parts)), kv


def fill(kv: KvCache, seq: int, n: int, rng: np.random.Generator) -> None:
    for done in range(0, n, MOST):
        now = min(n - done, MOST)
        (rows,) = kv.extend(seq, now)
        for table in kv.tables[0]:
            table.write(rows, rng.standard_normal((now, table.n_heads * table.head_dim), dtype=np.float32))


def outcome(case: Case, name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The op's result on a backend and what is in the KV cache then; every backend gets the same numbers."""
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    op = build(case, folder, rng)
    work, kv = prepared(case, rng)
    for value in op.inputs:
        work.values[value.name] = rng.standard_normal((work.rows(value), value.width), dtype=np.float32)
    backend = device(name)
    # Kernels that share a long row between threads want two; for the others two only wait for each other.
    backend.set_threads(2 if work.parts[0].kv[0].length > 512 else 1)
    assert backend.supports(op)
    segment = Segment("test", name, (op,), op.inputs, (op.out,), "the test says so")
    reader = FileReader()
    buffers = {use: backend.upload(use, reader.read) for use in backend.wants(segment.ops)}
    reader.close()
    runner = backend.compile(segment, work.shape, buffers, kv)
    runner.submit(work).wait()
    # Where no row is wanted, a backend need not make a value of wanted rows.
    result = work.values["out"].copy() if work.rows(op.out) else np.empty((0, case.out), np.float32)
    runner.close()
    for buffer in buffers.values():
        backend.release(buffer)
    seen = np.concatenate([part.kv[0].rows for part in work.parts])
    return result, np.stack([table.read(seen) for table in kv.tables[0]])


def marks(case: Case, name: str) -> Sequence[pytest.MarkDecorator]:
    """What the quick tests leave out."""
    return () if is_quick(case) and name != EMULATED else (pytest.mark.slow,)


def pairs() -> list[ParameterSet]:
    """Each case on each backend; of a second way of one only its products, the rest being the same code.

    One that has to be named may bring a library that changes what the same code calls.
    """
    without = [WITHOUT_KERNELS] if "llamacpp" in others() else []
    ways = {name for name, d in registry.backends().items() if d.way_of and not d.by_name}
    return [
        pytest.param(case, name, id=f"{case}-{name}", marks=marks(case, name))
        for name in [*others(), *without]
        for case in CASES
        if case.kind == "attention" or name != WITHOUT_KERNELS
        if name not in ways or case.kind in ("linear", "head", "moe")
        if is_for(case, name)
    ]


@pytest.mark.parametrize(("case", "backend"), pairs())
def test_a_backend_computes_what_the_reference_does(case: Case, backend: str, tmp_path: Path) -> None:
    expected, stored = outcome(case, REFERENCE, tmp_path)
    found, kept = outcome(case, backend, tmp_path)
    assert found.shape == expected.shape
    assert nmse(expected, found) <= limit(case, device(backend))
    assert nmse(stored, kept) <= EXACT


@pytest.mark.parametrize("quant", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("backend", tried())
def test_a_backend_knows_how_much_it_rounds(backend: str, quant: str, tmp_path: Path) -> None:
    cases = [c for c in CASES if c.kind == "linear" and c.weights[0][2] == quant and not c.weights[1:]]
    case = max(cases, key=lambda c: c.company.parts[0][1])
    found = nmse(outcome(case, REFERENCE, tmp_path)[0], outcome(case, backend, tmp_path)[0]) ** 0.5
    said = device(backend).rounding(build(case, tmp_path, np.random.default_rng(0)))
    assert found == pytest.approx(said, rel=0.3, abs=1e-6)


def nmse(expected: np.ndarray, found: np.ndarray) -> float:
    """The mean square of the error as a part of that of the result."""
    if not expected.any():
        return 0.0 if not found.any() else np.inf
    return float(
        np.square(found.astype(np.float64) - expected).sum() / np.square(expected.astype(np.float64)).sum()
    )


def test_the_table_has_every_op_and_every_type() -> None:
    from hetrun.ops import OPS
    from hetrun.quant import QUANTS

    assert {c.kind for c in CASES} == set(OPS)
    assert {w[2] for c in CASES for w in c.weights} == set(QUANTS)
