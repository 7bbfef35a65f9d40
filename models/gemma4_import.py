"""Gemma 4 as Hugging Face publishes it, in GGUF's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetrun.graph import Weight
from hetrun.loader.hf_mapping import SEES, Config, HfModel, Imported, Setting
from hetrun.models.decoder import by_period
from hetrun.models.gemma3 import CONTEXT, NORMS, PERIOD, check_activation, ropes
from hetrun.models.hf_import import (
    ATTENTION,
    FEED_FORWARD,
    HEAD_NORMS,
    ImportTensors,
    not_in_gguf,
    refuse_embedders,
    sliding_layers,
)
from hetrun.models.seeing import text_model

NAME = "gemma4"
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}  # where the settings say nothing
KV = ("attn_k", "attn_v", "attn_k_norm")
OF_MIXTURE = {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
}
ROUTER = {"ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale"}
OWN = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
OWN_OF_ALL = {
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}


def shared_source(slides: Sequence[bool], shared: int) -> list[int | None]:
    """The layer whose keys and values each layer has: the last `shared` ones have those of the last one of
    their kind before them."""
    first = len(slides) - shared
    last = {kind: max((i for i in range(first) if slides[i] == kind), default=None) for kind in (True, False)}
    return [i if i < first else last[slides[i]] for i in range(len(slides))]


def from_hf(hf: HfModel) -> Imported:
    """The language model, with what sees and hears or without."""
    hf = text_model(hf, tied=True)
    c = hf.config.with_defaults({"max_position_embeddings": CONTEXT})
    check_hf(c)
    n = c.get_int("num_hidden_layers", 30, 1, 1 << 12)
    slides = sliding_layers(c, n) or by_period(n, PERIOD)
    slides[-1] = False  # whatever the settings say
    shared = c.get_int("num_kv_shared_layers", 0, 0, n - 1)
    near = c.get_int("head_dim", 256, 1, 1 << 12)
    full = of_full_layers(c, "global_head_dim", "head_dim", slides) or 512
    rope, base = ropes(c, full, PROPORTIONAL)
    n_ff = c.get_int("intermediate_size", 9216, 1, 1 << 24)
    doubled = c.get_bool("use_double_wide_mlp", False)
    settings: dict[str, Setting] = {
        "vocab_size": c.get_int("vocab_size", 262144, 1, 1 << 24),
        "context_length": c.require_int("max_position_embeddings", 1, 1 << 31),
        "embedding_length": c.get_int("hidden_size", 2304, 1, 1 << 20),
        "block_count": n,
        "feed_forward_length": tuple(n_ff * (1 + (doubled and i >= n - shared)) for i in range(n)),
        "attention.head_count": c.get_int("num_attention_heads", 8, 1, 1 << 14),
        "attention.head_count_kv": kv_heads(c, slides),
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": near,
        "attention.value_length_swa": near,
        "attention.layer_norm_rms_epsilon": c.get_float("rms_norm_eps", 1e-6),
        "attention.sliding_window": c.get_int("sliding_window", 512, 1, 1 << 31),
        "attention.sliding_window_pattern": tuple(slides),
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": c.get_int("hidden_size_per_layer_input", 256, 0, 1 << 16),
        **rope.settings,
        "rope.freq_base_swa": base,
        "rope.dimension_count_swa": near,
        **mixture_settings(c),
    }
    if c.has("final_logit_softcapping"):
        settings["final_logit_softcapping"] = c.get_float("final_logit_softcapping", 0.0)
    sources = shared_source(slides, shared)
    weights = {**tensors(hf, sources, slides), **rope.weights}
    plain = settings.get("rope.scaling.attn_factor", 1.0) == 1.0
    usual = bool(rope.weights) and plain
    lend = [*slides[max(0, n - shared - 2) : n - shared]]
    only_here = not_in_gguf(
        (not usual, f"llama.cpp's {NAME} turns a share of its large heads"),
        (
            shared > 0 and lend != [True, False],
            f"in llama.cpp's {NAME} the last two layers before lend theirs",
        ),
    )
    layout = {SEES: c.get_bool(SEES, False), **rope.layout, **only_here}
    return Imported(settings, weights, layout)


def check_hf(c: Config) -> None:
    """What hetrun does not do."""
    if c.get("use_bidirectional_attention") == "all":
        c.refuse("use_bidirectional_attention is all: this model makes embeddings, it does not write text")
    refuse_embedders(c.without("use_bidirectional_attention"))
    check_activation(c)
    if c.get_bool("attention_bias", False):
        c.refuse("attention_bias is true, and biases are not done in models of its type")


def of_full_layers(c: Config, key: str, nested: str, slides: Sequence[bool]) -> int:
    """A number that layers without a window have of their own, as it is published, or as transformers 5 saves
    it; 0: none."""
    found = c.get_int(key, 0, 0, 1 << 20)
    each = c.get("per_layer_config")
    if not found and isinstance(each, Mapping):
        layer = each.get(str(slides.index(False)))
        value = layer.get(nested) if isinstance(layer, Mapping) else None
        found = value if type(value) is int and 0 < value < 1 << 20 else 0
    return found


def kv_heads(c: Config, slides: Sequence[bool]) -> tuple[int, ...]:
    """Of each layer."""
    usual = c.get_int("num_key_value_heads", 4, 1, 1 << 14)
    full = usual
    if c.get_bool("attention_k_eq_v", False):
        full = of_full_layers(c, "num_global_key_value_heads", "num_key_value_heads", slides) or usual
    return tuple(usual if slide else full for slide in slides)


def mixture_settings(c: Config) -> dict[str, Setting]:
    """Of the mixture, where there is one."""
    if not c.get_bool("enable_moe_block", False):
        return {}
    n = c.require_int("num_experts", 1, 1 << 16)
    return {
        "expert_count": n,
        "expert_used_count": c.require_int("top_k_experts", 1, n),
        "expert_feed_forward_length": c.require_int("moe_intermediate_size", 1, 1 << 24),
    }


def tensors(hf: HfModel, sources: Sequence[int | None], slides: Sequence[bool]) -> dict[str, Weight]:
    """All tensors by GGUF name."""
    found, c = ImportTensors(hf), hf.config
    found.take_ends(tied=c.get_bool("tie_word_embeddings", True))
    own = c.get_int("hidden_size_per_layer_input", 256, 0, 1 << 16)
    if own:
        for ours, theirs in OWN_OF_ALL.items():
            found.take(f"{ours}.weight", f"{found.root}{theirs}.weight")
    alike = c.get_bool("attention_k_eq_v", False)
    for i, source in enumerate(sources):
        names = {**NORMS, **ATTENTION, **HEAD_NORMS, **FEED_FORWARD, **(OWN if own else {})}
        layer = f"{found.root}layers.{i}"
        if alike and not slides[i]:
            del names["attn_v"]
        if source != i:  # those that it might have count for nothing
            for part in KV:
                if theirs := names.pop(part, ""):
                    found.leave(f"{layer}.{theirs}.weight")
        found.take_layer(i, names, ())
        if c.get_bool("enable_moe_block", False):
            take_mixture(found, layer, i)
        found.take(f"blk.{i}.layer_output_scale.weight", f"{layer}.layer_scalar")
    return found.finish()


def take_mixture(found: ImportTensors, layer: str, i: int) -> None:
    """A layer's mixture: gate and up of an expert are one tensor, in GGUF as well."""
    found.take_layer(i, OF_MIXTURE, ())
    for ours, theirs in ROUTER.items():
        found.take(f"blk.{i}.{ours}", f"{layer}.{theirs}")
    for ours, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        found.take(f"blk.{i}.ffn_{ours}_exps.weight", f"{layer}.experts.{theirs}")
