"""LFM2 and LFM2.5: short convolutions between two gates in most layers, attention in the others."""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Value, Weight
from hetrun.graph.ops import NONE, CausalConv
from hetrun.loader.hf_mapping import Config, HfModel, Imported
from hetrun.models import blocks
from hetrun.models.decoder import (
    Decoder,
    FeedForward,
    attention,
    build_decoder,
    norm,
    plain_ffn,
    read_attending,
    read_decoder,
)
from hetrun.models.hf_import import (
    FEED_FORWARD,
    ImportTensors,
    decoder_settings,
    head_dim_of,
    not_in_gguf,
    rope_factors,
)
from hetrun.models.rope import rope_from_hf

name = "lfm2"

LAST_NORM = "token_embd_norm"  # as llama.cpp's converter calls it in most files
BASE = 1e6  # of rope, where the settings say nothing
WORDS = {
    ".feed_forward.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
    ".out_proj.": ".o_proj.",
}  # as other models have them
NORMS = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
ATTENTION = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
}
CONVOLUTION = {
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.o_proj",
}


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    d = read_decoder(b, meta, interleaved=False, head_norms=True)
    return build_between_gates(b, meta, d, plain_ffn(b, d))


def build_between_gates(b: GraphBuilder, meta: ModelMeta, d: Decoder, feed_forward: FeedForward) -> Graph:
    """The forward step with any feed-forward part."""
    attends, taps = read_attending(meta), meta.require_int("shortconv.l_cache", 2, 64)
    if b.has(f"{LAST_NORM}.weight"):
        d = replace(d, last_norm=LAST_NORM)

    def attend(x: Value, i: int) -> Value:
        return attention(b, x, d, i) if attends[i] else short_convolution(b, x, d, i, taps)

    return build_decoder(b, d, feed_forward, attend)


def short_convolution(b: GraphBuilder, x: Value, d: Decoder, i: int, taps: int) -> Value:
    """x + out(gate * convolution(gate * value)); of the last layer only the wanted rows go on."""
    blk, n = f"blk.{i}", x.width
    h = norm(b, x, f"{blk}.attn_norm", d, "before")
    whole = b.weight(f"{blk}.shortconv.in_proj.weight", 3 * n, n)

    def projected(h: Value, part: str, at: int) -> Value:
        return b.op("linear", [h], [whole.rows(at * n, (at + 1) * n)], NONE, n, part=part)

    y = b.op("multiply", [projected(h, "k", 0), projected(h, "v", 2)], [], NONE, n, part="v")
    kernel = b.weight(f"{blk}.shortconv.conv.weight", n, taps)
    y = b.op("causal_conv", [y], [kernel], CausalConv(i, taps, n, silu=False), n, part="score")
    if i == d.n_layers - 1:
        h, x, y = (blocks.select(b, value) for value in (h, x, y))
    y = b.op("multiply", [projected(h, "q", 1), y], [], NONE, n, part="score")
    return blocks.add(b, x, blocks.linear(b, y, f"{blk}.shortconv.out_proj", n, "out"), part="out")


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    hf = in_other_words(hf)
    found = ImportTensors(hf)
    take_layers(found, hf.config)
    for i in range(hf.config.require_int("num_hidden_layers", 1, 1 << 12)):
        found.take_layer(i, FEED_FORWARD, ())
    # What the settings say of its width is rounded in ways that the matrices have seen.
    n_ff = hf.weight(f"{found.root}layers.0.mlp.gate_proj.weight").shape[0]
    c = hf.config.without("intermediate_size").with_defaults({"intermediate_size": n_ff})
    return imported(c, found.finish(), name)


def in_other_words(hf: HfModel) -> HfModel:
    """The model with names that others have."""
    out: dict[str, Weight] = {}
    for theirs, weight in hf.tensors.items():
        ours = theirs
        for word, usual in WORDS.items():
            ours = ours.replace(word, usual)
        out[ours] = weight
    c = hf.config.with_defaults({"rope_theta": BASE, "rms_norm_eps": hf.config.get_float("norm_eps", 1e-5)})
    tied = c.get_bool("tie_embedding", c.get_bool("tie_word_embeddings", True))
    return HfModel(c.without("tie_word_embeddings").with_defaults({"tie_word_embeddings": tied}), out)


def imported(c: Config, weights: dict[str, Weight], architecture: str) -> Imported:
    """The settings of both kinds, with their weights."""
    head_dim = head_dim_of(c)
    rope = rope_from_hf(c, head_dim)
    settings = decoder_settings(c, head_dim, rope)
    heads = c.get_int("num_key_value_heads", 8, 1, 1 << 14)
    settings |= {
        "attention.head_count_kv": tuple(heads if attends else 0 for attends in attending(c)),
        "shortconv.l_cache": c.get_int("conv_L_cache", 3, 2, 64),
    }
    only_here = not_in_gguf(rope_factors(rope, architecture))
    return Imported(settings, {**weights, **rope.weights}, {**rope.layout, **only_here})


def attending(c: Config) -> tuple[bool, ...]:
    """Which layers have attention."""
    n = c.require_int("num_hidden_layers", 1, 1 << 12)
    types = c.get_strings("layer_types", n)
    if types is None:
        indices = c.get("full_attn_idxs")
        return tuple(not isinstance(indices, list) or i in indices for i in range(n))
    if others := set(types) - {"conv", "full_attention"}:
        c.refuse(f"layer_types has {min(others)[:40]!r}; models of its type have conv and full_attention")
    return tuple(kind == "full_attention" for kind in types)


def take_layers(found: ImportTensors, c: Config) -> None:
    """All tensors but those of feed-forward parts."""
    if c.get_bool("conv_bias", False):
        c.refuse("conv_bias is true, and biases are not done in models of its type")
    found.take_words(f"{found.root}embed_tokens.weight", c.get_bool("tie_word_embeddings", True))
    found.take("token_embd_norm.weight", f"{found.root}embedding_norm.weight")
    for i, attends in enumerate(attending(c)):
        found.take_layer(i, {**NORMS, **(ATTENTION if attends else CONVOLUTION)}, ())
