"""`hetrun bench`: what is measured, in which order, and how it is told."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetrun.api.local_model import LocalModel
from hetrun.client.events import Event
from hetrun.config import Settings
from hetrun.errors import BackendError, HetrunError, OptionError, UserError
from hetrun.executor.stats import Stats
from hetrun.graph.quant import by_name
from hetrun.planner.precision import precision_of
from hetrun.system import entry_points
from hetrun.tools import bench
from hetrun.tools.bench import hetrun_side as ours_module, interleave, matmul_peak
from hetrun.tools.bench.cases import BenchCase, BenchOptions, numbers
from hetrun.tools.bench.hetrun_side import HetrunSide, SegmentTime, Watch, open_llm
from hetrun.tools.bench.interleave import Duel, measure
from hetrun.tools.bench.llamacpp_peer import OpenPeer, PeerOpened
from hetrun.tools.bench.memory_bandwidth import MemoryBandwidth
from hetrun.tools.bench.peer import Peer, check_peer, thread_counts
from hetrun.tools.bench.process import BenchProcess
from hetrun.tools.bench.report import COLUMNS, BenchRow, PeerResult, to_csv, to_json, to_table, with_spread
from hetrun.tools.bench.roofline import Demands, Limit, demands
from hetrun.tools.convert.gguf_writer import OutputTensor, write_model
from tests.models import tiny
from tests.models.tiny import TinyLlama

MODEL = TinyLlama("bench", layers=1, kv_heads=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(MODEL, tmp_path_factory.mktemp("bench") / "tiny.gguf")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleave, "PAUSE_S", 0.0)


# --- what is measured


@pytest.mark.parametrize(
    ("case", "name", "prompt", "context"),
    [
        (BenchCase("prefill", 512), "pp512", 512, 513),
        (BenchCase("decode", 64, 512), "tg64@512", 512, 577),
        (BenchCase("decode", 64, 0), "tg64", 1, 66),
    ],
)
def test_cases_are_named_as_llama_bench_names_them(
    case: BenchCase, name: str, prompt: int, context: int
) -> None:
    assert (case.name, case.prompt, case.context) == (name, prompt, context)


def test_the_options_give_every_combination_once() -> None:
    options = BenchOptions(prompt=(128, 512), generate=(64, 64), depth=(0, 512), batch=(1, 2))
    per_batch = ["pp128", "pp512", "tg64", "tg64@512"]
    assert [(c.name, c.batch) for c in options.cases()] == [(n, b) for b in (1, 2) for n in per_batch]
    assert [c.name for c in BenchOptions().cases()] == ["pp512", "tg64@512"]
    assert [c.name for c in BenchOptions(prompt=(0,)).cases()] == ["tg64@512"]
    assert [c.name for c in BenchOptions(generate=(0,)).cases()] == ["pp512"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"output": "xml"}, "-o must be one of table, json, csv, not 'xml'"),
        ({"rounds": 0}, "-r must be 1 or more"),
        ({"prompt": (0,), "generate": (0,)}, "nothing is left to measure"),
        ({"explain": True, "output": "csv"}, "--explain needs more room"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        BenchOptions(**options)


def test_numbers_come_alone_or_as_a_list() -> None:
    assert numbers("-p", "512") == (512,)
    assert numbers("-p", "128, 512") == (128, 512)
    assert numbers("-p", 64) == (64,)
    assert numbers("-p", [1, 2]) == (1, 2)


@pytest.mark.parametrize("text", ["", "many", "1,,2", "-1", "1e3", "99999999999"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="-p must be a number of 0 or more"):
        numbers("-p", text)


def test_prefill_reads_new_tokens_each_time_and_decode_the_same() -> None:
    prefill, decode = BenchCase("prefill", 16, 0, 2), BenchCase("decode", 4, 16, 2)
    assert prefill.prompts(100, 1).shape == (2, 16)
    assert (prefill.prompts(100, 1) == prefill.prompts(100, 1)).all()
    assert (prefill.prompts(100, 1) != prefill.prompts(100, 2)).any()
    assert (decode.prompts(100, 1) == decode.prompts(100, 2)).all()
    assert prefill.prompts(100, 1).max() < 100


# --- the order


class Side:
    """Says when it runs, and how fast it claims to be."""

    def __init__(self, name: str, log: list[str], speeds: list[float]) -> None:
        self.name, self.log, self.speeds = name, log, speeds

    def prepare(self, case: BenchCase) -> None:
        self.log.append(f"prepare {self.name}")

    def sample(self, case: BenchCase, seed: int) -> float:
        self.log.append(f"{self.name}{seed}")
        return self.speeds[seed - 1]


def test_both_sides_run_in_turn() -> None:
    log: list[str] = []
    ticks: list[int] = []

    def tick(what: str, over: bool) -> None:
        if over:
            ticks.append(len(log))

    a, b = Side("A", log, [10.0, 20.0, 30.0]), Side("B", log, [10.0, 10.0, 60.0])
    duel = measure(BenchCase("prefill", 8), 3, a, b, tick)
    assert log == ["prepare A", "prepare B", "A1", "B1", "B2", "A2", "A3", "B3"]
    assert duel == Duel((10.0, 20.0, 30.0), (10.0, 10.0, 60.0))
    # Pair by pair 1, 2 and 0.5: not the quotient of the medians, which is 2.
    assert duel.ratio == 1.0
    assert ticks == [3, 4, 5, 6, 7, 8]


def test_the_peer_runs_while_the_engine_does_nothing() -> None:
    log: list[str] = []

    def alone(work: Callable[[], float]) -> float:
        log.append("still")
        found = work()
        log.append("goes on")
        return found

    theirs = interleave.UndisturbedSide(Side("B", log, [10.0, 10.0]), alone)
    assert theirs.name == "B"
    measure(BenchCase("prefill", 8), 2, Side("A", log, [10.0, 20.0]), theirs, lambda what, over: None)
    around = [["still", said, "goes on"] for said in ("prepare B", "B1", "B2")]
    assert log == ["prepare A", *around[0], "A1", *around[1], *around[2], "A2"]


def test_alone_there_is_no_ratio() -> None:
    duel = measure(BenchCase("prefill", 8), 2, Side("A", [], [1.0, 3.0]), None, lambda what, over: None)
    assert duel == Duel((1.0, 3.0))
    assert duel.ratio is None


# --- our side


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ours_module, "perf_counter", clock)
    return clock


def test_only_the_time_in_which_all_sequences_run_counts(clock: Clock) -> None:
    stats, token = Stats(), Event("token", token=1)
    watch = Watch(stats, requests=2, tokens=4)
    first, second = watch.collector(0), watch.collector(1)
    for _ in range(5):  # the second prompt is still being read
        clock.now += 1
        first(token)
    second(token)
    assert clock.now == 105
    for _ in range(3):
        clock.now += 0.5
        stats.step(0.5, 0.4)
        first(token)
        second(token)
    watch.wait()
    assert watch.begun == 105
    assert watch.rate == pytest.approx(2 * 3 / 1.5)
    assert watch.python_share == pytest.approx(0.2)


def test_the_python_share_leaves_the_prompt_out(clock: Clock) -> None:
    stats, token = Stats(), Event("token", token=1)
    watch = Watch(stats, requests=1, tokens=4)
    on_event = watch.collector(0)
    on_event(token)
    stats.step(10.0, 10.0)  # the step that read the prompt is counted behind its token
    for _ in range(3):
        clock.now += 1
        on_event(token)
        stats.step(1.0, 0.9)
    assert watch.python_share == pytest.approx(0.1)


def test_an_error_or_a_short_answer_ends_the_measurement() -> None:
    watch = Watch(Stats(), requests=1, tokens=4)
    watch.collector(0)(Event("error", error=BackendError("broken")))
    with pytest.raises(BackendError, match="broken"):
        watch.wait()
    watch = Watch(Stats(), requests=1, tokens=4)
    watch.collector(0)(Event("token", token=1))
    watch.collector(0)(Event("done", finish_reason="length"))
    with pytest.raises(HetrunError, match="after 1 of 4 tokens"):
        watch.wait()


@pytest.mark.parametrize(
    "case", [BenchCase("prefill", 24, 0, 1), BenchCase("decode", 6, 8, 1), BenchCase("decode", 6, 8, 3)]
)
def test_the_engine_is_measured(path: Path, case: BenchCase) -> None:
    with LocalModel(path, backends=["reference"], ubatch=16) as llm:
        ours = HetrunSide(llm)
        ours.check(case)
        ours.prepare(case)
        assert [s.runs for s in ours.segments(case)] == []
        rates = [ours.sample(case, seed) for seed in (1, 2)]
        assert all(0 < rate < 1e6 for rate in rates)
        assert ours.plan(case) == "reference"
        assert ours.threads(case) >= 1
        (segment,) = ours.segments(case)
        assert (segment.segment, segment.backend) == ("model", "reference")
        assert segment.seconds > 0
        if case.kind == "decode":
            assert segment.runs >= 2 * case.tokens if case.batch == 1 else segment.runs >= case.tokens
            # The reference backend counts no native seconds: everything is Python's.
            assert ours.python_share == pytest.approx(1.0)
        else:
            assert ours.python_share is None
        # Whatever was left running was cancelled: the engine is free.
        assert llm.generate([1, 2, 3])[0].tokens


def test_what_does_not_fit_is_refused(path: Path) -> None:
    with LocalModel(path, backends=["reference"], ctx=64) as llm:
        ours = HetrunSide(llm)
        ours.check(BenchCase("decode", 31, 32))
        with pytest.raises(OptionError, match="pp64 needs a context of 65 tokens, but the model has 64"):
            ours.check(BenchCase("prefill", 64))
        with pytest.raises(OptionError, match="-b 99 is more than"):
            ours.check(BenchCase("prefill", 8, 0, 99))


def test_settings_reach_the_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETRUN_CTX", "96")
    settings = Settings.resolve(model=str(path), backends=["reference"], threads=1)
    with open_llm(settings, ubatch=8) as llm:
        assert llm.info.context == 96
        assert llm.plan.ubatch == 8
        assert llm.plan.plan(1).threads == 1
        assert llm.plan.backends == ["reference"]


def test_traffic_counts_each_weight_once_and_no_embedding(path: Path, tmp_path: Path) -> None:
    found = demands(path, "f16").traffic
    shapes = {name: (rows, cols) for name, rows, cols in tiny.weight_shapes(MODEL)}
    matrices = sum(4 * r * c for name, (r, c) in shapes.items() if name != "token_embd.weight")
    norms = 3 * MODEL.embd * 4
    assert found.weights == matrices + norms
    assert found.kv_bytes(1) == 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_dim * 2
    assert demands(path, "f32").traffic.kv_bytes(1) == 2 * found.kv_bytes(1)
    case = BenchCase("decode", 9, 100, batch=2)
    assert demands(path, "f16").of(case).nbytes == found.weights + 2 * 105 * found.kv_bytes(1)
    windowed = replace(found, kv=((8, 0), (4, 100)))
    assert Demands(windowed, None).of(case).nbytes == found.weights + 2 * (8 * 105 + 4 * 100)
    # A tied embedding is read as the head.
    tied = tiny.write_gguf(TinyLlama("tied", layers=1, kv_heads=2, tied=True), tmp_path / "tied.gguf")
    assert demands(tied, "f16").traffic.weights == found.weights


@pytest.mark.parametrize("architecture", ["llama", "nobodys"])
def test_traffic_counts_the_experts_that_a_step_reads(architecture: str, tmp_path: Path) -> None:
    n, k, width, n_ff = 8, 2, 32, 64
    shapes = {
        **{"token_embd.weight": (48, width), "output.weight": (48, width), "output_norm.weight": (width,)},
        **{f"blk.0.{part}_norm.weight": (width,) for part in ("attn", "ffn")},
        **{f"blk.0.attn_{part}.weight": (width, width) for part in ("q", "k", "v", "output")},
        "blk.0.ffn_gate_inp.weight": (n, width),
        **{f"blk.0.ffn_{part}_exps.weight": (n, n_ff, width) for part in ("gate", "up")},
        "blk.0.ffn_down_exps.weight": (n, width, n_ff),
    }
    tensors = [OutputTensor(name, shape, by_name("F32")) for name, shape in shapes.items()]
    settings = {
        "embedding_length": width,
        "block_count": 1,
        "feed_forward_length": n_ff,
        "context_length": 64,
    }
    settings |= {"attention.head_count": 1, "expert_count": n, "expert_used_count": k}
    path = tmp_path / "mixture.gguf"
    write_model(
        path,
        {"general.architecture": architecture, **{f"{architecture}.{key}": v for key, v in settings.items()}},
        tensors,
        ((i, np.zeros(t.nbytes, np.uint8)) for i, t in enumerate(tensors)),
    )
    found, experts = demands(path, "f16").traffic, 3 * n * n_ff * width * 4
    assert found.weights == sum(t.nbytes for t in tensors) - experts - tensors[0].nbytes
    # One token reads what it uses, two at most twice that, many all there is.
    assert found.weight_bytes(1) - found.weights == pytest.approx(experts * k / n)
    assert found.weight_bytes(2) - found.weights == pytest.approx(experts * (1 - (1 - k / n) ** 2))
    assert found.weight_bytes(500) == pytest.approx(found.weights + experts)
    kv = 2 * 2 * width
    step = demands(path, "f16").of(BenchCase("decode", 9, 100))
    assert step.nbytes == pytest.approx(found.weight_bytes(1) + 105 * kv)
    assert step.estimated


# --- the peer


def test_peers_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_peer("llama.cpp")
    with pytest.raises(OptionError, match=r"no 'vllm' to compare with; there is llama\.cpp"):
        check_peer("vllm")

    def nothing(name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(UserError, match=r"llama\.cpp is not installed.*pip install llama-cpp-python"):
        check_peer("llama.cpp")


@pytest.mark.parametrize(
    ("cores", "counts"),
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 3, 4, 6]), (20, [1, 2, 3, 4, 6, 8, 12, 16, 20])],
)
def test_every_promising_number_of_threads_is_tried(cores: int, counts: list[int]) -> None:
    assert thread_counts(cores) == counts


def test_llama_cpp_is_measured_and_says_what_we_say(path: Path) -> None:
    tokens = tiny.random_tokens(70)
    with Peer(path) as peer:
        assert peer.version.startswith("llama-cpp-python 0.")
        for case in (BenchCase("prefill", 24), BenchCase("decode", 4, 8), BenchCase("decode", 4, 8, batch=2)):
            peer.prepare(case)
            assert peer.threads(case) >= 1
            assert all(0 < peer.sample(case, seed) < 1e6 for seed in (1, 2))
        theirs = np.concatenate(list(peer.logits(tokens)))
        with LocalModel(path, backends=["reference"]) as llm:
            assert peer.n_vocab == llm.n_vocab
            assert np.abs(theirs - llm.logits(tokens)).max() < 0.05
    with pytest.raises(HetrunError, match=r"the process of llama\.cpp exited"):
        peer.sample(case, 1)


@pytest.mark.parametrize(("service", "repacks"), [(None, True), (lambda: True, True), (lambda: False, False)])
def test_llama_cpp_repacks_unless_that_would_be_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, service: Callable[[], bool] | None, repacks: bool
) -> None:
    sent: list[object] = []
    monkeypatch.setattr(entry_points, "named", lambda group, name: service)
    monkeypatch.setattr(BenchProcess, "send", lambda self, order: sent.append(order))
    monkeypatch.setattr(BenchProcess, "receive", lambda self, kind: PeerOpened("0", 1))
    with Peer(path) as peer:
        assert peer.repacks == repacks
    assert sent == [OpenPeer(str(path), repacks)]


def test_a_file_that_llama_cpp_refuses_is_the_users_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and nothing else")
    with pytest.raises(UserError, match=r"llama\.cpp cannot load .*broken\.gguf"):
        Peer(broken)


# --- what is told


LIMIT = Limit(400.0, "a step reads 1 MB", 1e6, MemoryBandwidth(2, 10**6, 4e8, 4e8), bound="memory")


def row(peer: PeerResult | None = None) -> BenchRow:
    return BenchRow(
        model="tiny",
        test="tg4@8",
        batch=1,
        threads=2,
        samples=(100.0, 90.0, 110.0),
        limit=LIMIT,
        plan="reference",
        peer=peer,
        ratio=1.25 if peer else None,
        load=(0.1, 0.9),
        segments=(SegmentTime("model", "reference", 2, 12, 0.009),),
        python_share=0.02,
        bucket="1",
        precision="fast",
    )


THEIRS = Limit(200.0, "a step reads 1 MB", 1e6, MemoryBandwidth(1, 10**6, 2e8, 2e8), bound="memory")
PEER = PeerResult("llama.cpp", "llama-cpp-python 0", 1, (80.0, 72.0, 88.0), limit=THEIRS)


def test_json_has_the_fields_that_were_promised() -> None:
    found = row(PEER).to_json(explain=False)
    assert found == {
        "model": "tiny",
        "test": "tg4@8",
        "batch": 1,
        "threads": 2,
        "tok_s": 100.0,
        "samples": [100.0, 90.0, 110.0],
        "limit_tok_s": 400.0,
        "plan": "reference",
        "peer": {
            "name": "llama.cpp",
            "version": "llama-cpp-python 0",
            "threads": 1,
            "tok_s": 80.0,
            "samples": [80.0, 72.0, 88.0],
            "repacking": True,
            "threads_chosen": "best",
            "limit_tok_s": 200.0,
            "of_limit": 0.4,
        },
        "ratio": 1.25,
        "load_average": {"start": 0.1, "end": 0.9},
        "of_limit": 0.25,
        "memory": {"threads": 2, "block_bytes": 10**6, "bytes_per_s": 4e8, "dram_bytes_per_s": 4e8},
        "beside": 0,
        "precision": "fast",
        "text": None,
    }
    alone, explained = row().to_json(explain=False), row().to_json(explain=True)["explain"]
    assert alone["peer"] is None
    assert alone["ratio"] is None
    assert explained["of_limit"] == 0.25
    assert explained["segments"][0]["seconds"] == 0.009
    assert json.loads(to_json([row(), row(PEER)], explain=True))[1]["peer"]["tok_s"] == 80.0


def test_csv_can_be_read_back() -> None:
    with_peer, alone = csv.DictReader(io.StringIO(to_csv([row(PEER), row()])))
    assert tuple(with_peer) == COLUMNS
    assert with_peer["peer"] == "llama.cpp"
    assert with_peer["peer_samples"] == "80 72 88"
    assert float(with_peer["ratio"]) == 1.25
    assert alone["peer"] == alone["ratio"] == ""
    assert alone["load_end"] == "0.9"
    assert (with_peer["of_limit"], with_peer["peer_limit_tok_s"]) == ("0.25", "200.0")
    assert (with_peer["peer_of_limit"], with_peer["peer_threads_chosen"]) == ("0.4", "best")
    assert (alone["of_limit"], alone["peer_of_limit"], alone["beside"]) == ("0.25", "", "0")


def test_one_sample_has_no_spread() -> None:
    assert with_spread([12.34]) == "12.3"
    assert with_spread([10.0, 12.0]) == "11.0 ± 1.0"
    assert with_spread([0.5, 0.6, 0.7], 2) == "0.60 ± 0.10"
    assert "±" not in to_table([replace(row(), samples=(100.0,))], explain=False)


def test_the_table_tells_it_to_people() -> None:
    text = to_table([row(PEER)], explain=True)
    heading, line = text.splitlines()[:2]
    ours, theirs = (
        "model test precision batch threads tokens/s of limit plan",
        "of limit threads (best) ratio",
    )
    assert heading.split() == [*ours.split(), "llama.cpp", *theirs.split()]
    assert line.split() == "tiny tg4@8 fast 1 2 100.0 ± 10.0 25% reference 80.0 ± 8.0 40% 1 1.250".split()
    assert "tg4@8, batch 1, bucket 1: a step reads 1 MB; 25% of it was reached" in text
    assert "Python's share of a step: 2.00%" in text
    assert "load average: 0.10 at the start, 0.90 at the end" in text
    assert "llama.cpp" not in to_table([row()], explain=False)
    assert "estimated" not in text
    assert ", flash attention, repacking, " in text
    plain = to_table([row(replace(PEER, repacking=False))], explain=False)
    assert ", flash attention, without repacking: its AMX code does not work here (" in plain
    assert (
        "of limit: memory gives 0.4 GB/s to 2 threads\nof limit: memory gives 0.2 GB/s to 1 thread\n" in text
    )
    assert "more than 100 %" not in text
    guessed = replace(row(), limit=Limit(400.0, "a step reads 1 MB", estimated=True))
    assert "of limit: estimated, as if the tokens of a step chose" in to_table([guessed], explain=False)


# --- everything together


Bench = Callable[..., None]


@pytest.fixture
def small(path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """`bench.main` on the tiny model, with the memory of the machine not measured for seconds."""
    monkeypatch.setattr(
        bench, "memory", lambda n, nbytes, again: MemoryBandwidth(n, int(nbytes), 2e9 * n, 1e9 * n)
    )
    monkeypatch.setattr(matmul_peak, "WIDTH", 256)
    monkeypatch.setattr(matmul_peak, "TOKENS", 16)

    def run(precision: str | None = "fast", **options: Any) -> None:  # noqa: ANN401 - those of BenchOptions
        settings = Settings.resolve(model=str(path), backends=["reference"], threads=1, precision=precision)
        chosen: dict[str, Any] = {"prompt": (16,), "generate": (4,), "depth": (8,), "rounds": 2} | options
        bench.main(settings, BenchOptions(**chosen))

    return run


def test_bench_against_llama_cpp(
    small: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "load_average", lambda: 3.0)
    small(vs="llama.cpp", output="json", explain=True)
    captured = capsys.readouterr()
    prefill, decode = json.loads(captured.out)
    assert (prefill["test"], decode["test"]) == ("pp16", "tg4@8")
    assert prefill["explain"]["bytes_per_step"] is None
    assert decode["explain"]["bytes_per_step"] > 0
    for found in (prefill, decode):
        assert found["limit_tok_s"] > 0
        explained = found["explain"]
        assert explained["peak"]["name"] == "reference on F32"
        assert f"at most {found['limit_tok_s']:.0f} tokens/s" in explained["limit"]
        assert explained["of_limit"] == pytest.approx(found["tok_s"] / found["limit_tok_s"])
        time = explained["time"]
        assert {"products", "attention", "norms", "other ops", "waiting", "Python"} == set(time["parts"])
        assert sum(p["seconds"] for p in time["parts"].values()) == pytest.approx(time["seconds"])
        assert explained["verdict"].startswith("up against ")
        assert found["model"] == "tiny"
        assert found["threads"] == 1
        assert len(found["samples"]) == len(found["peer"]["samples"]) == 2
        assert found["peer"]["name"] == "llama.cpp"
        pairs = zip(found["samples"], found["peer"]["samples"], strict=True)
        assert found["ratio"] == pytest.approx(np.median([a / b for a, b in pairs]))
    assert "the load average is 3.00" in captured.err


def test_bench_alone_says_nothing_on_stderr(
    small: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "load_average", lambda: 0.2)
    small()
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines()[2].startswith("tiny   tg4@8 ")
    assert "\nof limit: " in captured.out
    small(output="csv")
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_both_precisions_are_measured_unless_one_was_asked_for(
    small: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    small(precision=None, vs="llama.cpp", output="json", generate=(0,), rounds=2)
    first, second = json.loads(capsys.readouterr().out)
    assert first["precision"] == precision_of(None)
    assert {first["precision"], second["precision"]} == {"fast", "exact"}
    assert first["peer"] is not None
    assert second["peer"] is None
    small(precision=None, generate=(0,), rounds=2)
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:3]] == [
        first["precision"],
        second["precision"],
    ]
    small(precision=None, generate=(0,), rounds=1, output="json")  # a quick look
    (row,) = json.loads(capsys.readouterr().out)
    assert row["precision"] == first["precision"]


def test_an_unknown_peer_is_refused_before_anything_is_loaded(
    small: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "open_llm", pytest.fail)
    with pytest.raises(OptionError, match="to compare with"):
        small(vs="ollama")
