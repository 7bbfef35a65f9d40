"""The table of op kinds: every row is meant, and the oracle knows it."""

from __future__ import annotations

import pytest

from hetrun.backends.reference.functions import TABLE
from hetrun.ops import OPS, Attention, Attrs, Form, RmsNorm, Rope, flops


def test_the_reference_knows_every_kind() -> None:
    assert set(TABLE) == set(OPS)


def test_rows_of_the_table_are_complete() -> None:
    for kind, spec in OPS.items():
        assert spec.kind == kind
        assert spec.meaning
        assert any(n in spec.n_weights for n in range(3)), f"{kind} takes no number of weights"


ATTRS = {
    "rms_norm": RmsNorm(1e-5),
    "rope": Rope(n_heads=2, head_dim=4, n_rot=4, base=1e4, interleaved=True),
    "attention": Attention(layer=0, n_heads=2, n_kv_heads=2, head_dim=4, scale=0.5),
}
WEIGHTS = {"embed": (32, 8), "rms_norm": (1, 8), "linear": (8, 8), "head": (8, 8)}


@pytest.mark.parametrize("kind", OPS)
def test_each_kind_accepts_what_fits_and_notices_another_width(kind: str) -> None:
    spec, weights = OPS[kind], (WEIGHTS[kind],) if kind in WEIGHTS else ()
    fits = Form(ATTRS.get(kind, Attrs()), (8,) * spec.n_inputs, weights, 8)
    assert type(fits.attrs) is spec.attrs
    assert [what for what, found, wanted in spec.sizes(fits) if found != wanted] == []
    wider = Form(fits.attrs, fits.inputs, fits.weights, 16)
    assert any(found != wanted for _, found, wanted in spec.sizes(wider))


def test_only_products_count_as_arithmetic() -> None:
    assert flops("linear", 100, 3) == flops("head", 100, 3) == 600
    assert [flops(kind, 100, 3) for kind in OPS if kind not in ("linear", "head")] == [0] * (len(OPS) - 2)
