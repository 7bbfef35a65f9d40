"""GLM-4 and GLM-Z1: norms before and after attention and feed-forward, rope on half of a head, gate and up in
one matrix."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models import blocks
from hetrun.models.decoder import build_decoder, read_decoder
from hetrun.models.hf_import import (
    ATTENTION,
    ImportTensors,
    decoder_settings,
    head_dim_of,
    not_in_gguf,
    rope_factors,
)
from hetrun.models.rope import rope_from_hf

name = "glm4"

ROTARY = 0.5  # of a head, where the settings say nothing
QKV = ("attn_q", "attn_k", "attn_v")
NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
FEED_FORWARD = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    # llama.cpp's converter takes the pairs of those that see pictures apart.
    sections = meta.get_numbers("rope.dimension_sections", 4) or (0.0,)
    d = replace(read_decoder(b, meta, interleaved=not all(sections[:2])), norms="both")
    return build_decoder(b, d, lambda x, i: blocks.fused_ffn(b, x, f"blk.{i}", d.n_ff))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    if not c.section("rope_parameters").has("partial_rotary_factor"):
        c = c.with_defaults({"partial_rotary_factor": ROTARY})
    head_dim = head_dim_of(c, default=128)
    rope = rope_from_hf(c, head_dim, partial=True)
    biased = QKV if c.get_bool("attention_bias", True) else ()
    tensors = ImportTensors(hf)
    tensors.take_ends(tied=c.get_bool("tie_word_embeddings", False))
    for i in range(c.require_int("num_hidden_layers", 1, 1 << 12)):
        tensors.take_layer(i, {**NORMS, **ATTENTION, **FEED_FORWARD}, biased)
    only_here = not_in_gguf(rope_factors(rope, name))
    settings = decoder_settings(c, head_dim, rope)
    return Imported(settings, {**tensors.finish(), **rope.weights}, {**rope.layout, **only_here})
