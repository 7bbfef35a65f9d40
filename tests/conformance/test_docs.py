"""The table in the documents is what is found where the tests run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hetrun.backend.conformance.cases import CASES, MATRICES, OpCase
from hetrun.backend.conformance.report import conformance
from hetrun.graph.ops import OPS
from hetrun.graph.quant import QUANTS
from tests.support.tiers import exhaustive
from tests.tools.conformance_docs import EMULATED, here, marks, written


def test_the_page_has_every_op_every_type_and_every_backend() -> None:
    ops, weights = written()
    assert list(dict.fromkeys(name for name, _ in ops)) == list(OPS)
    assert list(dict.fromkeys(name for name, _ in weights)) == list(QUANTS)
    assert {"llamacpp", "amx", "amx-int8", "amx-lean", EMULATED.name, "reference"} <= {b for _, b in ops}
    assert {*ops.values()} <= {"ok", "some", "-", "oracle"}
    words = {word.strip("*") for mark in weights.values() for word in mark.split()}
    assert words <= {"ok", "-", "oracle", *MATRICES}


def smallest() -> Sequence[OpCase]:
    """Of cases that differ by their weights' shapes or their company only, the one with the fewest tokens.

    test_ops.py has the others, and fails where one of them is not as the reference says.
    """
    found: dict[tuple[str, str, str], OpCase] = {}
    for case in sorted(CASES, key=lambda case: sum(before + now for before, now, _ in case.company.parts)):
        found.setdefault((case.kind, case.quant, case.note), case)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("cases", [smallest(), pytest.param(CASES, marks=exhaustive)], ids=["some", "all"])
def test_the_page_says_what_is_found_here(cases: Sequence[OpCase]) -> None:
    found = marks(conformance(here(), cases=cases))
    for table, said in zip(found, written(), strict=True):
        documented = {backend for _, backend in said}
        assert {key: mark for key, mark in table.items() if key[1] in documented}.items() <= said.items()
