"""The table in the documents is what is found where the tests run."""

from __future__ import annotations

import pytest

from hetrun.conformance.report import conformance
from hetrun.conformance.table import MATRICES
from hetrun.ops import OPS
from hetrun.quant import QUANTS
from tests.tools.conformance_docs import EMULATED, here, marks, written


def test_the_page_has_every_op_every_type_and_every_backend() -> None:
    ops, weights = written()
    assert list(dict.fromkeys(name for name, _ in ops)) == list(OPS)
    assert list(dict.fromkeys(name for name, _ in weights)) == list(QUANTS)
    assert {"llamacpp", "amx", "amx-int8", "amx-lean", EMULATED.name, "reference"} <= {b for _, b in ops}
    assert {*ops.values()} <= {"ok", "some", "-", "oracle"}
    words = {word.strip("*") for mark in weights.values() for word in mark.split()}
    assert words <= {"ok", "-", "oracle", *MATRICES}


@pytest.mark.slow
def test_the_page_says_what_is_found_here() -> None:
    found = marks(conformance(here()))
    for table, said in zip(found, written(), strict=True):
        documented = {backend for _, backend in said}
        assert {key: mark for key, mark in table.items() if key[1] in documented}.items() <= said.items()
