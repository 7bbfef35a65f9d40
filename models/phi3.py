"""Phi-3 and Phi-4: q, k and v in one matrix, gate and up in another, rope with factors for long contexts."""

from __future__ import annotations

from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.models import blocks
from hetrun.models.decoder import build_decoder, read_decoder
from hetrun.models.hf_import import NORMS, ImportTensors, decoder_settings, head_dim_of, not_in_gguf
from hetrun.models.rope import LONG_FACTORS, default, longrope, rope_from_hf

name = "phi3"

# The first Phi-3 models called it su or yarn.
ROPES = {"default": default, "longrope": longrope, "su": longrope, "yarn": longrope}
PRODUCTS = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=False)
    return build_decoder(b, d, lambda x, i: blocks.fused_ffn(b, x, f"blk.{i}", d.n_ff))


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    head_dim = head_dim_of(c)
    rope = rope_from_hf(c, head_dim, partial=True, kinds=ROPES)
    settings = decoder_settings(c, head_dim, rope)
    if LONG_FACTORS in rope.weights and not c.has("original_max_position_embeddings"):
        c.refuse("original_max_position_embeddings is missing: the model is incomplete")
    # llama.cpp ignores the window, though the models were trained with one; a 0 tells Phi-4, which has none.
    settings["attention.sliding_window"] = c.get_int("sliding_window", 0, 0, 1 << 31)
    heads = c.require_int("num_attention_heads", 1, 1 << 14) * head_dim
    only_here = not_in_gguf(
        (heads != settings["embedding_length"], "llama.cpp's phi3 has no head_dim of its own")
    )
    tensors = ImportTensors(hf)
    tensors.take_ends(tied=c.get_bool("tie_word_embeddings", False))
    for i in range(c.require_int("num_hidden_layers", 1, 1 << 12)):
        tensors.take_layer(i, {**NORMS, **PRODUCTS}, biased=())
    return Imported(settings, {**tensors.finish(), **rope.weights}, {**rope.layout, **only_here})
