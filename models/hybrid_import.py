"""From Hugging Face's words to GGUF's, for Qwen 3.5 and its relatives."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetrun.graph import Weight
from hetrun.loader.hf_mapping import SEES, AddOne, Change, Config, HfModel, Imported, Setting, TileHeads
from hetrun.models.hf_import import (
    ATTENTION,
    FEED_FORWARD,
    HEAD_NORMS,
    ImportTensors,
    decoder_settings,
    experts_apart,
    head_dim_of,
    not_in_gguf,
    rope_factors,
)
from hetrun.models.hybrid import INTERVAL, heads_apart
from hetrun.models.rope import rope_from_hf
from hetrun.models.seeing import text_model

HEAD_DIM, ROTARY = 256, 0.25  # where the settings say nothing
SECTIONS = (11, 11, 10)  # pairs that turn by time, height and width, where the settings say nothing
NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
DELTA = {
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_a": "A_log",
    "ssm_dt.bias": "dt_bias",
    "ssm_norm.weight": "norm.weight",
    "ssm_out.weight": "out_proj.weight",
}
APART = {
    "attn_qkv.weight": "in_proj_qkv.weight",
    "attn_gate.weight": "in_proj_z.weight",
    "ssm_alpha.weight": "in_proj_a.weight",
    "ssm_beta.weight": "in_proj_b.weight",
}
TOGETHER = {"ssm_in.weight": "in_proj_qkvz.weight", "ssm_ba.weight": "in_proj_ba.weight"}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# The block that predicts one more token: GGUF has it as a layer after the last.
PREDICTS = re.compile(r"(?:model\.)?mtp\.(?:layers\.(\d+)\.)?(.+)")
NEXTN = {
    "nextn.eh_proj": "nextn.fc",
    "nextn.enorm": "nextn.pre_fc_norm_embedding",
    "nextn.hnorm": "nextn.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "nextn.norm",
}


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of a delta net."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int

    @property
    def settings(self) -> dict[str, Setting]:
        """As GGUF names them."""
        return {
            "ssm.conv_kernel": self.kernel,
            "ssm.state_size": self.k_dim,
            "ssm.group_count": self.k_heads,
            "ssm.time_step_rank": self.v_heads,
            "ssm.inner_size": self.v_dim * self.v_heads,
        }

    def change(self, name: str, tiled: bool) -> Change | None:
        """What `hetrun convert` does to one of its tensors."""
        if name.endswith("norm.weight"):
            return None if name.endswith("ssm_norm.weight") else AddOne()
        _, _, kind = name.split(".", 2) if name.startswith("blk.") else ("", "", "")
        regroup = tiled and self.k_heads != self.v_heads
        heads = (self.k_heads, self.v_heads if regroup else self.k_heads)
        if kind == "ssm_a":
            return TileHeads(*heads, 1, columns=True, negative_exp=True)
        if not regroup:
            return None
        skip = 2 * self.k_heads * self.k_dim
        return {
            "attn_qkv.weight": TileHeads(*heads, self.v_dim, skip),
            "ssm_conv1d.weight": TileHeads(*heads, self.v_dim, skip),
            "attn_gate.weight": TileHeads(*heads, self.v_dim),
            "ssm_alpha.weight": TileHeads(*heads, 1),
            "ssm_beta.weight": TileHeads(*heads, 1),
            "ssm_dt.bias": TileHeads(*heads, 1, columns=True),
            "ssm_out.weight": TileHeads(*heads, self.v_dim, columns=True),
        }.get(kind)


def hybrid_model(hf: HfModel) -> HfModel:
    """The language model, whose block that predicts one more token is a layer after the last."""
    found = text_model(hf)
    config = found.config
    if not config.section("rope_parameters").has("partial_rotary_factor"):
        config = config.with_defaults({"partial_rotary_factor": ROTARY})
    n = config.require_int("num_hidden_layers", 1, 1 << 12)
    return HfModel(config, predicting_last(found.tensors, n))


def predicting_last(tensors: Mapping[str, Weight], n: int) -> dict[str, Weight]:
    """The first block that predicts one more token as the layer after the last of n; left out where it has
    embeddings of its own."""
    root = "" if "embed_tokens.weight" in tensors else "model."
    whole = "mtp.fc.weight" in tensors and "mtp.embed_tokens.weight" not in tensors
    found = {}
    for name, weight in tensors.items():
        if (block := PREDICTS.fullmatch(name)) is None:
            found[name] = weight
        elif whole and block[1] in (None, "0"):
            found[f"{root}layers.{n}.{'' if block[1] else 'nextn.'}{block[2]}"] = weight
    return found


def hybrid_from_hf(hf: HfModel, name: str, tiled: bool, n_experts: int = 0) -> Imported:
    """As Hugging Face publishes it, but for the settings that only a mixture has.

    `tiled`: GGUF has the heads of v in another order.
    """
    c = hf.config
    head_dim = head_dim_of(c, HEAD_DIM)
    rope = rope_from_hf(c, head_dim, partial=True)
    if c.get_bool("attention_bias", False):
        c.refuse("attention_bias is true, and biases are not done in models of its type")
    delta, recurrent = read_delta(c), recurrent_layers(c)
    settings = decoder_settings(c, head_dim, rope) | delta.settings
    if any(".nextn.fc." in name for name in hf.tensors):
        settings |= {"block_count": len(recurrent) + 1, "nextn_predict_layers": 1}
        recurrent = (*recurrent, False)
    settings["attention.recurrent_layers"] = recurrent
    settings["full_attention_interval"] = c.get_int("full_attention_interval", INTERVAL, 1, 1 << 12)
    weights = tensors(experts_apart(hf, n_experts) if n_experts else hf, recurrent, n_experts, delta)
    only_here = not_in_gguf(
        rope_factors(rope, name),
        (delta.k_dim != delta.v_dim, f"llama.cpp's {name} has heads of one size for k and v in delta nets"),
    )
    layout = {
        SEES: c.get_bool(SEES, False),
        "norm.offset": 1.0,
        "ssm.log": True,
        "ssm.grouped": True,
        **rope.layout,
        **only_here,
    }
    changes = {w: change for w in weights if (change := delta.change(w, tiled))}
    return Imported(settings, {**weights, **rope.weights}, layout, changes)


def mixture_from_hf(hf: HfModel, name: str, tiled: bool) -> Imported:
    """The same, with a mixture of experts and a shared one in every layer, or in most of them."""
    c = hf.config
    n_experts, shared = c.require_int("num_experts", 1, 1 << 16), "shared_expert_intermediate_size"
    if not (n_shared := c.require_int(shared, 0, 1 << 24)):  # none: what is there of it is empty
        hf = HfModel(c, {name: w for name, w in hf.tensors.items() if ".shared_expert" not in name})
    n_ff = c.require_int("moe_intermediate_size", 1, 1 << 24)
    settings: dict[str, Setting] = {
        "expert_count": n_experts,
        "expert_used_count": c.require_int("num_experts_per_tok", 1, n_experts),
        "expert_feed_forward_length": n_ff,
        "expert_shared_feed_forward_length": n_shared,
        "expert_weights_norm": c.get_bool("norm_topk_prob", True),
    }
    plain = HfModel(c.without(shared).with_defaults({"intermediate_size": n_ff}), hf.tensors)
    found = hybrid_from_hf(plain, name, tiled, n_experts)
    dense = any(".ffn_gate.weight" in w for w in found.weights)
    only_here = not_in_gguf(
        (dense, f"llama.cpp's {name} has no layers without experts"),
        (not n_shared, f"llama.cpp's {name} always has a shared expert"),
        (not settings["expert_weights_norm"], f"llama.cpp's {name} always normalises what the router says"),
    )
    return replace(found.with_settings(settings), layout={**only_here, **found.layout})


def read_delta(c: Config) -> DeltaHeads:
    """The delta nets' settings."""
    k_heads = c.get_int("linear_num_key_heads", 16, 1, 1 << 12)
    v_heads = c.get_int("linear_num_value_heads", 32, 1, 1 << 12)
    if v_heads % k_heads:
        c.refuse(f"linear_num_value_heads is {v_heads}, which {k_heads} heads of keys cannot share")
    return DeltaHeads(
        k_heads,
        v_heads,
        c.get_int("linear_key_head_dim", 128, 1, 1 << 12),
        c.get_int("linear_value_head_dim", 128, 1, 1 << 12),
        c.get_int("linear_conv_kernel_dim", 4, 2, 64),
    )


def recurrent_layers(c: Config) -> tuple[bool, ...]:
    """Which layers have a delta net: layer_types says it, else all but the last of each interval."""
    n = c.require_int("num_hidden_layers", 1, 1 << 12)
    types = c.get_strings("layer_types", n)
    if types is None:
        interval = c.get_int("full_attention_interval", INTERVAL, 1, 1 << 12)
        return tuple((i + 1) % interval != 0 for i in range(n))
    if others := set(types) - {"linear_attention", "full_attention"}:
        c.refuse(f"layer_types has {min(others)[:40]!r}; models of its type have linear and full attention")
    return tuple(kind == "linear_attention" for kind in types)


def tensors(hf: HfModel, recurrent: Sequence[bool], n_experts: int, delta: DeltaHeads) -> dict[str, Weight]:
    """All tensors by GGUF name."""
    found = ImportTensors(hf)
    found.take_ends(tied=hf.config.get_bool("tie_word_embeddings", False))
    for i, is_delta in enumerate(recurrent):
        found.take_layer(i, NORMS, ())
        if is_delta:
            take_delta(found, hf, i)
        else:
            found.take_layer(i, {**ATTENTION, **HEAD_NORMS}, ())
        if hf.has(f"{found.root}layers.{i}.nextn.fc.weight"):
            found.take_layer(i, NEXTN, ())
        if n_experts and hf.has(f"{found.root}layers.{i}.mlp.gate.weight"):
            found.take_experts(i, n_experts)
            if hf.has(f"{found.root}layers.{i}.mlp.shared_expert_gate.weight"):
                found.take_layer(i, SHARED_EXPERT, ())
        else:
            found.take_layer(i, FEED_FORWARD, ())
    return heads_in_order(hf.config, found.finish(), delta)


def take_delta(found: ImportTensors, hf: HfModel, i: int) -> None:
    """The tensors of a delta net."""
    theirs = f"{found.root}layers.{i}.linear_attn."
    together = hf.has(f"{theirs}in_proj_qkvz.weight")
    for ours, name in {**DELTA, **(TOGETHER if together else APART)}.items():
        found.take(f"blk.{i}.{ours}", f"{theirs}{name}")


def heads_in_order(c: Config, weights: dict[str, Weight], d: DeltaHeads) -> dict[str, Weight]:
    """As GGUF has it: q, k and v of all heads, and z of all, where each head of k has its own together."""
    out = {}
    for name, weight in weights.items():
        if not name.endswith(".ssm_in.weight"):
            out[name] = weight
            continue
        if weight.shape[0] != 2 * d.k_heads * d.k_dim + 2 * d.v_heads * d.v_dim:
            c.refuse(f"the {weight.shape[0]} rows of {name} are not those of the heads that the settings say")
        qkv, z = heads_apart(weight, d.k_heads, d.k_dim, d.v_heads // d.k_heads * d.v_dim)
        prefix = name.removesuffix("ssm_in.weight")
        for ours, part in (("attn_qkv.weight", qkv), ("attn_gate.weight", z)):
            out[prefix + ours] = replace(part, name=prefix + ours)
    return out
