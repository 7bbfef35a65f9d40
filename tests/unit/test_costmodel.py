"""What was measured, and what follows from it: against times that are known exactly."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hetrun.config import dirs
from hetrun.planner.costmodel import OpWork, TimingBin, WorkTimes, path_of_machine
from hetrun.planner.costmodel.store import MOST_BYTES, MOST_FACTS, MOST_WORKS, cpu_facts
from hetrun.planner.costmodel.timing_bin import BELIEVED, LEAST_S, depth_class, tokens_class
from tests.support.examples import examples

WORK = OpWork("attn-1", "fast", 2)
Truth = Callable[[float, float], float]
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
DEPTHS = [0, 512, 2048, 4096]  # seen before the pass
GRID = [(n, before + (n + 1) / 2) for n in SIZES for before in DEPTHS]


def affine(fixed: float, token: float, key: float) -> Truth:
    return lambda tokens, depth: fixed + token * tokens + key * tokens * depth


def taught(
    truth: Truth,
    sizes: Iterable[tuple[int, float]] = GRID,
    noise: float = 0.0,
    runs: int = 4,
    work: OpWork = WORK,
    seed: int = 1,
) -> WorkTimes:
    chance, forecast = random.Random(seed), WorkTimes()
    for tokens, depth in sizes:
        for _ in range(runs):
            forecast.learn(work, tokens, depth, truth(tokens, depth) * chance.uniform(1 - noise, 1 + noise))
    return forecast


def predicted(forecast: WorkTimes, tokens: int, depth: float, work: OpWork = WORK) -> float:
    seconds = forecast.seconds(work, tokens, depth)
    assert seconds is not None
    return seconds


truths = st.builds(affine, st.floats(1e-5, 1e-2), st.floats(0, 1e-3), st.floats(0, 1e-6))


# --- cells -----------------------------------------------------------------------------------------------


def test_classes_double_in_tokens_and_grow_fourfold_in_depth() -> None:
    assert [tokens_class(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33)] == [
        0,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
        6,
    ]
    assert [depth_class(d) for d in (0, 15.5, 16, 63, 64, 255.5, 256, 1023, 1024)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        4,
    ]


def test_a_cell_is_a_mean_at_first_and_then_follows_slowly() -> None:
    cell = TimingBin()
    for seconds in (1.0, 1.1, 1.2):
        cell.add(4, 100, seconds)
    assert (cell.runs, cell.tokens, cell.depth, cell.best) == (3, 4, 100, 1.0)
    assert cell.smoothed == pytest.approx(1.1)
    for _ in range(7):
        cell.add(4, 100, 1.1)
    cell.add(4, 200, 2.1)
    assert cell.smoothed == pytest.approx(1.2)
    assert cell.depth == pytest.approx(110)


@pytest.mark.parametrize("before", [1, 3, 30])
def test_another_process_taking_the_core_is_no_news_unless_it_stays(before: int) -> None:
    cell = TimingBin()
    for _ in range(before):
        cell.add(8, 100, 1e-3)
    for _ in range(BELIEVED - 1):
        cell.add(8, 100, 1.0)
    assert cell.smoothed == pytest.approx(1e-3)
    cell.add(8, 100, 1e-3)  # a normal one between: the count begins again
    for _ in range(BELIEVED - 1):
        cell.add(8, 100, 1.0)
    assert cell.smoothed == pytest.approx(1e-3)
    cell.add(8, 100, 1.0)
    assert cell.smoothed == pytest.approx(1.0)


def test_a_larger_run_of_the_class_may_be_as_much_slower_as_it_is_larger() -> None:
    cell = TimingBin()
    cell.add(257, 1024, 1.0)
    cell.add(512, 4095, 7.9)
    assert cell.runs == 2


def test_a_slow_start_is_forgotten() -> None:
    cell = TimingBin()
    for seconds in (4.0, 1.0, 1.0):
        cell.add(1, 20, seconds)
    assert cell.smoothed == pytest.approx(1.0)


def test_far_faster_is_believed_at_once() -> None:
    cell = TimingBin()
    for _ in range(30):
        cell.add(1, 20, 1.0)
    cell.add(1, 20, 0.1)
    assert cell.smoothed == pytest.approx(0.1)


def test_nothing_takes_no_time(tmp_path: Path) -> None:
    cell = TimingBin()
    cell.add(1, 10, 0.0)
    assert cell.smoothed == cell.best == LEAST_S
    cell.rescale(0.0)
    assert cell.smoothed == cell.best == LEAST_S
    path, data = saved(tmp_path)
    data["works"][0][4] = [[5, 1, 10, 0.0, 0.0, 0.0, 0.0], [5, 8, 10, 5e-324, 0.0, 0.0, 0.0]]
    path.write_text(json.dumps(data))
    forecast = WorkTimes.load(path)
    assert predicted(forecast, 1, 10) >= LEAST_S
    assert predicted(forecast, 8, 10) >= LEAST_S


def test_what_was_measured_beside_others_counts_until_something_better_is_known(tmp_path: Path) -> None:
    forecast = WorkTimes()
    forecast.learn(WORK, 4, 10.0, 5.0, rough=0.5)
    assert predicted(forecast, 4, 10) == 5.0
    assert forecast.rough(WORK) == 0.5
    forecast.save(tmp_path / "times.json")
    again = WorkTimes.load(tmp_path / "times.json")
    assert (predicted(again, 4, 10), again.rough(WORK)) == (5.0, 0.5)
    again.learn(WORK, 4, 10.0, 1.0)
    assert (predicted(again, 4, 10), again.rough(WORK)) == (1.0, 0.0)
    again.learn(WORK, 4, 10.0, 9.0, rough=0.5)
    assert predicted(again, 4, 10) == 1.0, "a rough time says nothing where a certain one is known"


def test_what_was_rescaled_at_one_size_has_changed_less_at_others() -> None:
    forecast = WorkTimes()
    for tokens in (1, 64, 512):
        forecast.learn(WORK, tokens, 10.0, tokens / 10)
    forecast.rescale(WORK, 2.0, tokens=512)
    factors = [predicted(forecast, tokens, 10) / (tokens / 10) for tokens in (1, 64, 512)]
    assert factors[2] == pytest.approx(2.0)
    assert 1.0 < factors[0] < factors[1] < factors[2]


def test_drift_is_more_than_noise_and_more_than_a_tenth() -> None:
    chance, steady, noisy = random.Random(3), TimingBin(), TimingBin()
    for _ in range(200):
        steady.add(1, 20, chance.gauss(1.0, 0.02))
        noisy.add(1, 20, abs(chance.gauss(1.0, 0.6)))
    assert not steady.drifted(1.0)
    assert not steady.drifted(0.95)
    assert steady.drifted(0.8)
    assert steady.drifted(1.3)
    assert not noisy.drifted(0.8)
    assert not TimingBin().drifted(1.0)
    for _ in range(10):
        steady.add(1, 20, chance.gauss(1.4, 0.02))
    assert steady.drifted(1.0)


@given(
    st.lists(st.tuples(st.integers(5, 8), st.floats(64, 255), st.floats(1e-7, 10)), min_size=1, max_size=40)
)
def test_a_cell_stands_for_something_between_its_runs(runs: list[tuple[int, float, float]]) -> None:
    cell = TimingBin()
    for run in runs:
        cell.add(*run)
    for values, value in zip(zip(*runs, strict=True), (cell.tokens, cell.depth, cell.smoothed), strict=True):
        assert min(values) * (1 - 1e-9) <= value <= max(values) * (1 + 1e-9)
    assert cell.best <= cell.smoothed * (1 + 1e-9)


# --- predictions -----------------------------------------------------------------------------------------


@given(truths, st.integers(1, 512), st.floats(0, 1))
def test_what_is_a_line_is_found_exactly(truth: Truth, tokens: int, share: float) -> None:
    depth = (tokens + 1) / 2 + share * 4096
    assert predicted(taught(truth), tokens, depth) == pytest.approx(truth(tokens, depth), rel=0.01)


@settings(max_examples=examples(40))
@given(truths, st.integers(1, 512), st.floats(0, 1), st.integers(0, 1000))
def test_noise_of_some_per_cent_stays_some_per_cent(
    truth: Truth, tokens: int, share: float, seed: int
) -> None:
    depth = (tokens + 1) / 2 + share * 4096
    forecast = taught(truth, noise=0.05, seed=seed)
    assert predicted(forecast, tokens, depth) == pytest.approx(truth(tokens, depth), rel=0.06)


@settings(max_examples=examples(40))
@given(truths, st.integers(1, 512), st.floats(0, 1), st.sampled_from(GRID))
def test_one_wild_run_changes_little(
    truth: Truth, tokens: int, share: float, where: tuple[int, float]
) -> None:
    forecast = taught(truth)
    forecast.learn(WORK, *where, 100 * truth(*where))
    depth = (tokens + 1) / 2 + share * 4096
    assert predicted(forecast, tokens, depth) == pytest.approx(truth(tokens, depth), rel=0.02)


@settings(max_examples=examples(40))
@given(truths, st.integers(1, 600), st.floats(1, 9000))
def test_more_takes_no_less(truth: Truth, tokens: int, depth: float) -> None:
    forecast = taught(truth)
    seconds = predicted(forecast, tokens, depth)
    assert predicted(forecast, tokens + 1, depth) >= seconds * (1 - 1e-6)
    assert predicted(forecast, tokens, depth * 1.1) >= seconds * (1 - 1e-6)


sizes = st.tuples(st.integers(1, 512), st.floats(0, 9000), st.floats(1e-7, 10))


@given(st.lists(sizes, min_size=1, max_size=30), st.integers(1, 2000), st.floats(0, 1e5))
def test_never_negative_whatever_was_measured(
    runs: list[tuple[int, float, float]], tokens: int, depth: float
) -> None:
    forecast = WorkTimes()
    for run in runs:
        forecast.learn(WORK, *run)
    assert predicted(forecast, tokens, depth) >= 0


def test_work_that_reads_no_keys_is_flat() -> None:
    forecast = taught(affine(5e-4, 2e-5, 0), noise=0.05, runs=10)
    for tokens in (1, 24, 512):
        near, far = predicted(forecast, tokens, 300), predicted(forecast, tokens, 20_000)
        assert far == pytest.approx(near, rel=0.1)


def test_rows_at_one_depth_only_borrow_the_price_of_a_key() -> None:
    truth = affine(1e-4, 2e-6, 4e-8)
    forecast = taught(truth, [(1, 20), (1, 1000), (8, 30), (64, 50), (512, 256), (512, 1300)])
    for tokens, depth in ((8, 1000), (64, 1000), (100, 700)):
        assert predicted(forecast, tokens, depth) == pytest.approx(truth(tokens, depth), rel=0.03)


def test_where_time_is_no_line_in_depth_what_was_measured_is_met_all_the_same() -> None:
    def bent(tokens: float, depth: float) -> float:
        return 1e-3 + 1e-6 * tokens * math.pow(depth, 0.7)

    measured = [(tokens, depth) for tokens in SIZES for depth in (20, 100, 500, 2000, 8000)]
    forecast = taught(bent, measured)
    for tokens, depth in measured:
        assert predicted(forecast, tokens, depth) == pytest.approx(bent(tokens, depth), rel=1e-6)


def test_outside_of_what_was_measured() -> None:
    forecast = taught(affine(1e-3, 1e-4, 0), [(8, 100), (64, 100)])
    assert predicted(forecast, 2, 100) == pytest.approx(1.8e-3)
    assert predicted(forecast, 128, 100) == pytest.approx(2 * 7.4e-3)


def test_nothing_is_known_of_other_work() -> None:
    forecast = taught(affine(1e-3, 0, 0))
    for other in (OpWork("attn-2", "fast", 2), OpWork("attn-1", "slow", 2), OpWork("attn-1", "fast", 1)):
        assert forecast.seconds(other, 1, 10) is None
    assert list(forecast.works()) == [WORK]


def test_one_sequence_and_several_stand_in_for_each_other() -> None:
    truth = affine(1e-3, 1e-4, 1e-7)
    forecast, several = taught(truth), OpWork("attn-1", "fast", 2, several=True)
    assert predicted(forecast, 16, 600, several) == predicted(forecast, 16, 600)
    assert not forecast.knows(several)
    for depth in (20, 600, 3000):
        forecast.learn(several, 16, depth, 2 * truth(16, depth))
    assert predicted(forecast, 16, 600, several) == pytest.approx(2 * truth(16, 600), rel=0.01)
    # It was never measured with two sequences; that it shrinks is known from one.
    assert predicted(forecast, 2, 600, several) == pytest.approx(2 * truth(2, 600), rel=0.05)
    assert predicted(forecast, 16, 600) == pytest.approx(truth(16, 600), rel=0.01)


def test_a_held_cell_stays_in_use() -> None:
    forecast = WorkTimes()
    cell = forecast.cell(WORK, 4, 100)
    cell.add(4, 100, 1.0)
    assert forecast.seconds(WORK, 4, 100) == 1.0
    forecast.rescale(WORK, 3.0)
    assert forecast.seconds(WORK, 4, 100) == 3.0
    cell.add(4, 100, 5.0)
    assert forecast.cell(WORK, 3, 120) is cell
    assert forecast.seconds(WORK, 4, 100) == 4.0


def test_facts_are_smoothed() -> None:
    forecast = WorkTimes()
    assert forecast.fact("start_s", "fast") is None
    forecast.learn_fact("start_s", "fast", 2.0)
    forecast.learn_fact("start_s", "fast", 3.0)
    assert forecast.fact("start_s", "fast") == pytest.approx(2.3)
    assert forecast.fact("start_s", "slow") is None


# --- files -----------------------------------------------------------------------------------------------


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    forecast, path = taught(affine(1e-3, 1e-4, 1e-7), noise=0.1), tmp_path / "deep" / "times.json"
    forecast.learn_fact("start_s", "fast", 2.0)
    forecast.save(path)
    loaded = WorkTimes.load(path)
    assert list(loaded.works()) == [WORK]
    assert loaded.fact("start_s", "fast") == 2.0
    for tokens, depth in [*GRID, (100, 777)]:
        assert loaded.seconds(WORK, tokens, depth) == forecast.seconds(WORK, tokens, depth)
    assert [p.name for p in path.parent.iterdir()] == ["times.json"]


def test_two_processes_keep_what_both_learned(tmp_path: Path) -> None:
    path, other, third = tmp_path / "times.json", OpWork("ffn-1", "fast", 2), OpWork("ffn-2", "fast", 2)
    begin = WorkTimes()
    begin.learn(third, 1, 10, 3.0)
    begin.save(path)
    one, two = WorkTimes.load(path), WorkTimes.load(path)
    one.learn(WORK, 1, 10, 1.0)
    two.learn(other, 1, 10, 2.0)
    one.save(path)
    two.save(path)
    assert set(WorkTimes.load(path).works()) == {WORK, other, third}


def test_no_file_is_nothing_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not list(WorkTimes.load(tmp_path / "none").works())
    assert not caplog.records


def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "times.json"
    taught(affine(1e-3, 1e-4, 1e-7), [(1, 20), (8, 300)]).save(path)
    return path, json.loads(path.read_text())


BAD_CELLS = [
    [],
    None,
    [1, 2, 3],
    [0, 1, 1, 1, 1, 1, 0],
    [1, 0, 1, 1, 1, 1, 0],
    [1, 1, -1, 1, 1, 1, 0],
    [1, 1, 1, "1", 1, 1, 0],
    [1, 1, 1, float("nan"), 1, 1, 0],
    [1, 1, 1, float("inf"), 1, 1, 0],
    [10**400, 1, 1, 1, 1, 1, 0],
    [1, 1, 1, 1, 1, 1, 1, 1],
    [1, 1, 1, 1, 1, 1, -1],
    [True, 1, 1, 1, 1, 1, 0],
]


@pytest.mark.parametrize("cell", BAD_CELLS, ids=repr)
def test_a_damaged_cell(cell: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, data = saved(tmp_path)
    data["works"][0][4].append(cell)
    path.write_text(json.dumps(data))
    assert not list(WorkTimes.load(path).works())
    assert str(path) in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
        {"works": None},
        {"works": [1]},
        {"works": [["a", "b", 1, 0, []]]},
        {"works": [["a" * 1000, "b", 1, False, []]]},
        {"works": [["a", "b", "1", False, []]]},
        {"works": [["a", "b", 1, False, [[1, 1, 1, 1, 1, 1, 0]] * 10_000]]},
        {"facts": [["a", "b"]]},
        {"facts": [["a", "b", float("inf")]]},
        {"facts": {}},
    ],
)
def test_a_foreign_file(change: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, data = saved(tmp_path)
    path.write_text(json.dumps({**data, **change}))
    assert not list(WorkTimes.load(path).works())
    assert str(path) in caplog.text


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff\xfe", b"null", b"[" * 100_000, b" " * (MOST_BYTES + 1)]
)
def test_no_json(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "times.json"
    path.write_bytes(content)
    assert not list(WorkTimes.load(path).works())
    assert str(path) in caplog.text


@given(choice=st.data())
def test_any_byte_may_be_wrong(choice: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path, _ = saved(tmp_path_factory.mktemp("bytes"))
    content = bytearray(path.read_bytes())
    content[choice.draw(st.integers(0, len(content) - 1))] = choice.draw(st.integers(0, 255))
    path.write_bytes(content)
    forecast = WorkTimes.load(path)
    for work in forecast.works():
        assert predicted(forecast, 3, 200, work) >= 0


def test_a_folder_that_takes_nothing_is_said_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    forecast = taught(affine(1, 0, 0))
    for _ in range(3):
        forecast.save(tmp_path / "file" / "times.json")
    assert caplog.text.count("could not be saved") == 1
    assert "--planner static" in caplog.text


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: f.learn(OpWork("ffn" * 100, "fast", 2), 1, 10, 1.0),
        lambda f: f.learn(OpWork("ffn", "fast" * 100, 2), 1, 10, 1.0),
        lambda f: f.learn(OpWork("ffn", "fast", 2), 1, 10, 1e9),
        lambda f: f.learn(OpWork("ffn", "fast", 2), 1, 10, math.inf),
        lambda f: f.learn_fact("rate", "fast", math.inf),
        lambda f: f.learn_fact("rate", "fast", -1.0),
        lambda f: f.learn_fact("rate" * 100, "fast", 1.0),
    ],
)
def test_what_could_not_be_read_back_does_not_cost_the_rest(
    spoil: Callable[[WorkTimes], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forecast, path = taught(affine(1, 0, 0)), tmp_path / "times.json"
    spoil(forecast)
    forecast.save(path)
    assert WORK in WorkTimes.load(path).works()
    assert not caplog.records


def test_a_damaged_file_is_said_once_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "times.json"
    path.write_text("{")
    forecast = WorkTimes.load(path)
    forecast.learn(WORK, 1, 10, 1.0)
    forecast.save(path)
    assert caplog.text.count("is ignored") == 1
    assert list(WorkTimes.load(path).works()) == [WORK]


def test_facts_that_are_asked_for_stay_when_a_file_is_full(tmp_path: Path) -> None:
    path, forecast = tmp_path / "times.json", WorkTimes()
    for name in ("start_s", "never asked"):
        forecast.learn_fact(name, "fast", 2.0)
    for i in range(MOST_FACTS + 10):
        forecast.learn_fact(f"asked {i}", "fast", 1.0)
        if i % 100 == 0:
            forecast.save(path)
            forecast = WorkTimes.load(path)
            assert forecast.fact("start_s", "fast") == 2.0
    forecast.save(path)
    last = WorkTimes.load(path)
    assert last.fact("start_s", "fast") == 2.0
    assert last.fact("never asked", "fast") is None
    assert last.fact(f"asked {MOST_FACTS + 9}", "fast") == 1.0


def test_files_stay_small(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, forecast = tmp_path / "times.json", WorkTimes()
    for i in range(MOST_WORKS + 10):
        forecast.learn(OpWork(f"ffn-{i}", "fast", 2), 1, 10, 1.0)
    forecast.save(path)
    again = WorkTimes.load(path)
    again.learn(WORK, 1, 10, 1.0)  # what is in use stays
    again.save(path)
    works = list(WorkTimes.load(path).works())
    assert len(works) == MOST_WORKS
    assert WORK in works
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_the_file_is_named_by_what_makes_times_incomparable() -> None:
    names = [
        path_of_machine(cores, versions)
        for cores in (2, 4)
        for versions in ({"torch": "2.6"}, {"torch": "2.7"}, {"torch": "2.7", "ggml": "1"})
    ]
    assert len(set(names)) == len(names)
    assert {p.parent for p in names} == {dirs().cache / "times"}
    assert path_of_machine(2, {"a": "1", "b": "2"}) == path_of_machine(2, {"b": "2", "a": "1"})


def test_what_a_cpu_is(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    one = "processor\t: 0\nmodel name\t: Some CPU @ 2.5GHz\ncpu MHz\t: 2501.7\nflags\t\t: fpu amx_tile\n"
    info.write_text(f"{one}\n{one}\n")
    facts = cpu_facts(info)
    assert facts.pop("machine")
    assert facts == {"model name": "Some CPU @ 2.5GHz", "flags": "fpu amx_tile"}
    assert list(cpu_facts(tmp_path / "none")) == ["machine"]


def test_a_work_that_became_faster_is_faster_at_every_size() -> None:
    times, work = WorkTimes(), OpWork("ffn", "a", 1)
    for tokens, seconds in ((1, 0.001), (64, 0.01), (512, 0.04)):
        times.learn(work, tokens, 1.0, seconds)
    before = [times.seconds(work, n, 1.0) or 0.0 for n in (1, 30, 512, 900)]
    times.rescale(work, 0.25)
    assert [times.seconds(work, n, 1.0) for n in (1, 30, 512, 900)] == pytest.approx([b / 4 for b in before])
