"""The block in a model's file that predicts one more token (MTP, GGUF's nextn), as a graph of its own.

It is a layer like the model's others. What goes in is the embedding of a token beside the model's hidden
state of the token before it; what comes out is what the next hidden state will be, about.
"""

from __future__ import annotations

from dataclasses import replace

from hetrun.graph import GraphBuilder, PredictionBlock, Value
from hetrun.graph.ops import NONE
from hetrun.models import blocks
from hetrun.models.hybrid import FeedForward, Hybrid, gated_attention, norm, product

# Tokens that it chooses from: the first of a vocabulary are its most frequent ones (byte pairs are numbered
# in the order in which they were merged), and reading all of the output matrix would take most of a guess.
CHOSEN_FROM = 1 << 16
WINDOW = 2048  # tokens that it looks back: the hidden state has seen all of them


def prediction_block(b: GraphBuilder, c: Hybrid, feed_forward: FeedForward) -> PredictionBlock | None:
    """The first such block, the layer after the last; None where the file has none."""
    i = len(c.recurrent)
    blk, name = f"blk.{i}", f"blk.{i}.nextn.eh_proj.weight"
    if not b.has(name):
        return None
    both = b.weight(name, c.width, 2 * c.width)
    if c.width % both.quant.block:
        return None  # its halves cannot be told apart: no model that was published is like that
    own = replace(c, recurrent=(*c.recurrent, False), attention=replace(c.attention, window=WINDOW))
    embedded, before = b.given("embedded", c.width), b.given("before", c.width)
    with b.scope(f"{blk}.attn"):
        e = norm(b, embedded, f"{blk}.nextn.enorm", c)
        h = norm(b, before, f"{blk}.nextn.hnorm", c)
        e = product(b, e, both.cols(0, c.width), "norm")
        h = product(b, h, both.cols(c.width, 2 * c.width), "norm")
        x = gated_attention(b, blocks.add(b, e, h, part="norm"), own, i)
    with b.scope(f"{blk}.ffn"):
        h = norm(b, x, f"{blk}.post_attention_norm", c)
        x = blocks.add(b, x, feed_forward(h, i), part="down")
    with b.scope("output"):
        own_norm = f"{blk}.nextn.shared_head_norm"
        hidden = norm(b, x, own_norm if b.has(f"{own_norm}.weight") else "output_norm", c)
        logits = _head(b, hidden, c, blk)
    table = _first_of(b, f"{blk}.nextn.embed_tokens", "token_embd")
    return PredictionBlock(b.finish(hidden, logits), b.weight(table, c.n_vocab, c.width))


def _head(b: GraphBuilder, hidden: Value, c: Hybrid, blk: str) -> Value:
    name = _first_of(b, f"{blk}.nextn.shared_head_head", "output", "token_embd")
    weight, n = b.weight(name, c.n_vocab, c.width), min(c.n_vocab, CHOSEN_FROM)
    # Always rows of it: a weight of its own, whatever becomes of the model's (it may come from disk).
    return b.op("head", [hidden], [weight.rows(0, n)], NONE, n, part="head")


def _first_of(b: GraphBuilder, *names: str) -> str:
    """The first of these weights that the file has, else the last."""
    return next((name for name in names if b.has(f"{name}.weight")), names[-1]) + ".weight"
