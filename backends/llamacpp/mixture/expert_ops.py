"""What stands between the products of experts, as ggml has it: biases, and a gate with what it opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetrun.graph.ops import CLAMP, CLAMP_STEEPNESS, Activation, MoreWeight

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter

BIASES: tuple[MoreWeight, ...] = ("gate_bias", "up_bias", "down_bias")  # of gate, up and down


def activated(e: GgmlEmitter, activation: Activation, gate: int, up: int) -> int:
    """What goes through the last matrix of each expert."""
    found: int
    if activation == "clamped":
        found = e.lib.ggml_swiglu_oai(e.ctx, gate, up, CLAMP_STEEPNESS, CLAMP)
    elif activation == "gelu":
        found = e.lib.ggml_geglu_split(e.ctx, gate, up)
    else:
        found = e.lib.ggml_swiglu_split(e.ctx, gate, up)
    return found


def biased(e: GgmlEmitter, results: int, bias: int, chosen: int) -> int:
    """Results of each pair and its expert's bias, if there are such."""
    return int(e.lib.ggml_add_id(e.ctx, results, bias, chosen)) if bias else results
