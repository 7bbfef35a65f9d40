"""A sample of the table: one architecture of each kind, in placements that others do not have together."""

from __future__ import annotations

import numpy as np
import pytest

from hetrun.backends.llamacpp.kernels.matmul import products
from hetrun.models import HF_TYPES
from hetrun.prefetch import ring_buffer
from tests.support.tiers import exhaustive
from tests.truth.placements import Placement, columns
from tests.truth.subjects import Subject, architectures, subjects
from tests.truth.verdicts import BITS, Bar, Said, compare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        products() is None or ring_buffer.library() is None,
        reason="hetrun was installed without a C compiler",
    ),
]
ROWS = {str(subject.row): subject for subject in subjects()}
COLUMNS = {column.name: column for column in columns()}
# A mixture, latent attention, and states beside attention; llama is in most other tests.
SAMPLE = {
    ("dots1-plain", "chunks"),
    ("deepseek_v2-yarn", "chunks"),
    ("deepseek_v2-yarn", "disk-50"),
    ("qwen3_5_text-plain", "disk-50"),
    ("qwen3_5_text-plain", "lookup"),
    ("mixtral-window", "lookup"),
    ("gemma3_text-softcap", "mapped"),
    ("llama-all-biases", "kernels-portable"),
}
TABLE = [
    pytest.param(s, c, id=f"{name}-{c.name}", marks=() if (name, c.name) in SAMPLE else exhaustive)
    for name, s in ROWS.items()
    for c in COLUMNS.values()
]


@pytest.mark.parametrize(("subject", "column"), TABLE)
def test_the_same_or_close(subject: Subject, column: Placement) -> None:
    cell = column.cell(subject)
    assert not cell.faults
    if (str(subject.row), column.name) in SAMPLE:
        assert cell.checks, cell.note


def test_each_architecture_is_a_row() -> None:
    assert {s.architecture for s in ROWS.values()} == set(architectures()) == set(HF_TYPES.values())
    assert all(s.row for s in ROWS.values())


def test_what_a_comparison_finds() -> None:
    right = np.array([[0.0, 1.0, 3.0], [2.0, 1.9, 0.0]], np.float32)
    said = Said(((1, 2),), right)

    def faults(bar: Bar, found: Said) -> tuple[str, ...]:
        return compare("F32", "a test", bar, expected=said, found=found).faults

    near = right + np.float32(1e-6) * np.arange(3, dtype=np.float32)
    assert not faults(BITS, said)
    assert "2 of 2 rows have other bits" in faults(BITS, Said(((1, 2),), near))[0]
    assert not faults(Bar("tokens", 1e-3), Said(((1, 2),), near))
    assert "from its token 2 on" in faults(Bar("tokens", 1e-3), Said(((1, 3),), near))[0]
    assert "apart, more than" in faults(Bar("tokens", 1e-3), Said(((1, 2),), right + 1))[0]
    other = right[:, ::-1].copy()
    assert "leads by 2" in faults(Bar("close", 9.0), Said(((1, 2),), other))[0]
    assert "mean KL" in faults(Bar("close", 0.1), Said(((1, 2),), other))[1]
    one = right.copy()
    one[0] = other[0]
    assert "leads by 2" in faults(Bar("close", 9.0, flips=0.4), Said(((1, 2),), one))[0]
    assert not faults(Bar("close", 1e-9, flips=0.5), Said(((1, 2),), one))
    assert "mean KL" in faults(Bar("close", 0.1, gap=9.0, flips=0.5), Said(((1, 2),), other))[0]
    assert "not finite" in faults(BITS, Said(((1, 2),), np.full_like(right, np.nan)))[0]
