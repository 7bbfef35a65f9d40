"""Every backend that is installed, against the reference, op by op."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from hetrun.backend import Backend, Unavailable, registry
from hetrun.backend.conformance.cases import CASES, MATRICES, OpCase
from hetrun.backend.conformance.runner import (
    REFERENCE,
    Outcome,
    allowed,
    build,
    compared,
    nmse,
    outcome,
    threads_for,
)
from hetrun.backends.llamacpp.backend import LlamacppBackend
from hetrun.graph.ops import Attention, Moe
from tests.cuda.emulated import real
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.kernels import has_compiler
from tests.models.cases import COMMON
from tests.support.tiers import exhaustive, pairwise

EMULATED = "cuda emulated"  # its kernels, run by the CPU
# A type of weights is a program that has to be built: `make test` has these on the emulator.
BUILT = "F32", "BF16", "Q4_0", "Q4_K", "Q6_K"
BUILT_FOR_EXPERTS = "Q4_0", "Q4_K"  # and one more where there are many tokens
WITHOUT_KERNELS = "llamacpp without kernels"  # as it is where there was no C compiler


def others() -> list[str]:
    """hetrun's own. Those of other packages, which are tried where they are, may be installed as well."""
    known = [(n, d) for n, d in registry.backends().items() if not registry.stranger(n)]
    parts = [n for n, d in known if d.whole is None and not isinstance(d.probe(), Unavailable)]
    return [n for n in parts if n != REFERENCE] + [EMULATED] * has_compiler()


def tried() -> list[ParameterSet]:
    """The same for tests that try each; the emulator's kernels have to be built, which takes its time."""
    return [pytest.param(n, marks=(pytest.mark.slow,) if n == EMULATED else ()) for n in others()]


def is_quick(case: OpCase) -> bool:
    """Whether the quick tests have it: of the products, those of types that people use every day."""
    return case.kind not in ("linear", "moe") or case.quant in COMMON


def create(name: str) -> Backend:
    if name == "cuda":
        return real.backend(name)
    return emulated() if name == EMULATED else registry.backends()[name.split()[0]].create()


def is_for(case: OpCase, name: str) -> bool:
    """CUDA's kernels take eight weights at a time. On the emulator of the products everyday types only: all
    have tests of their own."""
    if not name.startswith("cuda"):
        return True
    # Such a share is the host's, and so are keys and values of two layers, latent ones, and what they need.
    left_out = case.kind == "per_head" or (isinstance(case.attrs, Moe) and bool(case.attrs.without))
    left_out = left_out or (isinstance(case.attrs, Attention) and bool(case.attrs.sharing))
    quick = is_quick(case) or name != EMULATED
    narrow = case.kind in MATRICES and any(w[1] % 8 for w in case.weights)
    return quick and not left_out and not narrow


@cache
def device(name: str) -> Backend:
    made = create(name)
    made.start()
    if name == WITHOUT_KERNELS:
        assert isinstance(made, LlamacppBackend)
        made.kernels = made.sorter = None
    return made


@cache
def expected(case: OpCase) -> Outcome:
    """What the reference makes of it."""
    return outcome(case, build(case), device(REFERENCE))


def found(case: OpCase, name: str, folder: Path) -> Outcome:
    """What a backend makes of the same numbers, its weights in files."""
    op, backend = build(case, folder), device(name)
    backend.set_threads(threads_for(case))
    assert backend.supports(op)
    return outcome(case, op, backend)


Row = tuple[OpCase, str]  # on a backend


def facts(row: Row) -> Sequence[Hashable]:
    """What a row is about; `make test` has rows in which every two of them occur together."""
    case, name = row
    return name, case.kind, case.quant, (case.kind, case.note), str(case.company)


def is_built(case: OpCase, name: str) -> bool:
    """Whether `make test` may have it: it wants no program of the emulator that no other test does."""
    built = BUILT_FOR_EXPERTS if case.kind == "moe" else (*BUILT, "")
    return name != EMULATED or case.kind == "attention" or case.quant in built


def rows() -> Iterator[Row]:
    """Each case on each backend; of a second way of one only its products, the rest being the same code.

    One that has to be named may bring a library that changes what the same code calls.
    """
    without = [WITHOUT_KERNELS] if "llamacpp" in others() else []
    ways = {name for name, d in registry.backends().items() if d.way_of and not d.by_name}
    for name in [*others(), *without]:
        for case in CASES:
            if name == WITHOUT_KERNELS and case.kind != "attention":
                continue
            if name not in ways or case.kind in ("linear", "head", "moe"):
                if is_for(case, name):
                    yield case, name


def marked() -> list[ParameterSet]:
    """Those that only `make test-all` has, and those that the quick tests leave out."""
    table = list(rows())
    often = {id(row) for row in pairwise([row for row in table if is_built(*row)], facts)}
    found = []
    for row in table:
        case, name = row
        marks = [] if id(row) in often else [exhaustive]
        if name == EMULATED or not is_quick(case):
            marks.append(pytest.mark.slow)
        found.append(pytest.param(case, name, id=f"{case}-{name}", marks=marks))
    return found


@pytest.mark.parametrize(("case", "backend"), marked())
def test_a_backend_computes_what_the_reference_does(case: OpCase, backend: str, tmp_path: Path) -> None:
    trial = compared(case, expected(case), found(case, backend, tmp_path), allowed(case, device(backend)))
    assert trial.state == "ok", trial.said


@pytest.mark.parametrize("quant", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("backend", tried())
def test_a_backend_knows_how_much_it_rounds(backend: str, quant: str, tmp_path: Path) -> None:
    cases = [c for c in CASES if c.kind == "linear" and c.weights[0][2] == quant and not c.weights[1:]]
    case = max(cases, key=lambda c: c.company.parts[0][1])
    error = nmse(expected(case).result, found(case, backend, tmp_path).result) ** 0.5
    assert error == pytest.approx(device(backend).rounding(build(case)), rel=0.3, abs=1e-6)


@pytest.mark.parametrize("backend", tried())
def test_a_backend_has_every_kind_of_op(backend: str) -> None:
    for kind in {case.kind for case in CASES}:
        assert any(device(backend).supports(build(case)) for case in CASES if case.kind == kind), kind


def test_the_table_has_every_op_and_every_type() -> None:
    from hetrun.graph.ops import OPS
    from hetrun.graph.quant import QUANTS

    assert {c.kind for c in CASES} == set(OPS)
    assert {w[2] for c in CASES for w in c.weights} == set(QUANTS)
