"""Gemma 3: layers that see a window, every sixth one that sees all, and norms around everything."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetrun.graph import Graph, GraphBuilder, ModelMeta, Value, Weight
from hetrun.graph.ops import Rope, Scale, Softcap
from hetrun.loader.hf_mapping import SEES, AddOne, Config, HfModel, Imported, Setting
from hetrun.models import blocks
from hetrun.models.decoder import by_period, count_layers, read_heads, read_pattern
from hetrun.models.hf_import import (
    ATTENTION,
    FEED_FORWARD,
    HEAD_NORMS,
    Tensors,
    not_in_gguf,
    refuse_embedders,
    sliding_layers,
)
from hetrun.models.rope import KINDS, HfRope, check_rope, factors, read_rope, scaling_from_hf
from hetrun.models.seeing import text_model

name = "gemma3"

CONTEXT = 131072  # where the settings say nothing
PERIOD = 6  # layers from one that sees all to the next, where the settings say nothing
SOME_27B = 62  # layers of the model that llama.cpp knows to scale its queries otherwise
NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """What differs from layer to layer."""

    attention: blocks.AttentionShape
    rope: Rope
    factors: str  # the tensor that divides rope's angles; it may be missing


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """The settings of a Gemma 3 model."""

    n_vocab: int
    width: int
    n_ff: int
    eps: float
    norm_offset: float  # what is added to each norm's gain
    softcap: float  # of the logits; 0 is none
    layers: tuple[Layer, ...]


def read_config(b: GraphBuilder, meta: ModelMeta) -> GemmaConfig:
    """The settings as GGUF names them."""
    n_layers = count_layers(b, meta)
    full, sliding = read_layers(b, meta, n_layers)
    eps = meta.get_float("attention.layer_norm_rms_epsilon", 1e-6)
    softcap = meta.get_float("final_logit_softcapping", 0.0)
    b.check(eps >= 0, f"attention.layer_norm_rms_epsilon is {eps}")
    b.check(softcap >= 0, f"final_logit_softcapping is {softcap}")
    return GemmaConfig(
        n_vocab=meta.require_int("vocab_size", 1, 1 << 24),
        width=meta.require_int("embedding_length", 1, 1 << 20),
        n_ff=meta.require_int("feed_forward_length", 1, 1 << 24),
        eps=eps,
        norm_offset=meta.get_float("norm.offset", 0.0),
        softcap=softcap,
        layers=tuple(sliding if slides else full for slides in read_pattern(meta, n_layers, PERIOD)),
    )


def read_layers(b: GraphBuilder, meta: ModelMeta, n_layers: int) -> tuple[Layer, Layer]:
    """Layers that see all, and those with a window. Without a window all are of the first kind."""
    width = meta.require_int("embedding_length", 1, 1 << 20)
    heads = read_heads(b, meta)
    n_heads, head_dim = heads.n_heads, heads.head_dim
    scale = meta.get_float("attention.scale", query_scale(n_layers, width, n_heads, head_dim))
    rope = read_rope(meta, n_heads, head_dim, interleaved=False)
    check_rope(b, meta, rope)
    full = Layer(replace(heads, scale=scale), rope, factors(b, meta, rope))
    if not (window := meta.get_int("attention.sliding_window", 0, 0, 1 << 31)):
        return full, full
    # Scaling is for those that see far.
    base = meta.get_float("rope.freq_base_swa", 10000.0)
    b.check(base > 0, f"rope.freq_base_swa is {base}")
    near = Rope(n_heads, head_dim, rope.n_rot, base, interleaved=False)
    return full, Layer(replace(full.attention, window=window), near, factors="")


def query_scale(n_layers: int, width: int, n_heads: int, head_dim: int) -> float:
    """GGUF has no word for it: llama.cpp tells the 27B model, which is another, by its number of layers."""
    return 1 / math.sqrt(max(1, width // n_heads) if n_layers == SOME_27B else head_dim)


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    c = read_config(b, meta)
    x = blocks.embed(b, "token_embd.weight", c.n_vocab, c.width)
    with b.scope("embed"):
        x = b.op("scale", [x], [], Scale(math.sqrt(c.width)), c.width)
    for i in range(len(c.layers)):
        with b.scope(f"blk.{i}.attn"):
            x = attention(b, x, c, i)
        with b.scope(f"blk.{i}.ffn"):
            h = norm(b, x, f"blk.{i}.ffn_norm", c)
            h = blocks.gated_ffn(b, h, f"blk.{i}", c.n_ff, gate="geglu")
            x = blocks.add(b, x, norm(b, h, f"blk.{i}.post_ffw_norm", c, "down"), part="down")
    with b.scope("output"):
        hidden = norm(b, x, "output_norm", c)
        head = "output" if b.has("output.weight") else "token_embd"
        logits = blocks.linear(b, hidden, head, c.n_vocab, "head", kind="head")
        if c.softcap:
            logits = b.op("softcap", [logits], [], Softcap(c.softcap), c.n_vocab, part="head")
    return b.finish(hidden, logits)


def norm(b: GraphBuilder, x: Value, name: str, c: GemmaConfig, part: str = "norm", heads: int = 1) -> Value:
    """Gemma's norm, whose gain Hugging Face stores less 1."""
    return blocks.rms_norm(b, x, f"{name}.weight", c.eps, part, heads, c.norm_offset)


def attention(b: GraphBuilder, x: Value, c: GemmaConfig, i: int) -> Value:
    """x + norm(attention(norm(x))); behind the last layer's K and V only the wanted rows go on."""
    layer, blk = c.layers[i], f"blk.{i}"
    shape = layer.attention
    h = norm(b, x, f"{blk}.attn_norm", c)
    k = blocks.qkv(b, h, blk, shape, "k")
    v = blocks.qkv(b, h, blk, shape, "v")
    if i == len(c.layers) - 1:
        h, x = blocks.select(b, h), blocks.select(b, x)
    q = blocks.qkv(b, h, blk, shape, "q")
    q = norm(b, q, f"{blk}.attn_q_norm", c, "q", shape.n_heads)
    k = norm(b, k, f"{blk}.attn_k_norm", c, "k", shape.n_kv_heads)
    q = blocks.rope(b, q, layer.rope, layer.factors, "q")
    k = blocks.rope(b, k, replace(layer.rope, n_heads=shape.n_kv_heads), layer.factors, "k")
    a = blocks.attend(b, q, k, v, i, shape)
    a = blocks.linear(b, a, f"{blk}.attn_output", x.width, "out")
    return blocks.add(b, x, norm(b, a, f"{blk}.post_attention_norm", c, "out"), part="out")


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it, with what sees pictures or without."""
    hf = text_model(hf, tied=True)
    c = hf.config.with_defaults({"max_position_embeddings": CONTEXT})
    check_hf(c)
    n_layers = c.get_int("num_hidden_layers", 26, 1, 1 << 12)
    width = c.get_int("hidden_size", 2304, 1, 1 << 20)
    n_heads = c.get_int("num_attention_heads", 8, 1, 1 << 14)
    head_dim = c.get_int("head_dim", 256, 1, 1 << 12)
    rope, near = ropes(c, head_dim)
    settings: dict[str, Setting] = {
        "vocab_size": c.get_int("vocab_size", 262208, 1, 1 << 24),
        "context_length": c.require_int("max_position_embeddings", 1, 1 << 31),
        "embedding_length": width,
        "block_count": n_layers,
        "feed_forward_length": c.get_int("intermediate_size", 9216, 1, 1 << 24),
        "attention.head_count": n_heads,
        "attention.head_count_kv": c.get_int("num_key_value_heads", 4, 1, n_heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": c.get_float("rms_norm_eps", 1e-6),
        **window_settings(c, n_layers),
        **rope.settings,
        "rope.freq_base_swa": near,
    }
    if c.has("final_logit_softcapping"):
        settings["final_logit_softcapping"] = c.get_float("final_logit_softcapping", 0.0)
    weights = {**tensors(hf, n_layers), **rope.weights}
    scale = 1 / math.sqrt(c.get_float("query_pre_attn_scalar", 256.0))
    usual = math.isclose(scale, query_scale(n_layers, width, n_heads, head_dim), rel_tol=1e-6)
    plain_rope = not rope.weights and settings.get("rope.scaling.attn_factor", 1.0) == 1.0
    only_here = not_in_gguf(
        (not usual, "llama.cpp's gemma3 scales queries by head_dim, and this model does not"),
        (c.get_bool("attention_bias", False), "llama.cpp's gemma3 has no biases in attention"),
        (not plain_rope, "llama.cpp's gemma3 knows linear and plain YaRN scaling of rope only"),
    )
    layout = {"norm.offset": 1.0, "attention.scale": scale, **rope.layout, **only_here}
    layout[SEES] = c.get_bool(SEES, False)
    return Imported(settings, weights, layout, {w: AddOne() for w in weights if w.endswith("norm.weight")})


def check_hf(c: Config) -> None:
    """What hetrun does not do. attn_logit_softcapping is not here: in Gemma 3 transformers ignores it too."""
    refuse_embedders(c)
    activation = c.get_str("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        c.refuse(f"hidden_activation is {activation[:40]!r}; hetrun runs Gemma 3 with gelu_pytorch_tanh only")
    if c.get_float("query_pre_attn_scalar", 256.0) <= 0:
        c.refuse("query_pre_attn_scalar must be positive")


def window_settings(c: Config, n_layers: int) -> dict[str, Setting]:
    """Which layers see a window only, and how much it holds."""
    usual = by_period(n_layers, c.get_int("sliding_window_pattern", PERIOD, 1, 1 << 16))
    slides = sliding_layers(c, n_layers) or usual
    if not any(slides):
        return {}
    if c.is_null("sliding_window"):
        c.refuse("layer_types has sliding_attention, but there is no sliding_window")
    out: dict[str, Setting] = {"attention.sliding_window": c.get_int("sliding_window", 4096, 1, 1 << 31)}
    if slides != by_period(n_layers, PERIOD):
        out["attention.sliding_window_pattern"] = tuple(slides)
    return out


def ropes(c: Config, head_dim: int) -> tuple[HfRope, float]:
    """Rope of layers that see all, and the base of those with a window, as transformers 4 or 5 writes it."""
    both = c.section("rope_parameters")
    full, local = both.section("full_attention"), both.section("sliding_attention")
    if c.has("rope_scaling"):
        full = c.section("rope_scaling")
    elif c.has("rope_parameters") and not (both.has("full_attention") or both.has("sliding_attention")):
        c.refuse("rope_parameters must have full_attention and sliding_attention in Gemma 3 models")
    if (kind := local.get_str("rope_type", "default")) != "default":
        c.refuse(f"rope_parameters scales sliding_attention by {kind[:40]!r}, which hetrun does not do")
    rope = scaling_from_hf(c, full, head_dim, 1000000.0, False, KINDS)
    return rope, local.get_float("rope_theta", c.get_float("rope_local_base_freq", 10000.0))


def tensors(hf: HfModel, n_layers: int) -> dict[str, Weight]:
    """All tensors by GGUF name."""
    found = Tensors(hf)
    found.take_ends(tied=hf.config.get_bool("tie_word_embeddings", True))
    biased = ATTENTION if hf.config.get_bool("attention_bias", False) else ()
    for i in range(n_layers):
        found.take_layer(i, {**NORMS, **ATTENTION, **HEAD_NORMS, **FEED_FORWARD}, biased)
    return found.finish()
