"""The table of op kinds: every row is meant, and the oracle knows it."""

from __future__ import annotations

import pytest

from hetrun.backends.reference.ops import TABLE
from hetrun.graph.ops import (
    OPS,
    Attention,
    Attrs,
    CausalConv,
    DeltaNet,
    EverySecond,
    Gelu,
    Grow,
    LayerNorm,
    Moe,
    OpForm,
    PerHead,
    Positions,
    RmsNorm,
    Rope,
    Scale,
    Softcap,
    flops,
)


def test_the_reference_knows_every_kind() -> None:
    assert set(TABLE) == set(OPS)


def test_rows_of_the_table_are_complete() -> None:
    for kind, spec in OPS.items():
        assert spec.kind == kind
        assert spec.meaning
        assert any(n in spec.n_weights for n in range(5)), f"{kind} takes no number of weights"


MOE = Moe(n_experts=3, n_used=2, n_ff=16, normalise=True)
ATTRS = {
    "positions": Positions(offset=2),
    "rms_norm": RmsNorm(1e-5),
    "layer_norm": LayerNorm(1e-5),
    "per_head": PerHead(heads=2, first=1, passed=True),
    "rope": Rope(n_heads=2, head_dim=4, n_rot=4, base=1e4, interleaved=True),
    "attention": Attention(layer=0, n_heads=2, n_kv_heads=2, head_dim=4, scale=0.5),
    "moe": MOE,
    "geglu": Gelu(),
    "gelu": Gelu(exact=True),
    "causal_conv": CausalConv(0, kernel=4, width=8),
    "delta_net": DeltaNet(0, k_heads=2, v_heads=4, k_dim=3, v_dim=2),
    "every_second": EverySecond(heads=2, first=1),
    "scale": Scale(2.0),
    "grow": Grow(0.1, every=4),
    "softcap": Softcap(30.0),
}
WEIGHTS = {
    "embed": ((32, 8),),
    "positions": ((32, 8),),
    "rms_norm": ((1, 8),),
    "layer_norm": ((1, 8), (1, 8)),
    "linear": ((8, 8), (1, 8)),
    "head": ((8, 8),),
    "per_head": ((6, 2),),
    "causal_conv": ((8, 4),),
    "delta_net": ((1, 4), (1, 4)),
    "moe": ((3, 8), (48, 8), (48, 8), (24, 16)),
}


OUT = {"concat": 16, "every_second": 4, "per_head": 8}
INPUTS = {"delta_net": (20, 4, 4), "attention": (8, 8, 8)}


def fitting(kind: str) -> OpForm:
    inputs = INPUTS.get(kind, (8,) * OPS[kind].n_inputs)
    return OpForm(ATTRS.get(kind, Attrs()), inputs, WEIGHTS.get(kind, ()), OUT.get(kind, 8))


def wrong(kind: str, form: OpForm) -> list[str]:
    return [what for what, found, wanted in OPS[kind].sizes(form) if found != wanted]


@pytest.mark.parametrize("kind", OPS)
def test_each_kind_accepts_what_fits_and_notices_another_width(kind: str) -> None:
    fits = fitting(kind)
    assert type(fits.attrs) is OPS[kind].attrs
    assert len(fits.weights) in OPS[kind].n_weights
    assert wrong(kind, fits) == []
    assert wrong(kind, OpForm(fits.attrs, fits.inputs, fits.weights, 24)) != []


@pytest.mark.parametrize(
    ("kind", "index"), [(k, i) for k, shapes in WEIGHTS.items() for i in range(len(shapes))]
)
def test_each_weight_must_have_its_shape(kind: str, index: int) -> None:
    fits = fitting(kind)
    rows, cols = fits.weights[index]
    longer = (*fits.weights[:index], (rows, cols + 1), *fits.weights[index + 1 :])
    assert wrong(kind, OpForm(fits.attrs, fits.inputs, longer, 8)) != []


def test_heads_share_one_norm() -> None:
    assert wrong("rms_norm", OpForm(RmsNorm(1e-6, heads=2), (8,), ((1, 4),), 8)) == []
    assert wrong("rms_norm", OpForm(RmsNorm(1e-6, heads=2), (8,), ((1, 8),), 8)) == ["weight"]
    assert wrong("rms_norm", OpForm(RmsNorm(1e-6, heads=3), (8,), ((1, 2),), 8)) == ["width of all heads"]


@pytest.mark.parametrize("used", [0, 4])
def test_a_mixture_uses_some_of_its_experts(used: int) -> None:
    attrs = Moe(n_experts=3, n_used=used, n_ff=16, normalise=True)
    assert wrong("moe", OpForm(attrs, (8,), WEIGHTS["moe"], 8)) == ["number of experts used"]


def test_a_share_of_a_mixture_has_the_weights_of_its_experts() -> None:
    share = Moe(n_experts=3, n_used=2, n_ff=16, normalise=True, first=1, held=2)
    weights = ((3, 8), (32, 8), (32, 8), (16, 16))
    assert wrong("moe", OpForm(share, (8,), weights, 8)) == []
    assert wrong("moe", OpForm(share, (8,), WEIGHTS["moe"], 8)) == ["gate", "up", "down"]
    outside = Moe(n_experts=3, n_used=2, n_ff=16, normalise=True, first=2, held=2)
    assert wrong("moe", OpForm(outside, (8,), weights, 8)) == ["last expert"]


def test_only_products_count_as_arithmetic() -> None:
    assert flops("linear", Attrs(), [(20, 5), (1, 20)], 3) == flops("head", Attrs(), [(20, 5)], 3) == 600
    assert flops("per_head", ATTRS["per_head"], [(20, 5)], 3) == 600
    others = set(OPS) - {"linear", "head", "moe", "per_head"}
    assert {flops(kind, ATTRS.get(kind, Attrs()), [(20, 5)], 3) for kind in others} == {0}


def test_of_a_mixture_only_the_experts_that_are_used_count() -> None:
    router, gate, up, down = 3 * 8, 48 * 8, 48 * 8, 24 * 16
    assert flops("moe", MOE, WEIGHTS["moe"], 5) == 2 * 5 * (router + (gate + up + down) * 2 // 3)
