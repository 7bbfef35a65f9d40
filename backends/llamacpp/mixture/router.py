"""Which experts each row goes through, as ggml nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetrun.backends.llamacpp.graph_builder import FLOAT
from hetrun.backends.llamacpp.mixture import row_products
from hetrun.graph import Op
from hetrun.graph.ops import Moe

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter

LEAST = 1e-20  # of what shares are divided by


@dataclass(frozen=True, slots=True)
class RouterChoice:
    """What a router says of some rows."""

    scores: int  # of every expert [n_experts, rows]
    parts: int  # what shares are made of, the same; 0: not needed
    liked: int  # by which experts are chosen, the same
    chosen: int  # the best of them [n_used, rows]


def choose(e: GgmlEmitter, op: Op, rows: int, n: int) -> RouterChoice:
    """The choice for n rows, which are a matrix."""
    a, lib, ctx, weights = op.attrs, e.lib, e.ctx, e.weights(op)
    assert isinstance(a, Moe)
    more = a.others(weights)
    scores = row_products.multiply(e, weights[0], rows, n)
    if "router_bias" in more:
        scores = lib.ggml_add(ctx, scores, lib.ggml_reshape_2d(ctx, more["router_bias"], a.n_experts, 1))
    parts = 0
    if a.scores == "sigmoid":
        parts = lib.ggml_sigmoid(ctx, scores)
    elif "choice_bias" in more or not a.normalise:
        parts = lib.ggml_soft_max(ctx, scores)
    liked = scores
    if "choice_bias" in more:
        liked = lib.ggml_add(ctx, parts, lib.ggml_reshape_2d(ctx, more["choice_bias"], a.n_experts, 1))
    if a.groups_used < a.groups:
        liked = _of_best_groups(e, a, liked, n)
    return RouterChoice(scores, parts, liked, lib.ggml_argsort_top_k(ctx, liked, a.n_used))


def _of_best_groups(e: GgmlEmitter, a: Moe, liked: int, n: int) -> int:
    """How much each expert is liked, and nothing of those in other groups."""
    lib, ctx, size = e.lib, e.ctx, a.n_experts // a.groups
    by_group = lib.ggml_reshape_3d(ctx, liked, size, a.groups, n)
    best = lib.ggml_argsort_top_k(ctx, by_group, a.group_best)
    worth = lib.ggml_get_rows(ctx, lib.ggml_reshape_4d(ctx, liked, 1, size, a.groups, n), best)
    worth = lib.ggml_sum_rows(ctx, lib.ggml_reshape_3d(ctx, worth, a.group_best, a.groups, n))
    groups = lib.ggml_argsort_top_k(ctx, lib.ggml_reshape_2d(ctx, worth, a.groups, n), a.groups_used)
    kept = lib.ggml_get_rows(ctx, by_group, groups)
    none = lib.ggml_fill(ctx, by_group, -float("inf"))
    found: int = lib.ggml_reshape_2d(ctx, lib.ggml_set_rows(ctx, none, kept, groups), a.n_experts, n)
    return found


def shares(e: GgmlEmitter, op: Op, choice: RouterChoice, n: int) -> int:
    """What part each chosen expert has in its row's result [1, n_used, rows]."""
    a, lib, ctx = op.attrs, e.lib, e.ctx
    assert isinstance(a, Moe)
    found = of_chosen(e, a, choice.parts or choice.scores, choice.chosen, n)
    if a.normalise:
        found = lib.ggml_reshape_2d(ctx, found, a.n_used, n)
        if choice.parts:
            total = lib.ggml_clamp(ctx, lib.ggml_sum_rows(ctx, found), LEAST, float("inf"))
            found = lib.ggml_div(ctx, found, total)
        else:
            # The softmax over all experts, divided by the sum of those chosen, is the softmax over those.
            found = lib.ggml_soft_max(ctx, found)
        found = lib.ggml_reshape_3d(ctx, found, 1, a.n_used, n)
    if (scale := a.others(e.weights(op)).get("expert_scale")) is not None:
        row = lib.ggml_reshape_2d(ctx, scale, a.n_experts, 1)
        found = lib.ggml_mul(ctx, found, of_chosen(e, a, for_all(e, choice, row), choice.chosen, n))
    return found if a.scale == 1 else int(lib.ggml_scale(ctx, found, a.scale))


def for_all(e: GgmlEmitter, choice: RouterChoice, row: int) -> int:
    """A number for each expert, once for each row."""
    found: int = e.lib.ggml_add(e.ctx, e.lib.ggml_scale(e.ctx, choice.scores, 0.0), row)
    return found


def of_chosen(e: GgmlEmitter, a: Moe, every: int, chosen: int, n: int) -> int:
    """Of numbers for every expert those of the chosen ones [1, n_used, rows]."""
    found: int = e.lib.ggml_get_rows(e.ctx, e.lib.ggml_reshape_3d(e.ctx, every, 1, a.n_experts, n), chosen)
    return found


def held(e: GgmlEmitter, a: Moe, choice: RouterChoice, shares: int, n: int) -> tuple[int, int]:
    """The best of the experts that are held, by their numbers among these, and what share each has.

    ggml cannot leave an expert of a row out, and none may be there twice. So each row goes through as many as
    it could have chosen here; those that it did not choose have a share of 0.
    """
    lib, ctx, n_used = e.lib, e.ctx, min(a.n_used, a.matrices)
    none = lib.ggml_reshape_3d(ctx, lib.ggml_scale(ctx, choice.scores, 0.0), 1, a.n_experts, n)
    every = lib.ggml_set_rows(ctx, none, shares, choice.chosen)  # each expert's share in each row
    row, skip = a.n_experts * FLOAT, a.first * FLOAT
    mine = lib.ggml_view_2d(ctx, choice.liked, a.matrices, n, row, skip)
    best = lib.ggml_argsort_top_k(ctx, mine, n_used)
    some = lib.ggml_view_3d(ctx, every, 1, a.matrices, n, FLOAT, row, skip)
    return best, lib.ggml_get_rows(ctx, some, best)
