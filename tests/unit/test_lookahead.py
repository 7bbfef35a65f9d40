"""What passes should take, and the window that is enough: against a model of a ring, piece by piece."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend.weight_streaming import Cut, Piece
from hetrun.graph import Extent, Weight
from hetrun.graph.quant import by_name
from hetrun.prefetch.lookahead import ROOM_SHARE, DiskLoad, predict, window
from hetrun.prefetch.residency_policy import PinnedPieces, Policy, choose
from tests.support.examples import examples

MIB = 1 << 20
N_LAYERS = 16
READERS, TAKERS = 2, 2


def model() -> Cut:
    """Layers of 55 MB in pieces of a MiB, and a head."""
    quant = by_name("Q4_0")
    shapes = {"attn.q": 4096, "attn.out": 3072, "ffn.gate": 16384, "ffn.down": 8192}
    scopes = [(f"blk.{i}.{name}", rows) for i in range(N_LAYERS) for name, rows in shapes.items()]
    pieces = []
    row = quant.row_bytes(3072)
    for scope, rows in [*scopes, ("output.head", 49152)]:
        weight = Weight(scope, (rows, 3072), quant, (Extent("model", 0, rows, row, row),))
        step = MIB // row // 16 * 16
        pieces += [
            Piece(scope, weight, ((a, min(a + step, rows)),), (min(a + step, rows) - a) * row)
            for a in range(0, rows, step)
        ]
    return Cut(tuple(pieces), len(pieces), ())


CUT = model()
TOTAL = sum(p.nbytes for p in CUT.pieces)
LARGEST = max(p.nbytes for p in CUT.pieces)


def seconds_of_pass(kept: PinnedPieces, slots: int, compute_s: float, rate: float) -> float:
    """A ring of `slots` slots, one disk and one thread that computes, in time that is only counted."""
    ready = now = 0.0
    released: list[float] = []
    ends = []
    for _ in range(4):
        for number, piece in enumerate(CUT.pieces):
            streamed = number not in kept.numbers
            if streamed:
                free = released[len(released) - slots] if len(released) >= slots else 0.0
                ready = max(ready, free) + piece.nbytes / rate
                now = max(now, ready)
            now += compute_s * piece.nbytes / TOTAL
            if streamed:
                released.append(now)
        ends.append(now)
    return (ends[-1] - ends[0]) / 3


def load_of(kept: PinnedPieces, compute_s: float | None) -> DiskLoad:
    return DiskLoad(kept.streamed_bytes, len(kept.streamed), LARGEST, N_LAYERS, compute_s)


def slowdown(part: float, compute_s: float, rate: float, policy: Policy = "balanced") -> float:
    room = int(part * TOTAL)
    kept = choose(CUT, room, policy)
    found = window(load_of(kept, compute_s), READERS, TAKERS, rate, room)
    # What takers hold cannot be read into: here no taker holds two, so their places are left out.
    took = seconds_of_pass(kept, max(1, found.pieces - TAKERS), compute_s, rate)
    return took / predict(compute_s, kept.streamed_bytes, rate).seconds


@settings(max_examples=examples(40))
@given(st.floats(0.3, 0.97), st.floats(0.02, 0.5), st.floats(2e8, 6e9))
def test_the_window_is_enough_for_what_is_predicted(part: float, compute_s: float, rate: float) -> None:
    assert 0.999 <= slowdown(part, compute_s, rate) < 1.03


def test_first_layers_whole_is_slower_through_the_same_window() -> None:
    assert slowdown(0.9, 0.03, 3e9, "unbalanced") > 1.3 > 1.03 > slowdown(0.9, 0.03, 3e9)


@given(st.floats(0, 1), st.none() | st.floats(0.001, 1), st.floats(1e8, 1e10), st.integers(1, 4))
@settings(max_examples=examples(40))
def test_a_window_has_the_least_that_works_and_no_more_than_its_limits(
    part: float, compute_s: float | None, rate: float, layers: int
) -> None:
    room = int(part * TOTAL)
    load = load_of(choose(CUT, room), compute_s)
    found = window(load, READERS, TAKERS, rate, room, layers)
    least = min(READERS + TAKERS + 1, load.pieces)
    assert least <= found.pieces <= load.pieces
    assert found.nbytes == found.pieces * LARGEST
    if found.pieces > least:
        assert found.nbytes <= room / ROOM_SHARE
        assert found.nbytes <= layers * load.streamed_bytes / N_LAYERS + LARGEST
    assert found.why


def test_reasons_are_given_in_words() -> None:
    small = window(load_of(choose(CUT, 0), None), READERS, TAKERS, 1e9, 0)
    assert small.pieces == 5
    assert "the fewest for 2 reading and 2 computing threads" in small.why
    assert window(DiskLoad(0, 0, 0, 16), READERS, TAKERS, 1e9, TOTAL).pieces == 0
    assert "all that is streamed" in window(DiskLoad(3 * MIB, 3, MIB, 16), 2, 2, 1e9, TOTAL).why


def test_predictions() -> None:
    slow = predict(0.1, 2 * 10**9, 4e9, tokens=8)
    assert slow.seconds == pytest.approx(0.5)
    assert slow.tokens_per_s == pytest.approx(16)
    assert slow.bound == "disk"
    assert str(slow) == "at most 16 tokens/s, bound by disk: reading takes 500 ms, computing 100 ms meanwhile"
    assert predict(0.1, 2 * 10**9, 4e9, overlapped=False).seconds == pytest.approx(0.6)
    resident = predict(0.1, 0, 4e9)
    assert (resident.bound, resident.seconds) == ("compute", 0.1)
