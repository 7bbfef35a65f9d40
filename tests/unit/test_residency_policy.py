"""Which pieces stay: within the room, in balance, in the paper's regimes; a little room changes little."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend.weight_streaming import Cut, Piece
from hetrun.graph import Extent, Weight
from hetrun.graph.quant import by_name
from hetrun.prefetch.residency_policy import POLICIES, PinnedPieces, Policy, choose, layers_of, resize, switch
from tests.support.examples import examples

MIB = 1 << 20
Shape = dict[str, tuple[int, int, str]]  # rows, columns and type of every weight of a layer

PLACED: tuple[Policy, ...] = ("balanced", "attention-first", "ffn-first")  # those that treat layers alike


def cut_of(layers: list[Shape], outside: Shape | None = None, most: int = 2 * MIB, growth: int = 8) -> Cut:
    """Weights cut as a backend does it; a kept piece takes `growth` eighths of what it has on disk."""
    pieces: list[Piece] = []
    scoped = [(f"blk.{i}.{name}", w) for i, layer in enumerate(layers) for name, w in layer.items()]
    for scope, (rows, cols, type_name) in [*scoped, *(outside or {}).items()]:
        quant = by_name(type_name)
        row = quant.row_bytes(cols)
        weight = Weight(scope, (rows, cols), quant, (Extent("model", 0, rows, row, row),))
        step = max(16, most // row // 16 * 16)
        runs = [(a, min(a + step, rows)) for a in range(0, rows, step)]
        pieces += [Piece(scope, weight, ((a, b),), (b - a) * row * growth // 8) for a, b in runs]
    return Cut(tuple(pieces), len(pieces), ())


def llama(n: int, width: int, kv: int, n_ff: int, type_name: str = "Q4_0") -> list[Shape]:
    layer = {f"attn.{part}": (width, width, type_name) for part in ("q", "k", "v", "out")}
    layer |= {f"attn.{part}": (kv, width, type_name) for part in ("k", "v")}
    layer |= {f"ffn.{part}": (n_ff, width, type_name) for part in ("gate", "up")}
    return [layer | {"ffn.down": (width, n_ff, type_name)}] * n


LLAMA_7B = cut_of(llama(32, 4096, 4096, 11008), {"output.head": (32000, 4096, "Q6_K")}, MIB)
LAYERS_7B = cut_of(llama(32, 4096, 4096, 11008), most=MIB // 4)


def total(cut: Cut) -> int:
    return sum(p.kept_bytes for p in cut.pieces)


def held(kept: PinnedPieces, prefix: str) -> int:
    return sum(p.kept_bytes for p in kept.pieces if p.scope.startswith(prefix))


def of_layer(cut: Cut, layer: str) -> int:
    return sum(p.kept_bytes for p in cut.pieces if p.scope.startswith(layer + "."))


def part_of_columns(kept: PinnedPieces) -> dict[str, float]:
    """How much of every column of the first layer stays."""
    cols = layers_of(kept.cut)["blk.0"]
    return {c.name: sum(n in kept.numbers for n in c.numbers) / len(c.numbers) for c in cols}


# --- models of any shape -----------------------------------------------------------------------------------

types = st.sampled_from(["Q4_0", "Q8_0", "Q6_K", "Q4_K"])


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Models of about a GB: layers of one kind or two, with or without a head."""
    width = draw(st.sampled_from([2048, 3072, 4096]))
    n_ff = draw(st.sampled_from([2, 3, 4])) * width
    kinds = []
    for _ in range(draw(st.integers(1, 2))):
        kv = width // draw(st.sampled_from([1, 4, 8]))
        layer = llama(1, width, kv, n_ff, draw(types))[0] | {"ffn.down": (width, n_ff, draw(types))}
        if draw(st.booleans()):
            layer["attn.q"] = (width + 2 * kv, width, "Q4_0")
            del layer["attn.k"], layer["attn.v"]
        kinds.append(layer)
    one = total(cut_of(kinds, most=16 * MIB)) // len(kinds)
    n = max(2, (1 << 30) // one)
    layers = [kinds[draw(st.integers(0, len(kinds) - 1)) if i < 6 else i % len(kinds)] for i in range(n)]
    outside: Shape = {"output.head": (32768, width, "Q6_K")} if draw(st.booleans()) else {}
    return cut_of(layers, outside, draw(st.sampled_from([MIB, 2 * MIB])), draw(st.sampled_from([8, 9])))


rooms = st.floats(0.08, 1.1)
a_few = settings(max_examples=examples(30))


@a_few
@given(cuts(), rooms, st.sampled_from(POLICIES))
def test_never_more_than_the_room_and_at_least_97_percent_of_it(
    cut: Cut, part: float, policy: Policy
) -> None:
    room = int(part * total(cut))
    kept = choose(cut, room, policy)
    assert kept.locked_bytes == sum(p.kept_bytes for p in kept.pieces) <= room
    if policy != "none":
        assert kept.locked_bytes >= 0.97 * min(room, total(cut))
    assert kept.streamed == tuple(p for p in cut.pieces if p not in kept.pieces)
    assert len(kept.pieces) + len(kept.streamed) == len(cut.pieces)
    assert kept.streamed_bytes == sum(p.nbytes for p in kept.streamed)


@a_few
@given(cuts(), rooms, rooms, st.sampled_from(PLACED))
def test_every_layer_keeps_its_share_within_a_piece(
    cut: Cut, part: float, later: float, policy: Policy
) -> None:
    largest = max(p.kept_bytes for p in cut.pieces)
    for kept in (
        first := choose(cut, int(part * total(cut)), policy),
        resize(first, int(later * total(cut))),
    ):
        sizes: dict[str, int] = defaultdict(int)
        mine: dict[str, int] = defaultdict(int)
        for i, p in enumerate(cut.pieces):
            layer = ".".join(p.scope.split(".")[:2])
            sizes[layer] += p.kept_bytes
            mine[layer] += p.kept_bytes * (i in kept.numbers)
        # No mean of them: a layer that is larger than others may be above that by more than a piece.
        most = max(Fraction(mine[layer], sizes[layer]) for layer in sizes)
        assert all(most * sizes[layer] - mine[layer] <= largest for layer in sizes)


@a_few
@given(cuts(), rooms, st.lists(rooms, min_size=2, max_size=4), st.sampled_from(POLICIES))
def test_more_room_only_brings_and_less_only_drops(
    cut: Cut, part: float, parts: list[float], policy: Policy
) -> None:
    kept, largest = choose(cut, int(part * total(cut)), policy), max(p.kept_bytes for p in cut.pieces)
    for other in parts:
        after = resize(kept, int(other * total(cut)))
        drop, bring = switch(kept, after)
        assert not drop or not bring
        assert kept.pieces - set(drop) | set(bring) == after.pieces
        moved = sum(p.kept_bytes for p in (*drop, *bring))
        wanted = abs(min(int(other * total(cut)), total(cut)) - kept.locked_bytes)
        assert moved <= wanted + largest
        kept = after


@a_few
@given(cuts(), rooms, rooms)
def test_more_room_never_keeps_less(cut: Cut, a: float, b: float) -> None:
    small, large = sorted((int(a * total(cut)), int(b * total(cut))))
    largest = max(p.kept_bytes for p in cut.pieces)
    assert choose(cut, large).locked_bytes >= choose(cut, small).locked_bytes - largest
    chosen = choose(cut, small)
    assert resize(chosen, large).pieces >= chosen.pieces


@given(cuts(), rooms)
@settings(max_examples=examples(5))
def test_the_same_question_has_the_same_answer(cut: Cut, part: float) -> None:
    room = int(part * total(cut))
    assert choose(cut, room).order == choose(cut, room).order
    assert resize(choose(cut, room // 2), room // 2).pieces == choose(cut, room // 2).pieces


def test_a_page_of_kv_moves_that_much_and_no_more() -> None:
    kept = choose(LLAMA_7B, total(LLAMA_7B) // 2)
    after = resize(kept, total(LLAMA_7B) // 2 - 8 * MIB)
    drop, bring = switch(kept, after)
    assert not bring
    assert 7 * MIB <= sum(p.kept_bytes for p in drop) <= 9 * MIB
    assert max(Counter(p.scope.split(".")[1] for p in drop).values()) <= 2  # from layers all over
    assert switch(after, resize(after, total(LLAMA_7B) // 2)) == ((), drop)


def test_decisions_about_other_pieces_cannot_be_switched() -> None:
    one, other = (cut_of(llama(2, 1024, 256, 2048), most=most) for most in (MIB, MIB // 2))
    with pytest.raises(ValueError, match="cut in different ways"):
        switch(choose(one, 0), choose(other, 0))


# --- the paper's regimes, at the sizes of its models -------------------------------------------------------

# FlexInfer's models at Q4_0: attention of a layer, one feed-forward matrix, k or v (MiB), all layers (GiB).
PAPER = {
    "Llama2-7B": (32, 4096, 4096, 11008, 36, 24.2, 9.0, 3.39),
    "Llama2-13B": (40, 5120, 5120, 13824, 56, 38.0, 14.1, 6.65),
    "CodeLlama-34B": (48, 8192, 1024, 22016, 81, 96.8, 4.5, 17.4),
    "Llama2-70B": (80, 8192, 1024, 28672, 81, 126, 4.5, 35.9),
}


@pytest.mark.parametrize("name", PAPER)
def test_columns_are_as_large_as_in_the_paper(name: str) -> None:
    n, width, kv, n_ff, attention, ffn, one, gib = PAPER[name]
    cut = cut_of(llama(1, int(width), int(kv), int(n_ff)))
    sizes = {c.name: c.nbytes / MIB for c in layers_of(cut)["blk.0"]}
    assert sum(s for c, s in sizes.items() if c.startswith("attn")) == pytest.approx(attention, rel=0.01)
    assert sizes["ffn.down"] == pytest.approx(ffn, rel=0.01)
    assert sizes["attn.k"] == pytest.approx(one, rel=0.01)
    assert n * total(cut) / 2**30 == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize(
    ("mib", "whole", "part"),
    [
        # Little room: k and v, then out.
        (5.0, set(), "attn.k"),
        (20.0, {"attn.k", "attn.v"}, "attn.out"),
        # 24.2 fit, but three columns of attention are more.
        (28.0, {"attn.k", "attn.v", "attn.out"}, "attn.q"),
        # One column of the feed-forward part, then attention.
        (34.5, {"ffn.gate", "attn.k"}, "attn.v"),
        (43.0, {"ffn.gate", "attn.k", "attn.v"}, "attn.out"),
        # As many of them as fit.
        (50.0, {"ffn.gate", "ffn.up"}, "attn.k"),
        (75.0, {"ffn.gate", "ffn.up", "ffn.down"}, "attn.k"),
        (95.0, {"ffn.gate", "ffn.up", "ffn.down", "attn.k", "attn.v"}, "attn.out"),
    ],
)
def test_regimes_of_a_7b_model(mib: float, whole: set[str], part: str) -> None:
    kept = choose(LAYERS_7B, int(32 * mib * MIB))
    shares = part_of_columns(kept)
    assert {name for name, share in shares.items() if share == 1} == whole
    assert [name for name, share in shares.items() if 0 < share < 1] == [part]
    assert all(name in kept.why for name in (*whole, part))


@a_few
@given(cuts(), rooms)
def test_the_columns_that_stay_whole_are_the_best_that_fit(cut: Cut, part: float) -> None:
    room = int(part * total(cut))
    kept = choose(cut, room)
    for layer in layers_of(cut).values():
        share = room * sum(c.nbytes for c in layer) / total(cut)
        others = [c for c in layer if not c.attention]
        if part > 1 or not others or min(c.nbytes for c in others) > share:
            continue
        sets = [s for n in range(len(layer) + 1) for s in combinations(layer, n)]
        best = max(sum(c.saved for c in s) for s in sets if sum(c.nbytes for c in s) <= share)
        whole = [c for c in layer if all(n in kept.numbers for n in c.numbers)]
        assert sum(c.saved for c in whole) >= best


def test_policies_to_compare_with() -> None:
    room = 32 * 30 * MIB
    attention, ffn = (part_of_columns(choose(LAYERS_7B, room, p)) for p in ("attention-first", "ffn-first"))
    assert [attention[f"attn.{c}"] for c in ("k", "v", "out")] == [1, 1, 1]
    assert attention["ffn.gate"] == attention["ffn.up"] == attention["ffn.down"] == 0
    assert ffn["ffn.gate"] == 1
    assert ffn["attn.k"] == 0 < ffn["ffn.up"] < 1
    first = choose(LAYERS_7B, room, "unbalanced")
    assert held(first, "blk.0.") == of_layer(LAYERS_7B, "blk.0")
    assert held(first, "blk.31.") == 0
    assert "first 8 of 32 layers" in first.why
    assert choose(LAYERS_7B, room, "none").streamed == LAYERS_7B.pieces
    assert resize(choose(LAYERS_7B, room, "none"), 2 * room).locked_bytes == 0


def test_reasons_are_given_in_words() -> None:
    weight = Weight("w", (64, 256), by_name("Q8_0"), (Extent("model", 0, 64, 272, 272),))
    names = [f"blk.{i}.{name}" for i in range(2) for name in ("attn.q", "attn.out", "ffn.gate", "ffn.down")]
    pieces = [Piece(scope, weight, ((a, a + 16),), MIB) for scope in names for a in (0, 16, 32, 48)]
    cut = Cut(tuple(pieces), len(pieces), ())
    assert choose(cut, 0).why == "balanced: none of 32 MiB stays in memory"
    assert choose(cut, 3 * MIB).why == (
        "balanced: 3 MiB of 32 MiB stay in memory, 1 MiB to 2 MiB of each layer's 16 MiB: 38 % of attn.out"
    )
    assert choose(cut, 26 * MIB).why == (
        "balanced: 26 MiB of 32 MiB stay in memory, 13 MiB of each layer's 16 MiB: "
        "attn.out, ffn.gate and ffn.down whole, 25 % of attn.q"
    )
    assert choose(cut, 18 * MIB, "unbalanced").why == (
        "unbalanced: 18 MiB of 32 MiB stay in memory, 2 MiB to 16 MiB of each layer's 16 MiB: "
        "the first 1 of 2 layers whole, and what fits of what follows"
    )
    assert choose(cut, 32 * MIB).why == "balanced: all weights stay in memory"


def test_what_is_too_little_for_all_layers_is_spread_over_them() -> None:
    one = LAYERS_7B.pieces[0].kept_bytes
    kept = choose(LAYERS_7B, 4 * one)
    assert sorted(int(p.scope.split(".")[1]) for p in kept.pieces) == [0, 8, 16, 24]


def test_pieces_that_stay_lie_evenly_in_their_column() -> None:
    kept = choose(LAYERS_7B, int(32 * 13.5 * MIB))  # k whole, half of v
    column = next(c for c in layers_of(LAYERS_7B)["blk.3"] if c.name == "attn.v")
    stays = [n in kept.numbers for n in column.numbers]
    assert 0.45 < sum(stays) / len(stays) < 0.55
    assert max(map(len, "".join("x" if s else " " for s in stays).split())) <= 2


def test_the_head_has_its_share_and_no_room_is_no_error() -> None:
    kept = choose(LLAMA_7B, total(LLAMA_7B) // 2)
    head = sum(p.kept_bytes for p in LLAMA_7B.pieces if p.scope == "output.head")
    assert held(kept, "output.head") / head == pytest.approx(0.5, abs=0.02)
    for room in (-1, 0, 1000):
        assert choose(LLAMA_7B, room).streamed == LLAMA_7B.pieces
    everything = choose(LLAMA_7B, total(LLAMA_7B))
    assert everything.streamed == ()
    assert everything.why == "balanced: all weights stay in memory"
    assert choose(Cut((), 0, ()), MIB).pieces == frozenset()


def test_a_piece_that_two_weights_share_is_a_column_by_its_scope() -> None:
    """Gate and up on top of each other: the backend names them by one of their scopes."""
    weight = Weight("gate+up", (64, 256), by_name("Q8_0"), (Extent("model", 0, 64, 272, 272),))
    pieces = [Piece(f"blk.{i}.ffn.gate", weight, ((a, a + 16), (a + 32, a + 48)), 8704) for i in range(2)
              for a in (0, 16)]  # fmt: skip
    kept = choose(Cut(tuple(pieces), 4, ()), 2 * 8704)
    assert sorted(p.scope for p in kept.pieces) == ["blk.0.ffn.gate", "blk.1.ffn.gate"]
    assert kept.streamed_bytes == 2 * 32 * 272
