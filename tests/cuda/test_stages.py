"""What runs on a machine with a GPU, run without one: nothing may break there for a slip of the pen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend import Available, Backend, Descriptor, Unavailable, registry
from hetrun.backends.cuda.streamed import file_feed
from hetrun.tools.bench.cases import BenchCase
from tests.cuda import (
    __main__ as script,
    beyond,
    conformance,
    disk,
    measured,
    model as one_model,
    models,
    placements,
    speed,
)
from tests.cuda.best import Way, least
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.driver import EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler
from tests.cuda.models import Wanted
from tests.cuda.needs import needs
from tests.cuda.rows import Line, Table
from tests.support.rig import model_file
from tests.support.streamed import MIB, least as least_ram, made_small
from tests.support.tiers import first

TINY = Wanted("tiny", "Q4_0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that is emulated, and everywhere asked for little."""
    monkeypatch.setattr(measured, "MOVED", 1 << 20)
    monkeypatch.setattr(measured, "SPARE", 1 << 20)
    monkeypatch.setattr("hetrun.backends.cuda.backend.SMALL", 1 << 10)

    def make() -> Backend:
        return emulated(EmulatedDriver(256 << 20), name="cuda")

    undo = registry.register(
        Descriptor("cuda", lambda: Available("a test"), make, preference=1000, own_memory=True)
    )
    yield
    undo()


# --- lines


def test_a_bar_is_reached_from_either_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("speed", tmp_path)
    table.add(Line("fast", "tokens/s", (3.0, 1.0, 2.0), 2.0))
    table.add(Line("slow", "tokens/s", (1.0,), 2.0))
    table.add(Line("small", "MiB", (3.0,), 2.0, "most", "too large"))
    table.add(Line("read", "GB/s", (3.0,)))
    assert [line.what for line in table.missed] == ["slow", "small"]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("fast: 2 tokens/s (1 to 3, 3 samples); bar at least 2: reached; load average")
    assert "bar at most 2: MISSED; too large" in said[2]
    lines = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [(line["what"], line["reached"]) for line in lines] == [
        ("fast", True),
        ("slow", False),
        ("small", False),
        ("read", None),
    ]


def test_what_is_missing_is_said_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {need.what: need for need in needs(tmp_path)}
    assert not found["python"].missing
    assert not found["numpy"].missing
    probed = registry.backends()["cuda"].probe()
    assert found["cuda"].missing == (probed.reason if isinstance(probed, Unavailable) else "")
    assert script.main(["check", "--models", str(tmp_path)]) in (0, 1)
    assert "compute-sanitizer" in capsys.readouterr().out


# --- the best placement there is

Ways = dict[str, tuple[int, int, int]]
UNITS = st.lists(
    st.dictionaries(
        st.sampled_from(["host", "cuda", "cuda-streamed"]),
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 5)),
        min_size=1,
    ),
    min_size=1,
    max_size=5,
)


@given(UNITS, st.integers(0, 12))
@settings(max_examples=60)
def test_the_best_placement_is_the_best_of_all(units: list[Ways], room: int) -> None:
    ways: list[dict[str, Way]] = [
        {name: (float(chain), float(load), size) for name, (chain, load, size) in unit.items()}
        for unit in units
    ]
    found = []
    for placed in product(*[list(unit) for unit in ways]):
        mine = [(unit[name], name) for unit, name in zip(ways, placed, strict=True)]
        if sum(size for (_, _, size), name in mine if name == "cuda") <= room:
            found.append(max(sum(w[0] for w, _ in mine), sum(w[1] for w, _ in mine)))
    best = least(ways, {"cuda": room})
    if not found:
        assert best is None
    else:
        assert best == pytest.approx(min(found), rel=2e-3, abs=1e-9)


# --- the stages


@needs_compiler
@pytest.mark.slow
def test_everything_in_the_gpus_memory(gpu: None, tmp_path: Path) -> None:
    table = Table("speed", None)
    speed.speed(tmp_path, table, (TINY,), (BenchCase("decode", 2, 4), BenchCase("prefill", 40)), 1)
    found = {(line.what, line.unit): line for line in table.lines}
    assert found["tiny-Q4_0 tg2@4", "tokens/s"].value > 0
    assert 0 < found["tiny-Q4_0 tg2@4", "of 4.3 TB/s"].value < 1
    assert found["tiny-Q4_0 pp40", "TFLOP/s"].bar == 300
    assert found["copies over the link", "GB/s"].value > 0
    assert not list(tmp_path.iterdir()), "models go when they were measured"


@needs_compiler
@pytest.mark.slow
def test_a_model_beside_llama_cpp(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the peer ours is measured all the same, and its absence is red."""
    monkeypatch.setattr("tests.cuda.peer.built_folder", lambda: tmp_path / "nothing")
    cases = {BenchCase("decode", 2, 4, 2): 1.0, BenchCase("prefill", 40): 0.9}
    table = Table("model", None)
    one_model.model(tmp_path, table, TINY, cases, 1, spare=200 << 20)
    found = {line.what: line for line in table.lines}
    assert found["tiny-Q4_0 tg2@4, 2 sequences, fast"].value > 0
    assert found["tiny-Q4_0 pp40, fast"].value > 0
    assert found["tiny-Q4_0 pp40, fast: memory"].reached
    assert [line.what for line in table.missed] == [
        f"tiny-Q4_0 {name}: llama.cpp measured" for name in ("tg2@4, 2 sequences", "pp40")
    ]


def test_what_the_budget_has_no_time_for_is_told_and_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_model, "made", lambda models, wanted: tmp_path / "none.gguf")
    (tmp_path / "none.gguf").touch()
    given = ["model", "--budget", "0", "--only", "pp4096", "-o", str(tmp_path / "out")]
    assert script.main(given) == 1
    assert "not run: 8b-Q4_K_M pp4096" in capsys.readouterr().err
    (line,) = (tmp_path / "out/model.jsonl").read_text().splitlines()
    assert json.loads(line)["left_out"]


@needs_compiler
@pytest.mark.slow
def test_more_than_the_gpus_memory(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetrun.executor.tuning_setup.LEAST_MEASURED", 0)
    monkeypatch.setattr("hetrun.executor.autotune.measurement.model_measurement.PROBE_S", 2.0)
    table = Table("beyond", None)
    # A file of 2 MB is far too small for a GPU's driver and scratch: parts of it that are larger than it is.
    beyond.beyond(tmp_path, table, (TINY,), BenchCase("decode", 2, 4), 1, parts=(12.7,))
    found = [line.what for line in table.lines]
    what = "tiny-Q4_0 --vram 1270%"
    assert f"{what}: ours" in found
    assert f"{what}: all on the CPU" in found
    assert f"{what}: all over the link" in found
    assert any("layers on the GPU" in line for line in found)
    assert all(line.reached for line in table.lines if line.what.endswith("memory of the GPU"))


@needs_compiler
@pytest.mark.slow
def test_more_than_all_memory(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_feed, "PIECE", 64 << 10)
    table, case = Table("disk", None), BenchCase("prefill", 40)
    with made_small():
        ram = least_ram(models.made(tmp_path, TINY), ctx=case.context + 64, backends=disk.HOST) + MIB
        disk.disk(tmp_path, table, (TINY,), (case,), 1, lambda nbytes: (ram, 25 * MIB))
    found = {line.what: line for line in table.lines}
    what = "tiny-Q4_0 pp40 from disk"
    assert found[f"{what}: CPU"].value > 0
    assert found[f"{what}: GPU and CPU"].value > 0
    assert found[f"{what}: memory of the GPU"].reached


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("seed", first([1, 0, 2]))  # the first beside the reference, which hides no error
def test_random_placements(gpu: None, seed: int) -> None:
    assert 0 < placements.one(seed) <= placements.FURTHEST[placements.host(seed)]


def test_the_suite_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_a_cuda(): pass\n"
        "def test_b_cuda(): assert False\n"
        "def test_c_cuda(): pytest.skip('so')\n"
        "def test_d(): pass\n"
    )
    table = Table("conformance", None)
    conformance.conformance(table, (str(tmp_path / "test_it.py"),), "cuda")
    passed, failed, *_ = table.lines
    assert (passed.value, failed.value, passed.note) == (1, 1, "1 skipped")
    assert table.missed[0] is failed


def test_plans_by_hand_are_plans(tmp_path: Path) -> None:
    path = model_file(placements.SHAPE)
    for made in (
        measured.layer_split(path, tmp_path / "split.json", 2),
        measured.all_streamed(path, tmp_path / "all.json"),
    ):
        data = json.loads(made.read_text())
        scopes = [p["scope"] for p in data["plans"][0]["placements"]]
        assert scopes[0] == ""
        assert scopes[-1] == "output"
    assert measured.layers_of(path) == placements.SHAPE.layers
