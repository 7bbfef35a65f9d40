"""OPT: learned positions, layer norms, biases; its 350m model norms behind blocks and has narrower tokens.

GGUF has no OPT: the names of settings and weights follow its manner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hetrun.errors import OptionError
from hetrun.graph import Graph, GraphBuilder, ModelMeta, Value
from hetrun.graph.ops import NONE, Attrs, Gelu, Positions
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Setting
from hetrun.models import blocks
from hetrun.models.hf_import import ImportTensors, not_in_gguf, refuse_embedders

name = "opt"

FIRST_POSITION = 2  # the rows before it were meant for padding
EPS = 1e-5  # torch's own: no config says another
ACTIVATIONS: Mapping[str, tuple[str, Attrs]] = {
    "relu": ("relu", NONE),
    "gelu": ("gelu", Gelu(exact=True)),
    "gelu_new": ("gelu", Gelu()),
    "gelu_pytorch_tanh": ("gelu", Gelu()),
}


@dataclass(frozen=True, slots=True)
class OptConfig:
    """The settings of an OPT model."""

    n_vocab: int
    word_width: int
    width: int
    n_layers: int
    n_ff: int
    n_context: int
    norm_first: bool
    final_norm: bool
    activation: str
    eps: float
    attention: blocks.AttentionShape


def read_config(meta: ModelMeta) -> OptConfig:
    """The settings, as `from_hf` names them."""
    width = meta.require_int("embedding_length", 1, 1 << 20)
    n_heads = meta.require_int("attention.head_count", 1, 1 << 14)
    head_dim = width // n_heads
    return OptConfig(
        n_vocab=meta.require_int("vocab_size", 1, 1 << 24),
        word_width=meta.get_int("word_embedding_length", width, 1, 1 << 20),
        width=width,
        n_layers=meta.require_int("block_count", 1, 1 << 12),
        n_ff=meta.require_int("feed_forward_length", 1, 1 << 24),
        n_context=meta.require_int("context_length", 1, 1 << 31),
        norm_first=meta.get_bool("norm_first", True),
        final_norm=meta.get_bool("final_norm", True),
        activation=meta.get_str("activation", "relu"),
        eps=meta.get_float("attention.layer_norm_epsilon", EPS),
        attention=blocks.AttentionShape(n_heads, n_heads, head_dim, 1 / math.sqrt(max(1, head_dim))),
    )


def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
    """The forward step."""
    c = read_config(meta)
    b.check(c.attention.width == c.width, f"a width of {c.width} is not {c.attention.n_heads} equal heads")
    b.check(c.activation in ACTIVATIONS, f"the activation is {c.activation!r}")
    if b.context is not None and b.context > c.n_context:
        raise OptionError(
            f"--ctx {b.context}: this model has learned positions for {c.n_context} tokens only"
        )
    x = embed(b, c)
    for i in range(c.n_layers):
        with b.scope(f"blk.{i}.attn"):
            x = attention(b, x, c, i)
        with b.scope(f"blk.{i}.ffn"):
            x = feed_forward(b, x, c, i)
    with b.scope("output"):
        if c.final_norm:
            x = blocks.layer_norm(b, x, "output_norm", c.eps)
        if c.word_width != c.width:
            x = blocks.linear(b, x, "project_out", c.word_width, "project")
        head = "output" if b.has("output.weight") else "token_embd"
        logits = blocks.linear(b, x, head, c.n_vocab, "head", kind="head")
    return b.finish(x, logits)


def embed(b: GraphBuilder, c: OptConfig) -> Value:
    """Token ids to vectors, and each position's own vector added."""
    x = blocks.embed(b, "token_embd.weight", c.n_vocab, c.word_width)
    with b.scope("embed"):
        if c.word_width != c.width:
            x = blocks.linear(b, x, "project_in", c.width, "project")
        table = b.weight("position_embd.weight", c.n_context + FIRST_POSITION, c.width)
        return blocks.add(b, x, b.op("positions", [], [table], Positions(FIRST_POSITION), c.width))


def attention(b: GraphBuilder, x: Value, c: OptConfig, i: int) -> Value:
    """x + attention(norm(x)) or norm(x + attention(x)); behind the last K and V only wanted rows go on."""
    blk = f"blk.{i}"
    h = blocks.layer_norm(b, x, f"{blk}.attn_norm", c.eps) if c.norm_first else x
    k = blocks.linear(b, h, f"{blk}.attn_k", c.width, "k")
    v = blocks.linear(b, h, f"{blk}.attn_v", c.width, "v")
    if i == c.n_layers - 1:
        x = blocks.select(b, x)
        h = blocks.select(b, h) if c.norm_first else x
    q = blocks.linear(b, h, f"{blk}.attn_q", c.width, "q")
    a = blocks.attend(b, q, k, v, i, c.attention)
    x = blocks.add(b, x, blocks.linear(b, a, f"{blk}.attn_output", c.width, "out"), part="out")
    return x if c.norm_first else blocks.layer_norm(b, x, f"{blk}.attn_norm", c.eps, part="out")


def feed_forward(b: GraphBuilder, x: Value, c: OptConfig, i: int) -> Value:
    """x + ffn(norm(x)) or norm(x + ffn(x))."""
    blk = f"blk.{i}"
    h = blocks.layer_norm(b, x, f"{blk}.ffn_norm", c.eps) if c.norm_first else x
    h = blocks.linear(b, h, f"{blk}.ffn_up", c.n_ff, "up")
    kind, attrs = ACTIVATIONS[c.activation]
    h = b.op(kind, [h], [], attrs, c.n_ff, part="up")
    x = blocks.add(b, x, blocks.linear(b, h, f"{blk}.ffn_down", c.width, "down"), part="down")
    return x if c.norm_first else blocks.layer_norm(b, x, f"{blk}.ffn_norm", c.eps, part="down")


def from_hf(hf: HfModel) -> Imported:
    """As Hugging Face publishes it."""
    c = hf.config
    refuse_embedders(c)
    activation = c.get_str("activation_function", "relu")
    if activation not in ACTIVATIONS:
        c.refuse(f"activation_function is {activation[:40]!r}; hetrun runs OPT with {', '.join(ACTIVATIONS)}")
    width = c.get_int("hidden_size", 768, 1, 1 << 20)
    norm_first = c.get_bool("do_layer_norm_before", True)
    settings: dict[str, Setting] = {
        "vocab_size": c.get_int("vocab_size", 50272, 1, 1 << 24),
        "context_length": c.get_int("max_position_embeddings", 2048, 1, 1 << 31),
        "embedding_length": width,
        "word_embedding_length": c.get_int("word_embed_proj_dim", width, 1, 1 << 20),
        "block_count": c.get_int("num_hidden_layers", 12, 1, 1 << 12),
        "feed_forward_length": c.get_int("ffn_dim", 3072, 1, 1 << 24),
        "attention.head_count": c.get_int("num_attention_heads", 12, 1, 1 << 14),
        "attention.layer_norm_epsilon": EPS,
        "norm_first": norm_first,
        "final_norm": norm_first and not c.get_bool("_remove_final_layer_norm", False),
        "activation": activation,
    }
    root = "decoder." if hf.has("decoder.embed_positions.weight") else "model.decoder."
    tensors = ImportTensors(hf)
    tensors.take_words(f"{root}embed_tokens.weight", c.get_bool("tie_word_embeddings", True))
    for gguf, theirs in names(c, root, settings):
        tensors.take(gguf, theirs)
    return Imported(settings, tensors.finish(), not_in_gguf((True, "GGUF has no architecture opt")))


def names(c: Config, root: str, settings: dict[str, Setting]) -> Iterator[tuple[str, str]]:
    """GGUF's name and Hugging Face's of each tensor that the config asks for, besides those of words."""
    norm = ("weight", "bias") if c.get_bool("layer_norm_elementwise_affine", True) else ()
    product = ("weight", "bias") if c.get_bool("enable_bias", True) else ("weight",)
    yield "position_embd.weight", f"{root}embed_positions.weight"
    if settings["word_embedding_length"] != settings["embedding_length"]:
        yield "project_in.weight", f"{root}project_in.weight"
        yield "project_out.weight", f"{root}project_out.weight"
    if settings["final_norm"]:
        yield from ((f"output_norm.{kind}", f"{root}final_layer_norm.{kind}") for kind in norm)
    for i in range(c.get_int("num_hidden_layers", 12, 1, 1 << 12)):
        for gguf, theirs, kinds in (
            ("attn_norm", "self_attn_layer_norm", norm),
            ("attn_q", "self_attn.q_proj", product),
            ("attn_k", "self_attn.k_proj", product),
            ("attn_v", "self_attn.v_proj", product),
            ("attn_output", "self_attn.out_proj", product),
            ("ffn_norm", "final_layer_norm", norm),
            ("ffn_up", "fc1", product),
            ("ffn_down", "fc2", product),
        ):
            yield from ((f"blk.{i}.{gguf}.{kind}", f"{root}layers.{i}.{theirs}.{kind}") for kind in kinds)
