"""The metered device: what it computes, what its link and its memory hold, and what happens at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hetrun.backends import reference
from hetrun.errors import BackendError, Cancelled
from hetrun.planner.two_device.balance import HostLink
from tests.models import cases, tiny
from tests.support.metered import Metered
from tests.support.rig import Rig, plan_set, rig
from tests.support.timeline import BESIDE, DEVICE, HOST, LINK, Host, Timeline

TOKENS = tiny.random_tokens(40, seed=3)
FAST = HostLink(4e8, 2e-5)
WHOLE = {"": "metered"}
LAYER = 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 192 * 128)  # bytes of a layer of GQA in float32
# Small weights stay as well: norms, and k and v, which are half as large as SMALL.
STREAMED = LAYER - 4 * 2 * 64 * 128


def metered(memory: int, link: HostLink = FAST, /, **placed: str) -> tuple[Rig, Metered, Host]:
    timeline = Timeline()
    device, host = Metered(memory, link, timeline), Host(timeline)
    where = {"": "host"} | {scope.replace("_", "."): name for scope, name in placed.items()}
    return rig(cases.GQA, {"host": host, "metered": device}, where), device, host


def expected() -> np.ndarray:
    made = rig(cases.GQA, {"reference": reference.create()})
    return made.logits(made.kv.alloc(), TOKENS)


MEMORY = 1 << 20


@pytest.mark.parametrize(
    "placed",
    [
        {"blk": "metered"},
        {"blk_0": "metered"},
        {"blk_0_attn_q": "metered", "blk_1_ffn_gate": "metered"},
        {"blk_0_attn_score": "metered", "blk_1_attn_k": "metered", "blk_1_ffn_down": "metered"},
    ],
    ids=lambda placed: "+".join(placed),
)
def test_it_computes_what_the_reference_does(placed: dict[str, str]) -> None:
    made, device, _ = metered(MEMORY, **placed)
    seq, other = made.kv.alloc(), made.kv.alloc()
    pieces = [made.logits(seq, TOKENS[a:b]) for a, b in ((0, 20), (20, 21), (21, 40))]
    assert np.abs(np.concatenate(pieces) - expected()).max() < 1e-4
    assert np.abs(made.logits(other, TOKENS) - expected()).max() < 1e-4
    assert device.most_loaded <= device.window
    made.close()


def test_weights_come_over_the_link_in_each_pass() -> None:
    made, device, _ = metered(MEMORY, blk="metered")
    seq = made.kv.alloc()
    for _ in range(3):
        made.step((seq, [5], [0]))
    copies = device.timeline.lane(LINK)
    once = [a.what for a in copies[:10]]
    assert sorted(once) == sorted(set(once))
    # In the order of use, pass after pass; and those of the next one are on their way.
    assert [a.what for a in copies[:30]] == once * 3
    assert sum(a.nbytes for a in copies[:10]) == 2 * STREAMED
    made.close()


def test_what_stays_does_not_cross() -> None:
    timeline = Timeline()
    device = Metered(MEMORY, FAST, timeline, lambda weight: weight.name.startswith("blk.0."))
    made = rig(cases.GQA, {"host": Host(timeline), "metered": device}, {"": "host", "blk": "metered"})
    made.step((made.kv.alloc(), TOKENS[:3], [2]))
    assert {a.what.split(".")[1] for a in timeline.lane(LINK)} == {"1"}
    assert device.kept_bytes > STREAMED
    made.close()


def test_the_link_does_one_copy_at_a_time_and_not_too_fast() -> None:
    made, device, _ = metered(MEMORY, HostLink(5e7, 1e-4), blk="metered")
    made.step((made.kv.alloc(), TOKENS[:3], [2]))
    made.close()
    copies = device.timeline.lane(LINK)
    for one, following in pairwise(copies):
        assert one.end <= following.start
    assert all(a.seconds >= 1e-4 + a.nbytes / 5e7 for a in copies)
    assert all(a.nbytes < 64 << 10 for a in device.timeline.lane(BESIDE))


def test_copying_computing_and_the_engines_own_work_overlap() -> None:
    """The link brings the next weights while ops are computed on either side, and results pass it by."""
    made, device, _ = metered(MEMORY, HostLink(3e7), blk_0_ffn_up="metered", blk_1_ffn="metered")
    seq = made.kv.alloc()
    for _ in range(4):
        made.step((seq, TOKENS, [3]))
    timeline = device.timeline
    made.close()
    assert timeline.overlap(LINK, HOST) > 0
    assert timeline.overlap(LINK, DEVICE) > 0
    assert timeline.overlap(LINK, BESIDE) > 0


def test_keys_and_values_move_once_when_the_place_of_score_changes() -> None:
    made, device, _ = metered(MEMORY)
    seq = made.kv.alloc()
    made.step((seq, TOKENS[:32], [0]))
    made.executor.plans = plan_set(made.graph, {"": "host", "blk.0.attn.score": "metered"}, alone=["metered"])
    for token in TOKENS[32:36]:
        made.step((seq, [token], [0]))
    rows = [a for a in device.timeline.activities if "rows of" in a.what]
    assert [(a.what, a.nbytes) for a in rows] == [
        ("32 rows of k", 32 * 64 * 4),
        ("32 rows of v", 32 * 64 * 4),
    ]
    # Back on the host everything is there; what the host writes then is brought when score comes back.
    made.executor.plans = plan_set(made.graph, {"": "host"}, alone=["metered"])
    made.step((seq, TOKENS[36:38], [0]))
    made.executor.plans = plan_set(made.graph, {"": "host", "blk.0.attn.score": "metered"}, alone=["metered"])
    logits = made.logits(seq, TOKENS[38:])
    assert np.abs(logits - expected()[38:]).max() < 1e-4
    moved = [a.what for a in device.timeline.activities if "rows of" in a.what]
    assert moved[2:] == ["2 rows of k", "2 rows of v"]
    made.close()


def test_a_working_set_that_is_too_small() -> None:
    made, device, _ = metered(200_000, blk="metered")
    with pytest.raises(BackendError, match="are larger than the working set"):
        made.step((made.kv.alloc(), TOKENS, [0]))
    made.close()
    device = Metered(100_000, FAST, resident=lambda weight: True)
    with pytest.raises(BackendError, match=r"metered: no memory left for .*; keep fewer weights"):
        rig(cases.GQA, {"metered": device})
    device.close()


def test_a_cancel_is_heard_and_the_next_pass_begins_anew() -> None:
    made, device, _ = metered(MEMORY, blk="metered")
    seq = made.kv.alloc()
    device.cancel()
    with pytest.raises(Cancelled):
        made.step((seq, TOKENS, [0]))
    device.rearm()
    assert np.abs(made.logits(seq, TOKENS) - expected()).max() < 1e-4
    made.close()


def test_the_clock_follows_lanes_and_what_waits_for_what() -> None:
    timeline = Timeline()
    first = timeline.begin(LINK, "w")
    second = timeline.begin(LINK, "w")
    here = timeline.begin(HOST, "h")
    there = timeline.begin(DEVICE, "d", (first,))
    after = timeline.begin(HOST, "h", (there, here))
    ends = timeline.clock(lambda a: {LINK: 3.0, HOST: 1.0, DEVICE: 0.5}[a.lane])
    assert [ends[a] for a in (first, second, here, there, after)] == [3.0, 6.0, 1.0, 3.5, 4.5]
