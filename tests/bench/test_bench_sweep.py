"""A sweep over budgets: who runs when and in what, what bounds a budget, and how it is told and drawn."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st

from hetrun.config import Settings
from hetrun.errors import BudgetError, UserError
from hetrun.tools import bench
from hetrun.tools.bench import chart as charts, interleave, svg
from hetrun.tools.bench.cases import BenchCase, Passage
from hetrun.tools.bench.chart import ChartMark, Series
from hetrun.tools.bench.disk_bandwidth import Ceiling, ModelDisk
from hetrun.tools.bench.io_counters import ModelMemory, disk_bytes, peak_memory
from hetrun.tools.bench.process import BenchProcessDied
from hetrun.tools.bench.sweep import budgets, sweep, worker
from hetrun.tools.bench.sweep.budgets import SweepBudget, SweepOptions
from hetrun.tools.bench.sweep.cgroup_sandbox import VERSION_1, SandboxGroup
from hetrun.tools.bench.sweep.report import series, to_csv, to_json, to_table
from hetrun.tools.bench.sweep.results import BudgetPoint, PeerPoint, SampleTurn, Sweep
from hetrun.tools.bench.sweep.worker import ModelOpened, SweepSample, WorkerState
from tests.models import tiny
from tests.models.tiny import TinyLlama

GIB = 1 << 30
MODEL = TinyLlama("sweep", layers=2, kv_heads=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(MODEL, tmp_path_factory.mktemp("sweep") / "tiny.gguf")


# --- what bounds a budget


def turn(tok_s: float, per_step: int = 0, ceiling: float | None = 2e9, steps: int = 4) -> SampleTurn:
    """A sample of one sequence."""
    sample = SweepSample(tok_s, steps, steps / tok_s, steps * per_step, steps * per_step)
    return SampleTurn(sample, () if ceiling is None else (Ceiling(ceiling, 2, 1 << 20),))


def state(locked: int, streamed: int = 0, waiting: float = 0.0) -> WorkerState:
    return WorkerState(ModelMemory(locked, streamed, waiting, GIB // 2, 3 * GIB), 2, "llamacpp")


RESIDENT = BudgetPoint(None, None, 1, 4096, (turn(8.0), turn(10.0)), state(4 * GIB))
HALF = BudgetPoint(
    SweepBudget(percent=50.0),
    *(2 * GIB, 1, 4096, (turn(0.8, 2 * 10**9), turn(0.9, 2 * 10**9, 2.5e9)), state(2 * GIB, 2 * 10**9, 0.7)),
    group_peak=2 * GIB - 5,
)


def sweep_of(*points: BudgetPoint) -> Sweep:
    return Sweep("model", 4 * GIB, BenchCase("decode", 64, 32), points, (0.1, 0.2))


def test_a_step_takes_as_long_as_computing_or_as_reading() -> None:
    compute = sweep_of(RESIDENT, HALF).compute
    assert compute == (1 / 9, "all weights in memory")
    # Reading 2 GB at 2 GB/s takes a second, at 2.5 GB/s 0.8 of one; each sample is held against its own.
    assert HALF.bounds(compute[0]) == pytest.approx([1.0, 1.25])
    assert HALF.of_bound(compute[0]) == pytest.approx((0.8 / 1.0 + 0.9 / 1.25) / 2)
    assert HALF.bounds(2.0) == pytest.approx([0.5, 0.5])
    assert RESIDENT.bounds(compute[0]) == pytest.approx([9.0, 9.0])


@given(
    st.floats(0.01, 10), st.floats(0, 1e10), st.floats(1e8, 1e10), st.integers(1, 16), st.floats(0.01, 100)
)
def test_the_bound_is_never_above_either_limit(
    compute: float, per_step: float, ceiling: float, batch: int, tok_s: float
) -> None:
    found = replace(HALF, batch=batch, turns=(turn(tok_s, int(per_step), ceiling),)).bound(compute)
    assert found is not None
    assert found <= batch / compute * (1 + 1e-9)
    assert found * int(per_step) <= batch * ceiling * (1 + 1e-9)


def test_without_room_for_all_weights_the_fastest_budget_says_what_computing_takes() -> None:
    found = sweep_of(HALF).compute
    assert found is not None
    assert found[0] == pytest.approx((1 / 0.85) * 0.3)
    assert "without its waiting" in found[1]
    assert sweep_of(BudgetPoint(None, None, failed="no")).compute is None


def test_without_a_ceiling_computing_alone_bounds() -> None:
    point = replace(HALF, turns=(turn(0.5, 10**9, None),))
    assert point.bound(0.5) == 2.0
    assert point.bound(None) is None
    assert point.of_bound(None) is None


# --- who runs when


class World:
    """Processes and groups that only take notes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.limits: list[int] = []
        self.opened: list[dict[str, object]] = []
        self.refused = 0  # budgets below this
        self.dies: tuple[str, ...] = ()  # orders at which our process is killed
        self.peers_end = 99  # samples that the peer survives
        self.groups = True
        self.memory = 0  # that is free
        self.passages: list[tuple[int, Passage | None]] = []
        self.copied = 0.0  # tokens per second of a peer that copies its weights
        monkeypatch.setattr(interleave, "PAUSE_S", 0.0)
        monkeypatch.setattr(sweep, "confined", self._confined)
        monkeypatch.setattr(sweep, "why_not", lambda: None if self.groups else "no one may")
        monkeypatch.setattr(sweep, "check_peer", lambda name, path: None)
        monkeypatch.setattr(sweep, "Peer", lambda path, threads, mapped, text: FakePeer(self, mapped))
        monkeypatch.setattr(sweep, "available_memory", lambda: self.memory)
        monkeypatch.setattr(worker, "start", lambda prefix=(): FakeProcess(self, prefix))
        monkeypatch.setattr(ModelDisk, "ceiling", lambda disk: self._ceiling())

    @contextmanager
    def _confined(self, nbytes: int) -> Iterator[SandboxGroup]:
        self.limits.append(nbytes)
        yield FakeGroup(self, nbytes)
        self.log.append("group ends")

    def _ceiling(self) -> Ceiling:
        self.log.append("disk")
        return Ceiling(1e9 * (1 + self.log.count("disk") % 2), 2, 1 << 20)


class FakeGroup(SandboxGroup):
    """Whose processes were always killed by the kernel, if they were killed."""

    world: World

    def __init__(self, world: World, nbytes: int) -> None:
        super().__init__(Path("/group"), VERSION_1, nbytes)
        object.__setattr__(self, "world", world)

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("in", str(self.limit))

    def empty(self) -> None:
        self.world.log.append("theirs rest")

    @property
    def peak(self) -> int | None:
        return self.limit - 1

    @property
    def killed(self) -> bool:
        return True


class FakeProcess:
    """Ours."""

    def __init__(self, world: World, prefix: tuple[str, ...]) -> None:
        self._world, self.prefix = world, prefix

    def ask(self, order: object, kind: type) -> object:
        world, name = self._world, type(order).__name__
        if name in world.dies:
            raise BenchProcessDied("hetrun", -signal.SIGKILL)
        match order:
            case worker.OpenModel(_, options, _):
                world.opened.append(dict(options))
                ram = options.get("ram")
                if isinstance(ram, int) and ram < world.refused:
                    raise BudgetError(f"{ram} bytes are too few: at least {world.refused}")
                return ModelOpened(4096, 1.0)
            case worker.PrepareCase():
                return 1.0
            case worker.RunCase(case, seed, passage):
                world.passages.append((seed, passage))
                world.log.append(f"ours {case.tokens}")
                return SweepSample(2.0, case.tokens, case.tokens / 2.0, case.tokens * 10**9, 0)
            case worker.ReportState():
                return state(GIB, 10**9, 0.5)
        raise AssertionError(order)

    def close(self) -> None:
        self._world.log.append("ours ends")


class FakePeer:
    """Theirs."""

    name, version, pid = "llama.cpp", "0", 0

    def __init__(self, world: World, mapped: Any) -> None:  # noqa: ANN401 - of a module that is not tested here
        self._world, self._rate = world, 0.25 if mapped.load == "mmap" else world.copied
        assert mapped.prefix[0] == "in"
        world.log.append(f"peer in {mapped.prefix[1]} {mapped.kv_type} {mapped.load}")

    def prepare(self, case: BenchCase) -> None:
        self._world.log.append(f"peer prepares {case.name}")

    def threads(self, case: BenchCase) -> int:
        return 2

    def sample(self, case: BenchCase, seed: int, tokens: int) -> float:
        if self._world.log.count("theirs 4") >= self._world.peers_end:
            raise BenchProcessDied(self.name, -signal.SIGKILL)
        self._world.log.append(f"theirs {tokens}")
        return self._rate

    def close(self) -> None:
        self._world.log.append("peer ends")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def run(path: Path, **given: Any) -> Sweep:  # noqa: ANN401 - those of SweepOptions
    asked: dict[str, Any] = {"budgets": (SweepBudget(GIB),), "generate": 40, "rounds": 2}
    options = SweepOptions(**(asked | given))
    settings = Settings.resolve(environ={}, model=str(path), kv_type="q8_0", ram="5GiB")
    said: list[tuple[int, int]] = []
    found = sweep.run(settings, options, lambda done, total, what: said.append((done, total)))
    assert said
    assert all(0 <= done <= total for done, total in said)
    assert said == sorted(said)
    return found


def test_both_take_turns_and_the_disk_is_measured_beside_ours(path: Path, world: World) -> None:
    found = run(path, vs="llama.cpp")
    assert world.limits == [2 * GIB, GIB]
    assert world.opened == [{"kv_type": "q8_0", "spec": "off", "ram": GIB}]
    assert world.log == [
        # There is room for all weights, so both ways to load them are tried.
        *(f"peer in {GIB} q8_0 none", "peer prepares tg40@32", "theirs 2", "peer ends"),
        *(f"peer in {GIB} q8_0 mmap", "peer prepares tg40@32", "theirs 2"),
        # As many tokens as come in ten seconds: ours at one step in a second, theirs at a quarter.
        *("theirs rest", "disk", "ours 10", "disk", "theirs 1", "theirs 4"),
        *("theirs 1", "theirs 4", "theirs rest", "disk", "ours 10", "disk"),
        *("peer ends", "group ends", "ours ends", "group ends"),
    ]
    (point,) = found.points
    assert (point.ratio, point.tok_s, point.group_peak) == (8.0, 2.0, 2 * GIB - 1)
    assert point.ceiling == 1.5e9  # the mean of both
    assert point.peer == PeerPoint("llama.cpp", "0", 2, (0.25, 0.25), 0.0, GIB - 1)
    assert found.kv_type == "q8_0"


def test_a_peer_that_is_faster_with_its_weights_copied_has_them_so(path: Path, world: World) -> None:
    world.copied = 0.5
    found = run(path, vs="llama.cpp")
    loads = [line.split()[-1] for line in world.log if line.startswith("peer in")]
    assert loads == ["none", "mmap", "none"]
    (peer,) = [p.peer for p in found.points]
    assert peer is not None
    assert (peer.load, peer.samples) == ("none", (0.5, 0.5))
    assert "all copied into memory, in a group of just the budget" in to_table(found, 80)
    assert json.loads(to_json(found))["rows"][0]["peer"]["load_mode"] == "none"


def test_a_peer_without_room_for_its_weights_maps_them(path: Path, world: World) -> None:
    run(path, vs="llama.cpp", budgets=(SweepBudget(budgets.BESIDE),))
    assert [line.split()[-1] for line in world.log if line.startswith("peer in")] == ["mmap"]


def test_of_a_text_each_round_has_a_passage_of_its_own(path: Path, world: World, tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text("".join(f"{i} bottles of beer. " for i in range(60)))
    found = run(path, vs="llama.cpp", text=text, depth=8, generate=12)
    given = [(seed, passage) for seed, passage in world.passages if passage]
    assert [seed for seed, _ in given] == [1, 2]
    first, second = (passage.prompts.tolist() for _, passage in given)
    assert first != second
    # No token of the peer's answer is written before it counts: the prompt alone has its memory fill up.
    assert world.log.count("theirs 0") == 2
    assert "theirs 1" not in world.log
    about = json.loads(to_json(found))["text"]
    assert (about["name"], len(about["sha256"])) == ("words.txt", 64)
    assert "text: words.txt, " in to_table(found, 80)


def test_all_weights_in_memory_come_first_where_there_is_room(path: Path, world: World) -> None:
    world.memory = 1 << 40
    found = run(path, budgets=(SweepBudget(GIB), SweepBudget(percent=50.0)))
    assert [p.name for p in found.points] == ["all", "1.0 GiB", "50%"]
    shares = path.stat().st_size // 2 + budgets.BESIDE
    assert [o.get("ram") for o in world.opened] == [None, GIB, pytest.approx(shares, abs=1)]
    assert len(world.limits) == 2


def test_a_budget_that_is_refused_is_a_result(path: Path, world: World) -> None:
    world.refused = 2 * GIB
    found = run(path, budgets=(SweepBudget(GIB), SweepBudget(2 * GIB)), vs="llama.cpp")
    assert [p.tok_s for p in found.points] == [None, 2.0]
    assert found.points[0].failed == f"{GIB} bytes are too few: at least {2 * GIB}"
    assert found.points[0].peer is not None
    assert found.points[0].peer.tok_s == 0.25
    assert "1.0 GiB: 1073741824 bytes are too few" in to_table(found, 80)


@pytest.mark.parametrize("order", ["OpenModel", "PrepareCase", "RunCase", "ReportState"])
def test_who_is_killed_is_a_result(path: Path, world: World, order: str) -> None:
    world.dies = (order,)
    (point,) = run(path).points
    assert point.failed == "killed for memory"
    assert len(point.turns) == (2 if order == "ReportState" else 0)


def test_a_killed_peer_is_a_result(path: Path, world: World) -> None:
    world.peers_end = 1
    found = run(path, vs="llama.cpp", rounds=3)
    (point,) = found.points
    assert point.peer is not None
    assert (point.peer.samples, point.peer.failed) == ((0.25,), "killed for memory")
    assert len(point.turns) == 3
    assert "1.0 GiB, llama.cpp: killed for memory" in to_table(found, 80)


def test_without_groups_a_peer_is_refused_and_ours_runs(path: Path, world: World) -> None:
    world.groups = False
    with pytest.raises(
        UserError, match="--vs in a sweep needs the peer to have the budget and no more: no one"
    ):
        run(path, vs="llama.cpp")
    found = run(path)
    assert world.limits == []
    assert found.points[0].group_peak is None
    assert "group's: unknown, no one may" in to_table(found, 80)


# --- how it is told

PEER = PeerPoint("llama.cpp", "0.3", 1, (0.3, 0.4), 4e9, 2 * GIB)
TOLD = sweep_of(RESIDENT, replace(HALF, peer=PEER, ratio=2.5))


def test_programs_get_everything() -> None:
    found = json.loads(to_json(TOLD))
    assert (found["compute_s"], found["compute_from"]) == (pytest.approx(1 / 9), "all weights in memory")
    everything, half = found["rows"]
    assert (everything["budget"], everything["budget_bytes"], everything["peer"]) == ("all", None, None)
    assert half["samples"] == [0.8, 0.9]
    assert half["bytes_per_token"] == half["kernel_bytes_per_token"] == 2e9
    assert half["of_bound"] == pytest.approx(0.76)
    assert (half["above_bound"], half["ceilings"]) == (False, [2e9, 2.5e9])
    assert (half["locked_bytes"], half["peak_bytes"]) == (2 * GIB, 3 * GIB)
    assert half["peer"]["tok_s"] == pytest.approx(0.35)
    lines = list(csv.DictReader(io.StringIO(to_csv(TOLD))))
    assert [line["budget"] for line in lines] == ["all", "50%"]
    assert (lines[1]["samples"], lines[1]["peer_samples"], lines[1]["ratio"]) == ("0.8 0.9", "0.3 0.4", "2.5")
    assert lines[0]["peer_tok_s"] == ""
    assert set(half) - {"peer"} <= set(lines[0])


def test_people_get_a_line_for_each_budget_and_a_picture() -> None:
    text = to_table(TOLD, 80)
    heads, everything, half = text.splitlines()[:3]
    assert heads.split()[:3] == ["budget", "GiB", "tokens/s"]
    assert everything.split()[:2] == ["all", "-"]
    assert half.split()[:2] == ["50%", "2.00"]
    assert "0.85 ± 0.05" in half
    assert "2.50" in half
    assert "● hetrun   ○ bound   ▲ llama.cpp" in text
    assert "a step computes for 111.1 ms" in text


def test_what_is_faster_than_it_can_be_is_marked() -> None:
    above = replace(HALF, turns=(turn(1.1, 2 * 10**9),))
    text = to_table(sweep_of(RESIDENT, above), 80)
    assert "110% !" in text
    assert "a cache between the disk and us, or a mistake" in text
    assert json.loads(to_json(sweep_of(RESIDENT, above)))["rows"][1]["above_bound"] is True
    assert "!" not in to_table(TOLD, 80)


def test_what_came_from_the_page_cache_is_marked() -> None:
    sample = SweepSample(0.8, 4, 5.0, 8 * 10**9, 4 * 10**9)
    half_cached = sweep_of(replace(HALF, turns=(replace(HALF.turns[0], sample=sample),)))
    text = to_table(half_cached, 80)
    assert "1.000 c" in text
    assert "came from the page cache" in text
    assert json.loads(to_json(half_cached))["rows"][0]["from_cache"] is True
    assert "page cache, and not" not in to_table(TOLD, 80)


def test_the_better_of_both_ceilings_says_what_cannot_be() -> None:
    sample = SweepSample(1.1, 4, 4 / 1.1, 8 * 10**9, 8 * 10**9)
    both = replace(HALF, turns=(SampleTurn(sample, (Ceiling(1e9, 2, 1 << 20), Ceiling(2.6e9, 2, 1 << 20))),))
    assert both.of_bound(0.1) == pytest.approx(1.1 / 0.9)
    assert not both.above(0.1)
    assert both.above(1.0)  # computing takes longer than that


def test_a_sweep_of_failures_is_told_too() -> None:
    failed = sweep_of(BudgetPoint(SweepBudget(GIB), GIB, failed="killed for memory"))
    assert "1.0 GiB: killed for memory" in to_table(failed, 80)
    assert json.loads(to_json(failed))["rows"][0]["tok_s"] is None
    assert "killed for memory" in to_csv(failed)
    ElementTree.fromstring(svg.drawn(series(failed), failed.title))


# --- pictures


@given(st.floats(1e-6, 1e12), st.integers(2, 10))
def test_axes_have_round_numbers_up_to_the_most(most: float, ticks: int) -> None:
    found = charts.steps(most, ticks)
    assert found[0] == 0
    assert found[-1] >= most * (1 - 1e-6)
    assert found[-2] < most
    assert len(found) <= ticks + 2


POINTS = st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 1000)), min_size=1, max_size=6)


@given(st.lists(POINTS, min_size=1, max_size=3), st.integers(0, 200))
def test_every_point_is_in_the_picture(points: list[list[tuple[float, float]]], width: int) -> None:
    all_series = [Series(f"s{i}", [ChartMark(x, y) for x, y in of]) for i, of in enumerate(points)]
    text = charts.drawn(all_series, width, "tokens/s", "GiB")
    drawn = "\n".join(text.splitlines()[1:])
    assert max(map(len, text.splitlines())) <= charts.MOST_WIDTH + 40
    for letter, _ in zip(charts.MARKS, points, strict=False):
        assert letter in drawn
    root = ElementTree.fromstring(svg.drawn(all_series, "a <b> & c"))
    marks = [e for e in root.iter() if e.get("class", "").startswith("m") and e.find("{*}title") is not None]
    assert len(marks) == sum(map(len, points))


def test_nothing_to_draw_is_no_picture() -> None:
    assert charts.drawn([], 80, "tokens/s", "GiB") == ""


def test_a_picture_lies_inside_of_its_frame() -> None:
    root = ElementTree.fromstring(svg.drawn(series(TOLD), TOLD.title))
    for circle in root.iter("{*}circle"):
        assert svg.LEFT - 1 <= float(circle.get("cx", "-1")) <= svg.WIDTH - svg.RIGHT + 1
        assert 0 <= float(circle.get("cy", "-1")) <= svg.HEIGHT - svg.BOTTOM + 1
    said = root.findtext("{*}desc") or ""
    assert "hetrun: 0.85 at 2 GiB" in said
    assert [s.name for s in series(TOLD)] == ["hetrun", "bound", "llama.cpp"]


# --- counters, and all of it together


def test_the_kernel_counts_for_us() -> None:
    assert disk_bytes(os.getpid()) >= 0
    assert (peak_memory(os.getpid()) or 0) > 1 << 20
    assert disk_bytes(1 << 30) == 0
    assert peak_memory(1 << 30) is None


@pytest.mark.slow
def test_a_sweep_from_end_to_end(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "SAMPLE_S", 0.05)
    settings = Settings.resolve(environ={}, model=str(path), backends=["reference"], planner="static")
    picture = tmp_path / "sweep.svg"
    options = SweepOptions(
        (SweepBudget(4 * GIB), SweepBudget(1 << 20)), 8, 4, rounds=1, output="json", picture=picture
    )
    bench.in_budgets(settings, options)
    found = json.loads(capsys.readouterr().out)
    everything, large, small = found["rows"]
    assert everything["tok_s"] > 0
    assert large["tok_s"] > 0
    assert large["peak_bytes"] > 1 << 20
    assert large["bytes_per_token"] == 0
    assert small["tok_s"] is None
    assert small["failed"]
    ElementTree.parse(picture)
