"""Made mixtures choose their experts as trained ones do: unevenly, the same again soon, and all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.tools import routing_stats
from tests.tools.made_routing import NEVER, Tokens
from tests.tools.make_model import SHAPES, Making, write_model
from tests.tools.routing_stats import lru_hits

TEXT = routing_stats.TEXT.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_made_mixture_routes_a_text_as_trained_ones_do(tmp_path: Path) -> None:
    """Published: an LRU over half of the experts has 0.67 to 0.81, a guess one layer ahead 0.72."""
    path = tmp_path / "made.gguf"
    write_model(path, SHAPES["routing-tiny"], "Q8_0", 0, Making(real_routing=True))
    layers = routing_stats.measure(path, TEXT, 768, "reference")
    assert len(layers) == 4
    assert all(0.6 < s.hits < 0.85 for s in layers.values())
    found = routing_stats.mean(layers.values())
    assert 0.45 < found.top_quarter < 0.65
    assert 0.7 < found.guessed < 0.9
    assert found.never < 2  # of 64, in this little text


@pytest.mark.slow
def test_without_it_nothing_can_be_guessed_ahead(tmp_path: Path) -> None:
    path = tmp_path / "made.gguf"
    write_model(path, SHAPES["routing-tiny"], "Q8_0", 0)
    layers = routing_stats.measure(path, TEXT, 256, "reference")
    assert routing_stats.mean(layers.values()).guessed < 0.4


def test_lru() -> None:
    """Two have room: 1 and 2 come, 2 is there, 3 drives 1 out, 1 comes again in place of 2."""
    chosen = [np.array(row) for row in ([1, 2], [2, 3], [1, 3])]
    assert lru_hits(chosen, 2) == pytest.approx(2 / 6)
    assert lru_hits(chosen, 3) == pytest.approx(3 / 6)


def test_marks_and_bytes_are_never_said() -> None:
    tokens = Tokens(["<|end|>", "a", "\u00ff", "the", "of", "[PAD]"], [3, 1, 1, 1, 1, 5])
    likely = tokens.log_frequencies
    assert (likely == NEVER).tolist() == [True, False, True, False, False, True]
    assert likely[3] > likely[4] > likely[1]
