"""Mixtures as DeepSeek made them common: some layers without one, experts that all rows share, and a bias
that only counts where experts are chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetrun.graph import GraphBuilder, ModelMeta, Value
from hetrun.graph.ops import Moe
from hetrun.loader.hf_mapping import Config, Setting
from hetrun.models import blocks
from hetrun.models.decoder import FeedForward

SOFTMAX, SIGMOID = 1, 2  # as GGUF numbers what becomes of a router's scores


@dataclass(frozen=True, slots=True)
class Mixtures:
    """The feed-forward parts of such a model."""

    moe: Moe
    n_ff: int  # of layers without a mixture
    n_ff_shared: int


def read_mixtures(b: GraphBuilder, meta: ModelMeta, scores: int, normalise: bool) -> Mixtures:
    """The settings as GGUF names them; the last two are for files that do not say."""
    n_experts = meta.require_int("expert_count", 1, 1 << 16)
    n_used = meta.require_int("expert_used_count", 1, n_experts)
    n_ff = meta.require_int("feed_forward_length", 1, 1 << 24)
    each = meta.get_int("expert_feed_forward_length", n_ff, 1, 1 << 24)
    shared = meta.get_int("expert_shared_count", 0, 0, 1 << 10) * each
    groups = meta.get_int("expert_group_count", 1, 1, n_experts)
    b.check(n_experts % groups == 0, f"{groups} groups cannot share {n_experts} experts")
    moe = Moe(
        n_experts,
        n_used,
        each,
        normalise=meta.get_bool("expert_weights_norm", normalise),
        scale=meta.get_float("expert_weights_scale", 1.0) or 1.0,
        scores="sigmoid" if meta.get_int("expert_gating_func", scores, 1, 2) == SIGMOID else "softmax",
        groups=groups,
        groups_used=meta.get_int("expert_group_used_count", groups, 1, groups),
    )
    return Mixtures(moe, n_ff, meta.get_int("expert_shared_feed_forward_length", shared, 0, 1 << 24))


def feed_forward(b: GraphBuilder, m: Mixtures, x: Value, i: int) -> Value:
    """A mixture and its shared experts, or what a layer without one has."""
    blk = f"blk.{i}"
    if not b.has(f"{blk}.ffn_gate_inp.weight"):
        return blocks.gated_ffn(b, x, blk, m.n_ff)
    biased = b.has(f"{blk}.{blocks.MORE['choice_bias']}")
    y = blocks.mixture(b, x, blk, replace(m.moe, more=("choice_bias",) if biased else ()))
    if not b.has(f"{blk}.ffn_gate_shexp.weight"):
        return y
    return blocks.add(b, y, blocks.gated_ffn(b, x, blk, m.n_ff_shared, suffix="_shexp"), "down")


def mixed_ffn(b: GraphBuilder, m: Mixtures) -> FeedForward:
    """The feed-forward part of each layer."""
    return lambda x, i: feed_forward(b, m, x, i)


def mixture_settings(c: Config, experts: str, scores: int, normalise: bool) -> dict[str, Setting]:
    """The same of a folder; `experts`: what its number of experts is called."""
    n = c.require_int(experts, 1, 1 << 16)
    groups = c.get_int("n_group", 1, 1, n)
    settings: dict[str, Setting] = {
        "expert_count": n,
        "expert_used_count": c.require_int("num_experts_per_tok", 1, n),
        "expert_feed_forward_length": c.require_int("moe_intermediate_size", 1, 1 << 24),
        "expert_gating_func": scores,
        "expert_weights_norm": c.get_bool("norm_topk_prob", normalise),
        "expert_weights_scale": c.get_float("routed_scaling_factor", 1.0),
    }
    if shared := c.get_int("n_shared_experts", 0, 0, 1 << 10):
        settings["expert_shared_count"] = shared
    if groups > 1:
        settings |= {
            "expert_group_count": groups,
            "expert_group_used_count": c.get_int("topk_group", groups, 1, groups),
        }
    return settings
