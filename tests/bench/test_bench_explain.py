"""`hetrun bench --explain`: where the time went, by arithmetic on made-up clocks and on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetrun.api.local_model import LocalModel
from hetrun.backend import Backend, Unavailable, registry
from hetrun.backend.op_profile import ACTIVITIES, Activity, ActivityTimes, activity
from hetrun.backends.llamacpp.profiler import book, fused, question_seconds
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import Cancelled
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.stats import Stats, TimeKey
from hetrun.executor.steps import Chunk, Step
from hetrun.graph import Constant, Weight
from hetrun.graph.quant import by_name
from hetrun.tools.bench import matmul_peak as peak_module
from hetrun.tools.bench.breakdown import ADVICE, Anatomy, TimePart, advice, dissect, mean, verdict
from hetrun.tools.bench.cases import BenchCase
from hetrun.tools.bench.hetrun_side import HetrunSide, SegmentTime
from hetrun.tools.bench.matmul_peak import Peak, measure_peak, multiplier, square
from hetrun.tools.bench.memory_bandwidth import MemoryBandwidth
from hetrun.tools.bench.report import BenchRow, to_table
from hetrun.tools.bench.roofline import Arithmetic, LayerAttention, Limit, RooflineDemand, demands, limit_of
from hetrun.tools.bench.timed_window import BackendSeconds, TimedWindow, WindowSeconds
from tests.models import tiny
from tests.models.tiny import TinyLlama
from tests.support.nulldevice import NullDevice
from tests.support.tiers import exhaustive

DEEP = 1500
NEEDS_AMX = pytest.mark.skipif(
    isinstance(registry.backends()["amx"].probe(), Unavailable), reason="the amx backend cannot work here"
)
MODEL = TinyLlama("explained", layers=2, kv_heads=2, context=DEEP + 100)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(MODEL, tmp_path_factory.mktemp("explain") / "tiny.gguf")


def spent(looking: float = 0.0, **seconds: float) -> ActivityTimes:
    found = ActivityTimes()
    found.looking = looking
    for name, s in seconds.items():
        what: dict[str, Activity] = {a: a for a in ACTIVITIES}
        found.add(what[name], s)
    return found


# --- the nodes of a ggml graph


def test_nodes_get_the_time_from_the_answer_before_them_to_the_question_behind_them() -> None:
    found = ActivityTimes()
    nodes = ["RMS_NORM", "MUL", "MUL_MAT", "ROPE", "SET_ROWS", "FLASH_ATTN_EXT", "ADD"]
    # A norm with the product behind it is asked about once; each answer takes a hundredth.
    asked = [1.0, 3.0, 3.5, 4.5, 7.5, 8.0]
    book(found, nodes, 0.0, [(t, t + 0.01) for t in asked], 8.21)
    assert found.seconds == pytest.approx(
        {
            "norms": 1.0,
            "products": 2.0 - 0.01,
            "attention": 4.0 - 0.02,
            # The last node gets the time until all threads are done.
            "other": 0.5 - 0.01 + 0.5 - 0.01 + 0.2,
        }
    )
    assert found.looking == pytest.approx(0.06)
    assert found.total + found.looking == pytest.approx(8.21)


def test_what_a_question_takes_is_no_nodes_time() -> None:
    found = ActivityTimes()
    book(found, ["MUL_MAT", "ADD"], 0.0, [(1.0, 1.5), (1.6, 2.0)], 2.0, question=0.25)
    # The second node cannot have been there for less than no time.
    assert found.seconds == pytest.approx({"products": 0.75, "other": 0, "attention": 0, "norms": 0})
    assert found.looking == pytest.approx(0.25 + 0.5 + 0.1 + 0.4)
    assert 0 <= question_seconds() < 0.01


def test_a_run_whose_nodes_are_not_understood_books_nothing() -> None:
    found = ActivityTimes()
    book(found, ["RMS_NORM", "MUL", "MUL_MAT"], 0.0, [(1.0, 1.0)], 2.0)  # it was stopped
    book(found, [], 0.0, [], 2.0)
    assert found.total == found.looking == 0.0
    # A ggml that fuses nothing asks after every node.
    book(found, ["RMS_NORM", "MUL", "MUL_MAT"], 0.0, [(1.0, 1.0), (2.0, 2.0), (5.0, 5.0)], 5.0)
    assert (found.seconds["norms"], found.seconds["products"]) == (2.0, 3.0)


def test_only_a_norm_and_the_product_right_behind_it_are_one() -> None:
    assert fused(["RMS_NORM", "MUL", "MUL", "NORM", "MUL"]) == ["RMS_NORM", "MUL", "NORM", "MUL"]
    assert fused(["MUL", "RMS_NORM", "ADD"]) == ["MUL", "RMS_NORM", "ADD"]


def test_every_kind_of_op_is_booked_as_something() -> None:
    assert [activity(k) for k in ("linear", "head", "moe")] == ["products"] * 3
    assert [activity(k) for k in ("rms_norm", "layer_norm")] == ["norms"] * 2
    assert activity("attention") == "attention"
    assert activity("rope") == activity("what comes next year") == "other"


# --- the arithmetic of shares


def test_what_was_seen_are_shares_of_what_was_measured() -> None:
    measured = WindowSeconds(total=10.0, inside={"a": 8.0}, waited=0.5, idle=0.5)
    looked = BackendSeconds({"a": 17.0}, {"a": spent(1.0, products=8.0, attention=4.0, norms=2.0)})
    found = dissect("prompt", measured, looked)
    # A run that was looked at took 16 without the looking, of which 14 went into ops: the rest is Python's.
    assert {p.name: p.seconds for p in found.parts} == pytest.approx(
        {
            "products": 4.0,
            "attention": 2.0,
            "norms": 1.0,
            "other ops": 0.0,
            "waiting": 1.0,
            "Python": 1.0 + 1.0,
        }
    )
    assert found.seconds == pytest.approx(10.0)
    assert found.share("products") == pytest.approx(0.4)


def test_a_backend_that_shows_nothing_is_a_part_of_its_own() -> None:
    measured = WindowSeconds(10.0, {"dark": 3.0, "clear": 6.0})
    found = dissect(
        "step", measured, BackendSeconds({"clear": 1.0}, {"clear": spent(products=1.0), "dark": spent()})
    )
    assert found.of("inside dark") == pytest.approx(3.0)
    assert found.of("products") == pytest.approx(6.0)
    assert found.of("Python") == pytest.approx(1.0)


seconds = st.floats(0, 1e3)


@given(seconds, seconds, seconds, seconds, seconds, seconds, seconds, seconds)
def test_the_parts_always_add_up(
    total: float, a: float, b: float, waited: float, idle: float, took: float, product: float, looking: float
) -> None:
    measured = WindowSeconds(total, {"a": a, "b": b}, waited, idle)
    found = dissect("step", measured, BackendSeconds({"a": took}, {"a": spent(looking, products=product)}))
    assert all(p.seconds >= 0 for p in found.parts)
    assert found.seconds == pytest.approx(total, abs=1e-6)


def test_samples_are_averaged() -> None:
    found = mean([WindowSeconds(1.0, {"a": 1.0}), WindowSeconds(3.0, {"b": 1.0}, 2.0, 4.0)])
    assert found == WindowSeconds(2.0, {"a": 0.5, "b": 0.5}, 1.0, 2.0)


class Beside(NullDevice):
    """As a device that works by itself looks from outside."""

    asynchronous = True


def test_a_stretch_counts_what_the_engines_thread_did() -> None:
    stats = Stats()
    backends: dict[str, Backend] = {"here": NullDevice("here"), "beside": Beside("beside")}
    here = stats.record(TimeKey("model", "here", "1", 1))
    beside = stats.record(TimeKey("model", "beside", "1", 1))
    here.add(1, 5.0)
    stretch = TimedWindow(stats, backends, look=True)
    stretch.begin()
    assert [b.spent is None for b in backends.values()] == [False, True]
    here.add(1, 2.0)
    beside.add(1, 9.0)  # most of it while this thread did something else
    stats.wait_seconds += 3.0
    stretch.end()
    assert all(b.spent is None for b in backends.values())
    assert stretch.inside == {"here": 2.0}
    assert stretch.waited == 3.0


# --- demands and limits


@given(st.integers(1, 40), st.integers(0, 45))
def test_attention_of_a_prompt_is_that_of_its_tokens(tokens: int, window: int) -> None:
    each = [LayerAttention(4, window, "tokens").per_step(i + 1) for i in range(tokens)]
    assert LayerAttention(4, window, "tokens").per_prompt(tokens) == sum(each)
    assert LayerAttention(4, window, "wanted").per_prompt(tokens) == each[-1]


def test_products_are_counted_once_for_each_row_that_needs_them(path: Path) -> None:
    shapes = {name: (rows, cols) for name, rows, cols in tiny.weight_shapes(MODEL)}
    model = demands(path, "f16")
    assert isinstance(model.arithmetic, Arithmetic)
    everything = sum(2 * r * c for name, (r, c) in shapes.items() if name != "token_embd.weight")
    step = model.of(BenchCase("decode", 9, 100, batch=2))
    assert step.tokens == 2
    assert step.products == 2 * everything
    heads = MODEL.layers * MODEL.heads * MODEL.head_dim
    assert step.attention == 2 * 4 * heads * 105
    # Behind the last layer's keys and values only the last token of a prompt goes on.
    prompt = model.of(BenchCase("prefill", 10))
    last = f"blk.{MODEL.layers - 1}."
    only_last = [n for n in shapes if n == "output.weight" or (n.startswith(last) and "_k." not in n)]
    only_last = [n for n in only_last if "_v." not in n]
    wanted = sum(2 * r * c for n, (r, c) in shapes.items() if n in only_last)
    assert prompt.products is not None
    assert prompt.products >= 10 * (everything - wanted) + wanted
    assert prompt.products <= 10 * everything
    assert prompt.tokens == 10
    assert prompt.nbytes == model.traffic.weights + model.traffic.kv_bytes(10)


GIGA = 1e9
PEAK = Peak("fast", "Q4_0", "bf16", 2, 1000 * GIGA)
MEMORY = MemoryBandwidth(2, 10**9, 10 * GIGA, 10 * GIGA)


def demand(tokens: int, products: float | None = None, attention: float | None = None) -> RooflineDemand:
    return RooflineDemand(tokens, 0.9 * GIGA, 0.1 * GIGA, products, attention)


def test_a_step_is_up_against_memory_and_a_prompt_against_products() -> None:
    step = limit_of(BenchCase("decode", 4), demand(1, GIGA, GIGA), MEMORY, PEAK)
    assert (step.tok_s, step.bound, step.bytes_per_step) == (10.0, "memory", GIGA)
    assert step.why == (
        "a step reads 954 MiB (858 MiB of weights, the rest keys and values) and memory gives 10.0 GB/s "
        "to 2 threads: at most 10 tokens/s"
    )
    prompt = limit_of(BenchCase("prefill", 100), demand(100, 400 * GIGA, 100 * GIGA), MEMORY, PEAK)
    assert (prompt.tok_s, prompt.bound, prompt.bytes_per_step) == (200.0, "products", None)
    assert prompt.why == (
        "the prompt takes 400.00 GFLOP in products and 100.00 in attention, and fast in bf16 multiplies "
        "large matrices at 1000 GFLOP/s with 2 threads: at most 200 tokens/s"
    )
    short = limit_of(BenchCase("prefill", 2, batch=3), demand(6, 6 * GIGA, 0.0), MEMORY, PEAK)
    assert (short.tok_s, short.bound) == (60.0, "memory")
    assert short.why.startswith("a batch of 3 prompts reads 954 MiB")
    many = limit_of(BenchCase("decode", 4, batch=500), demand(500, 500 * GIGA, 0.0), MEMORY, PEAK)
    assert (many.tok_s, many.bound, many.bytes_per_step) == (1000.0, "products", GIGA)


@pytest.mark.parametrize(("products", "peak"), [(None, PEAK), (GIGA, None), (None, None)])
def test_without_a_peak_a_step_has_its_memory_and_a_prompt_nothing(
    products: float | None, peak: Peak | None
) -> None:
    step = limit_of(BenchCase("decode", 4), demand(1, products), MEMORY, peak)
    assert (step.tok_s, step.bound) == (10.0, "memory")
    prompt = limit_of(BenchCase("prefill", 4), demand(4, products), MEMORY, peak)
    assert (prompt.tok_s, prompt.bound) == (None, None)
    assert "could not be measured" in prompt.why


# --- how fast products are at their best


def test_the_large_matrix_has_the_blocks_of_the_weight() -> None:
    quant = by_name("Q8_0")
    raw = np.arange(96 * quant.row_bytes(64), dtype=np.int64).astype(np.uint8)
    weight = Weight("w", (96, 64), quant, (Constant(raw.tobytes(), 96),))
    small, large = square(weight, 32), square(weight, 128)
    assert small.shape == (32, 32)
    assert large.shape == (128, 128)
    assert large.nbytes == 128 * quant.row_bytes(128)
    for found in (small, large):
        (part,) = found.parts
        assert isinstance(part, Constant)
        assert part.data == (raw.tobytes() * 3)[: found.nbytes]


@pytest.mark.parametrize("backend", ["reference", "llamacpp"])
def test_the_peak_is_measured_on_what_makes_the_products(
    backend: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak_module, "WIDTH", 256)
    monkeypatch.setattr(peak_module, "TOKENS", 16)
    with LocalModel(path, backends=[backend], threads=1) as llm:
        most = multiplier(llm.plan.plan(1).segments)
        assert most is not None
        assert (most.backend, most.weight.quant.name) == (backend, "F32")

        def measure(loaded: LoadedModel) -> Peak:
            assert isinstance(loaded.model, PlannedModel)
            found = loaded.model.backends[backend]
            result = measure_peak(found, most.weight, 1)
            assert found.spent is None
            return result

        peak = llm.call(measure)
        assert peak.name == f"{backend} on F32"
        assert 1e6 < peak.rate < 1e15
        ours = HetrunSide(llm)
        assert ours.peak(BenchCase("prefill", 8)) is ours.peak(BenchCase("decode", 8))
        assert llm.generate([1, 2, 3])[0].tokens  # it still runs


def test_without_products_there_is_no_multiplier() -> None:
    assert multiplier([]) is None


# --- on a tiny model


def looked_at(model: PlannedModel, backend: str, depth: int) -> ActivityTimes:
    """What one token after `depth` others takes: the best of several steps, activity by activity."""
    tokens, last = np.ones(depth, np.int64), np.zeros(1, np.int64)
    seq, best = model.alloc(), ActivityTimes()
    best.seconds = dict.fromkeys(ACTIVITIES, float("inf"))
    model.step(Step((Chunk(seq, tokens, np.zeros(0, np.int64)),)))
    for _ in range(12):
        found, before = ActivityTimes(), model.native_seconds
        model.backends[backend].watch(found)
        model.step(Step((Chunk(seq, tokens[:1], last),)))
        model.backends[backend].watch(None)
        if backend == "llamacpp":
            # All that happens inside ggml is booked, and nothing else is.
            native = model.native_seconds - before
            assert 0 < found.total + found.looking <= native
        best.seconds = {a: min(s, found.seconds[a]) for a, s in best.seconds.items()}
        model.truncate(seq, depth)
    model.free(seq)
    return best


@pytest.mark.parametrize("backend", ["reference", "llamacpp"])
def test_attention_grows_with_depth_and_products_do_not(backend: str, path: Path) -> None:
    def work(loaded: LoadedModel) -> tuple[ActivityTimes, ActivityTimes]:
        assert isinstance(loaded.model, PlannedModel)
        return looked_at(loaded.model, backend, 4), looked_at(loaded.model, backend, DEEP)

    with LocalModel(path, backends=[backend], threads=1) as llm:
        shallow, deep = llm.call(work)
    assert all(s > 0 for s in shallow.seconds.values())
    growth = {a: deep.seconds[a] / shallow.seconds[a] for a in ACTIVITIES}
    assert growth["attention"] > 2
    assert growth["attention"] > 2 * growth["products"]


def test_a_run_that_is_looked_at_can_be_cancelled(path: Path) -> None:
    def work(loaded: LoadedModel) -> ActivityTimes:
        model, found, seq = loaded.model, ActivityTimes(), loaded.model.alloc()
        assert isinstance(model, PlannedModel)
        step = Step((Chunk(seq, np.ones(4, np.int64), np.array([3])),))
        model.backends["llamacpp"].watch(found)
        model.cancel()
        with pytest.raises(Cancelled):
            model.step(step)
        model.rearm()
        assert found.total == 0.0
        model.step(step)
        model.backends["llamacpp"].watch(None)
        total = found.total
        model.step(step)
        assert found.total == total > 0.0
        return found

    with LocalModel(path, backends=["llamacpp"], threads=1) as llm:
        llm.call(work)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("reference", BenchCase("prefill", 24)),
        ("llamacpp", BenchCase("decode", 6, 8)),
        ("libllama", BenchCase("decode", 6, 8)),
        ("llamacpp", BenchCase("prefill", 8, batch=2)),
        pytest.param("llamacpp", BenchCase("prefill", 24), marks=exhaustive),
        pytest.param("reference", BenchCase("decode", 6, 8), marks=exhaustive),
        pytest.param("llamacpp", BenchCase("decode", 6, 8, batch=2), marks=exhaustive),
        pytest.param("amx", BenchCase("prefill", 24), marks=NEEDS_AMX),
    ],
)
def test_the_parts_are_the_whole_time(backend: str, case: BenchCase, path: Path) -> None:
    with LocalModel(path, backends=[backend], ctx=64, ubatch=16, threads=1) as llm:
        ours = HetrunSide(llm, look=True)
        ours.prepare(case)
        rates = [ours.sample(case, seed) for seed in (1, 2)]
        found = ours.anatomy(case)
        tokens = case.batch * (case.tokens if case.kind == "prefill" else 1)
        # The mean of the times of a prompt or a step: the median is of rates.
        assert found.seconds == pytest.approx(np.mean([tokens / r for r in rates]), rel=1e-6)
        assert found.unit == ("prompt" if case.kind == "prefill" else "step")
        names = [p.name for p in found.parts]
        assert names[-2:] == ["waiting", "Python"]
        if backend == "libllama":
            assert found.of("inside libllama") > 0
            assert ours.peak(case) is None
        else:
            assert all(found.of(name) > 0 for name in ("products", "attention", "norms", "other ops"))
            assert not any(name.startswith("inside") for name in names)


# --- what is told


def anatomy(unit: Literal["prompt", "step"], **parts: float) -> Anatomy:
    return Anatomy(unit, tuple(TimePart(name.replace("_", " "), s) for name, s in parts.items()))


def limit(bound: Literal["memory", "products"]) -> Limit:
    needed = demand(1, GIGA, GIGA) if bound == "memory" else demand(100, 400 * GIGA, 100 * GIGA)
    return Limit(10.0, "because", memory=MEMORY, bound=bound, demand=needed, peak=PEAK)


def test_the_sentence_says_what_most_of_the_time_is_up_against() -> None:
    prompt = anatomy("prompt", products=0.8, attention=0.2, norms=0.01, other_ops=0.09, Python=0.01)
    assert verdict(prompt, limit("products")) == (
        "up against products: products are 72%, and run at 50% of the peak of fast in bf16 "
        "(500 of 1000 GFLOP/s); attention is 18% (500 GFLOP/s); other ops are 8%"
    )
    step = anatomy("step", products=0.1, attention=0.02, waiting=0.005)
    assert verdict(step, limit("memory")) == (
        "up against memory: products are 80%, and read weights at 90% of what memory gives "
        "(9.0 of 10.0 GB/s); attention is 16% (5.0 GB/s of keys and values); waiting is 4%"
    )
    # Who reads at a tenth of what memory gives is not held up by memory.
    slow = anatomy("step", products=0.9, attention=0.02)
    assert verdict(slow, limit("memory")).startswith("up against products: products are 98%, and read")
    python = anatomy("step", products=0.1, inside_dark=0.2, Python=0.7)
    assert verdict(python, Limit(None, "")) == (
        "up against Python: products are 10%; inside dark is 20%; Python is 70%"
    )
    assert verdict(anatomy("step"), Limit(None, "")) == "nothing was measured"


def explained(
    segments: tuple[SegmentTime, ...], batch: int = 1, load: tuple[float, float] = (0.0, 0.0)
) -> str:
    row = BenchRow(
        model="tiny",
        test="pp100",
        batch=batch,
        threads=2,
        samples=(5.0,),
        limit=limit("products"),
        plan="fast",
        peer=None,
        ratio=None,
        load=load,
        segments=segments,
        anatomy=anatomy("prompt", products=0.75, attention=0.25, Python=0.0),
        bucket="65-256",
    )
    return to_table([row], explain=True)


def test_beside_other_programs_the_conclusion_says_so() -> None:
    last = explained((), load=(3.0, 3.1)).splitlines()[-1]
    assert last.startswith("other programs ran as well (load average 3.00)")


def test_a_block_has_bars_segments_and_the_sentence() -> None:
    lines = explained((SegmentTime("model", "fast", 2, 3, 0.9),)).splitlines()
    at = lines.index("pp100, batch 1, bucket 65-256: because; 50% of it was reached")
    assert [line.split() for line in lines[at + 1 : at + 5]] == [
        ["one", "prompt", "1000.000", "ms", "100%"],
        ["products", "750.000", "ms", "75%", "█" * 22],
        ["attention", "250.000", "ms", "25%", "█" * 8],
        ["Python", "0.000", "ms", "0%"],
    ]
    assert lines[at + 6].split() == ["model", "fast", "2", "3", "900.000", "100%"]
    assert lines[at + 7].startswith("  up against products: ")
    assert "  4 prompts  1000.000 ms" in explained((), batch=4)


def test_the_last_line_says_what_limits_it_and_what_would_be_faster() -> None:
    last = explained((SegmentTime("model", "fast", 2, 3, 0.9),)).splitlines()[-1]
    assert last == f"pp100: {ADVICE['products'].text}"
    assert last.startswith("pp100: arithmetic limits it; faster with a smaller model")
    reading = anatomy("step", products=0.1, Python=0.02)
    assert advice(reading, limit("memory")) == ADVICE["memory"]
    assert advice(anatomy("step", products=0.1, dark=0.9), limit("memory")) is None


def test_many_segments_of_one_kind_are_told_together() -> None:
    blocks = [
        SegmentTime(f"blk.{i}.{part}", "fast", 2, 3, 0.01) for i in range(9) for part in ("attn", "ffn")
    ]
    text = explained((SegmentTime("embed", "slow", 1, 3, 0.5), *blocks))
    table: list[Any] = [line.split() for line in text.splitlines() if "of them" in line]
    assert table == [
        ["blk.N.attn", "(9", "of", "them)", "fast", "2", "3", "90.000", "13%"],
        ["blk.N.ffn", "(9", "of", "them)", "fast", "2", "3", "90.000", "13%"],
    ]
    assert sum("embed" in line for line in text.splitlines()) == 1
