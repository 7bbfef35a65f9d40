"""The block in a model's file that predicts one more token (MTP, GGUF's nextn), as a graph of its own.

It is a layer like the model's others. What goes in is the embedding of a token beside the model's hidden
state of the token before it; what comes out is what the next hidden state will be, about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hetrun.graph import GraphBuilder, PredictionBlock, Value
from hetrun.graph.ops import NONE
from hetrun.models import blocks, decoder, hybrid
from hetrun.models.decoder import Decoder, FeedForward
from hetrun.models.hybrid import Hybrid, product

# Tokens that it chooses from: the first of a vocabulary are its most frequent ones (byte pairs are numbered
# in the order in which they were merged), and reading all of the output matrix would take most of a guess.
CHOSEN_FROM = 1 << 16
WINDOW = 2048  # tokens that it looks back: the hidden state has seen all of them

Norm = Callable[[Value, str, str], Value]  # a value, the name of its norm, and the part it is
Attention = Callable[[GraphBuilder, Value, Decoder, int], Value]


def hybrid_block(b: GraphBuilder, c: Hybrid, feed_forward: FeedForward) -> PredictionBlock | None:
    """The first such block of a model like Qwen 3.5; None where the file has none."""
    i = len(c.recurrent)
    own = replace(c, recurrent=(*c.recurrent, False), attention=replace(c.attention, window=WINDOW))

    def norm(x: Value, name: str, part: str) -> Value:
        return hybrid.norm(b, x, name, c, part)

    return _block(b, i, c.n_vocab, c.width, norm, lambda x: hybrid.layer(b, x, own, i, feed_forward))


def decoder_block(
    b: GraphBuilder, d: Decoder, feed_forward: FeedForward, attention: Attention = decoder.attention
) -> PredictionBlock | None:
    """The same of a model like llama."""
    i = d.n_layers
    own = replace(d, n_layers=i + 1, windows=(*d.windows, WINDOW), ropes=(*d.ropes, d.rope))

    def norm(x: Value, name: str, part: str) -> Value:
        return blocks.rms_norm(b, x, f"{name}.weight", d.eps, part)

    def layer(x: Value) -> Value:
        return decoder.layer(b, x, own, i, feed_forward, lambda x, i: attention(b, x, own, i))

    return _block(b, i, d.n_vocab, d.width, norm, layer)


def _block(
    b: GraphBuilder, i: int, n_vocab: int, width: int, norm: Norm, layer: Callable[[Value], Value]
) -> PredictionBlock | None:
    """The layer after the last, between what joins its two inputs and a head."""
    blk, name = f"blk.{i}", f"blk.{i}.nextn.eh_proj.weight"
    if not b.has(name):
        return None
    both = b.weight(name, width, 2 * width)
    if width % both.quant.block:
        return None  # its halves cannot be told apart: no model that was published is like that
    embedded, before = b.given("embedded", width), b.given("before", width)
    with b.scope(f"{blk}.attn"):
        e = norm(embedded, f"{blk}.nextn.enorm", "norm")
        h = norm(before, f"{blk}.nextn.hnorm", "norm")
        e = product(b, e, both.cols(0, width), "norm")
        h = product(b, h, both.cols(width, 2 * width), "norm")
        x = blocks.add(b, e, h, part="norm")
    x = layer(x)
    with b.scope("output"):
        own_norm = f"{blk}.nextn.shared_head_norm"
        hidden = norm(x, own_norm if b.has(f"{own_norm}.weight") else "output_norm", "norm")
        logits = _head(b, hidden, n_vocab, blk)
    table = _first_of(b, f"{blk}.nextn.embed_tokens", "token_embd")
    return PredictionBlock(b.finish(hidden, logits), b.weight(table, n_vocab, width))


def _head(b: GraphBuilder, hidden: Value, n_vocab: int, blk: str) -> Value:
    name = _first_of(b, f"{blk}.nextn.shared_head_head", "output", "token_embd")
    weight, n = b.weight(name, n_vocab, hidden.width), min(n_vocab, CHOSEN_FROM)
    # Always rows of it: a weight of its own, whatever becomes of the model's (it may come from disk).
    return b.op("head", [hidden], [weight.rows(0, n)], NONE, n, part="head")


def _first_of(b: GraphBuilder, *names: str) -> str:
    """The first of these weights that the file has, else the last."""
    return next((name for name in names if b.has(f"{name}.weight")), names[-1]) + ".weight"
