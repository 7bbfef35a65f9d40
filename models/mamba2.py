"""Mamba 2's part of a layer: a convolution and a scan over states, behind a gate and a norm."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetrun.graph import GraphBuilder, ModelMeta, Value
from hetrun.graph.ops import NONE, CausalConv, DeltaNet
from hetrun.loader.hf_mapping import Config, Setting, TileHeads
from hetrun.models import blocks
from hetrun.models.hf_import import ImportTensors

LOG = "ssm.log"  # a setting of ours: decays as Hugging Face stores them
WEIGHTS = {
    "ssm_in.weight": "in_proj.weight",
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_dt.bias": "dt_bias",
    "ssm_norm.weight": "norm.weight",
    "ssm_out.weight": "out_proj.weight",
}
NO_LIMITS = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # as it is written
COLUMNS = {"ssm_a": "A_log", "ssm_d": "D"}  # GGUF has a row for each of their numbers


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Its settings."""

    scan: DeltaNet
    taps: int
    eps: float


def read_mamba2(b: GraphBuilder, meta: ModelMeta, eps: float) -> Mamba2:
    """The settings as GGUF names them."""
    groups = meta.require_int("ssm.group_count", 1, 1 << 12)
    heads = meta.require_int("ssm.time_step_rank", 1, 1 << 14)
    inner = meta.require_int("ssm.inner_size", 1, 1 << 20)
    b.check(inner % heads == 0, f"ssm.inner_size is {inner}, which {heads} heads cannot share")
    b.check(heads % groups == 0, f"{heads} heads cannot share {groups} groups of a scan")
    state = meta.require_int("ssm.state_size", 1, 1 << 12)
    scan = DeltaNet(0, groups, heads, state, inner // heads, log=meta.get_bool(LOG, False), mamba=True)
    return Mamba2(scan, meta.require_int("ssm.conv_kernel", 2, 64), eps)


def mamba2(b: GraphBuilder, h: Value, m: Mamba2, i: int, last: bool) -> Value:
    """out(norm(scan(convolution(x, B, C), dt) * silu(z))) of a normed stream; of the last layer only the
    wanted rows."""
    s, blk = replace(m.scan, layer=i), f"blk.{i}"
    inner, mixed = s.v_width, s.v_width + 2 * s.k_width
    whole = b.weight(f"{blk}.ssm_in.weight", inner + mixed + s.v_heads, h.width)

    def projected(h: Value, part: str, first: int, n: int) -> Value:
        return b.op("linear", [h], [whole.rows(first, first + n)], NONE, n, part=part)

    x, dt = projected(h, "q", inner, mixed), projected(h, "k", inner + mixed, s.v_heads)
    weights = [b.weight(f"{blk}.ssm_conv1d.weight", mixed, m.taps)]
    if b.has(f"{blk}.ssm_conv1d.bias"):
        weights.append(b.weight(f"{blk}.ssm_conv1d.bias", 1, mixed).upright)
    x = b.op("causal_conv", [x], weights, CausalConv(i, m.taps, mixed), mixed, part="score")
    decays, skips = (b.weight(f"{blk}.{name}", s.v_heads, 1).lying for name in ("ssm_a", "ssm_d"))
    vectors = [decays, b.weight(f"{blk}.ssm_dt.bias", 1, s.v_heads), skips]
    y = b.op("delta_net", [x, dt, dt], vectors, s, inner, part="score")
    if last:
        h, y = blocks.select(b, h), blocks.select(b, y)
    y = b.op("swiglu", [projected(h, "q", 0, inner), y], [], NONE, inner, part="score")
    y = blocks.rms_norm(b, y, f"{blk}.ssm_norm.weight", m.eps, "score")
    return blocks.linear(b, y, f"{blk}.ssm_out", h.width, "out")


def mamba2_settings(c: Config) -> dict[str, Setting]:
    """The same of a folder."""
    heads, groups = c.get_int("mamba_n_heads", 128, 1, 1 << 14), c.get_int("mamba_n_groups", 1, 1, 1 << 12)
    if groups != 1:
        c.refuse(f"mamba_n_groups is {groups}, and norms of groups are not done in models of its type")
    if c.get_bool("mamba_proj_bias", False):
        c.refuse("mamba_proj_bias is true, and biases are not done there in models of its type")
    if c.get("time_step_limit") not in NO_LIMITS:
        c.refuse(f"time_step_limit is {str(c.get('time_step_limit'))[:40]}, and limits are not done")
    return {
        "ssm.conv_kernel": c.get_int("mamba_d_conv", 4, 2, 64),
        "ssm.state_size": c.get_int("mamba_d_state", 256, 1, 1 << 12),
        "ssm.group_count": groups,
        "ssm.inner_size": c.get_int("mamba_expand", 2, 1, 64) * c.require_int("hidden_size", 1, 1 << 20),
        "ssm.time_step_rank": heads,
    }


def take_mamba2(found: ImportTensors, i: int, theirs: str, biased: bool) -> None:
    """Its tensors in a layer."""
    for ours, name in WEIGHTS.items():
        found.take(f"blk.{i}.{ours}", f"{theirs}.{name}")
    if biased:
        found.take(f"blk.{i}.ssm_conv1d.bias", f"{theirs}.conv1d.bias")
    for ours, name in COLUMNS.items():
        found.put(f"blk.{i}.{ours}", found.use(f"{theirs}.{name}").upright)


def mamba2_changes(heads: int, weights: dict[str, object]) -> dict[str, TileHeads]:
    """What `hetrun convert` does: GGUF has the decays themselves."""
    change = TileHeads(heads, heads, 1, negative_exp=True)
    return {name: change for name in weights if name.endswith(".ssm_a")}
