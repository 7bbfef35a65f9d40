"""Whole models on a library of the test's own: sequences, what is taken back, what is asked of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from numpy.typing import NDArray

from hetrun.backend import Available, Backend, Descriptor, Floats, Ints, Unavailable, registry
from hetrun.backend.library_model import LibraryBackend, WholeSetup
from hetrun.errors import BackendUnavailable, BudgetError, Cancelled, ModelFileError, OptionError
from hetrun.executor.library.model import WholeModel, cut
from hetrun.executor.loading import memory_estimates
from hetrun.executor.loading.memory_estimates import HELPER
from hetrun.executor.plan_prediction import predict_plans
from hetrun.executor.planned_model import open_planned
from hetrun.loader.open_model import open_model
from hetrun.memory.ledger import Figures
from hetrun.planner.options import Options, Wishes
from hetrun.system import entry_points
from tests.models import cases, foreign
from tests.support.rig import model_file, step

N_VOCAB = 11


class Summing:
    """A library whose logits are sums over all that a sequence holds, so that a wrong token shows for ever.

    With `state` it cannot cut a sequence and loses everything by an error, as llama.cpp does with mamba.
    """

    n_vocab = N_VOCAB
    native_seconds = 0.0

    def __init__(self, setup: WholeSetup, state: bool = False) -> None:
        self.setup = setup
        self.state = state
        self.held: dict[int, list[tuple[int, int]]] = {i: [] for i in range(setup.sequences + 1)}
        self.runs: list[int] = []  # tokens of each
        self.fail_in = -1  # runs until one fails, halfway
        self.stopped = self.closed = False

    def run(self, tokens: Ints, positions: Ints, sequences: Ints, wanted: NDArray[np.bool_]) -> Floats:
        assert len(tokens) <= self.setup.ubatch
        assert wanted.sum() <= self.setup.wanted
        self.runs.append(len(tokens))
        self.fail_in -= 1
        rows = []
        for i, (t, p, s, w) in enumerate(zip(tokens, positions, sequences, wanted, strict=True)):
            if self.fail_in == 0 and 2 * i >= len(tokens):
                raise Cancelled("stopped in the middle")
            assert p == len(self.held[int(s)])
            self.held[int(s)].append((int(t), int(p)))
            if w:
                rows.append(expected([t for t, _ in self.held[int(s)]]))
        return np.array(rows, np.float32).reshape(-1, N_VOCAB)

    def recover(self) -> bool:
        if self.state:
            self.held = {i: [] for i in self.held}
        return not self.state

    def copy(self, source: int, target: int) -> None:
        assert not self.held[target]
        self.held[target] = self.held[source].copy()

    def cut(self, seq: int, n: int) -> bool:
        kept = n if not self.state or n == len(self.held[seq]) else 0
        del self.held[seq][kept:]
        return kept == n

    def cancel(self) -> None:
        self.stopped = True

    def rearm(self) -> None:
        self.stopped = False

    def close(self) -> None:
        self.closed = True


def expected(tokens: Sequence[int]) -> Floats:
    """The logits behind some tokens."""
    return np.array(
        [sum((i + 1) * (t + k) for i, t in enumerate(tokens)) for k in range(N_VOCAB)], np.float32
    )


class Library:
    """A backend for whole models that is registered while a test runs."""

    def __init__(self, state: bool) -> None:
        self.state = state
        self.opened: list[Summing] = []

    def descriptor(self, name: str, works: bool = True) -> Descriptor:
        def create() -> Backend:
            raise AssertionError("it takes no segments")

        def probe() -> Available | Unavailable:
            return Available("for a test") if works else Unavailable("it is not installed")

        whole = LibraryBackend(
            lambda paths, setup, progress: self._open(setup), ("what this library does not do",)
        )
        return Descriptor(name, probe, create, "a test", preference=-100, whole=whole)

    def _open(self, setup: WholeSetup) -> Summing:
        self.opened.append(Summing(setup, self.state))
        return self.opened[-1]


@pytest.fixture(params=[False, True], ids=["keys-and-values", "state"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """The only library for whole models."""
    with monkeypatch.context() as patch:
        patch.setattr(entry_points, "_points", dict)
        found = Library(request.param)
        remove = registry.register(found.descriptor("summing"))
        yield found
        remove()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign.write(foreign.GPT2, tmp_path_factory.mktemp("foreign") / "gpt2.gguf")


def open_whole(path: Path, **given: Any) -> WholeModel:  # noqa: ANN401
    model = open_planned(open_model(path), options(**given))
    assert isinstance(model, WholeModel)
    return model


def options(ubatch: int | None = 8, **given: Any) -> Options:  # noqa: ANN401
    wishes = {k: given.pop(k) for k in ("deterministic", "plan", "threads") if k in given}
    return replace(Options(Wishes(ubatch=ubatch, **wishes)), **given)


def logits(tokens: Sequence[int], wanted: Sequence[int]) -> Floats:
    return np.array([expected(tokens[: i + 1]) for i in wanted])


# --- sequences and steps


def test_steps_of_several_sequences_are_cut_to_what_the_library_takes(library: Library, gpt2: Path) -> None:
    model = open_whole(gpt2)
    a, b, c = (model.alloc() for _ in range(3))
    texts = {a: [1, 2, 3], b: list(range(21)), c: [9]}
    rows = model.step(step((a, texts[a], [2]), (b, texts[b], [0, 19, 20]), (c, texts[c], [0])))
    assert np.array_equal(
        rows, np.concatenate([logits(texts[s], w) for s, w in ((a, [2]), (b, [0, 19, 20]), (c, [0]))])
    )
    (opened,) = library.opened
    assert opened.runs == [8, 8, 8, 1]
    assert [model.length(s) for s in (a, b, c)] == [3, 21, 1]
    assert [(k.segment, k.backend, k.bucket) for k, _ in model.stats] == [
        ("everything", "summing", "5-8"),
        ("everything", "summing", "1"),
    ]
    assert model.step(step((a, [4], []), (b, [5], []))).shape == (0, N_VOCAB)
    assert np.array_equal(model.step(step((a, [7], [0]))), logits([1, 2, 3, 4, 7], [4]))
    model.close()
    assert opened.closed


def test_more_wanted_rows_than_the_library_gives_at_once(library: Library, gpt2: Path) -> None:
    model = open_whole(gpt2, ubatch=100)
    text = list(range(60))
    assert np.array_equal(model.step(step((model.alloc(), text, range(60)))), logits(text, range(60)))
    assert library.opened[0].runs == [25, 25, 10]


def test_where_a_batch_is_cut() -> None:
    flags = np.array([1, 1, 0, 1, 0, 0, 0, 1], np.bool_)
    assert list(cut(flags, 8, 8)) == [(0, 8)]
    assert list(cut(flags, 3, 8)) == [(0, 3), (3, 6), (6, 8)]
    assert list(cut(flags, 8, 1)) == [(0, 1), (1, 3), (3, 7), (7, 8)]
    assert list(cut(flags, 4, 2)) == [(0, 3), (3, 7), (7, 8)]
    assert list(cut(flags[:0], 4, 2)) == []


def test_forked_cut_and_continued(library: Library, gpt2: Path) -> None:
    model = open_whole(gpt2)
    text = list(range(1, 20))
    parent = model.alloc()
    model.step(step((parent, text[:12], [])))
    model.step(step((parent, [3, 3, 3], [2])))
    model.truncate(parent, 12)
    child = model.fork(parent)
    assert model.length(child) == model.length(parent) == 12
    rows = model.step(step((parent, [8] * 7, [6]), (child, text[12:], [6])))
    assert np.array_equal(rows, [expected(text[:12] + [8] * 7), expected(text)])
    model.truncate(child, 5)
    model.free(parent)
    again = model.fork(child)
    assert np.array_equal(model.step(step((again, [2], [0]))), [expected([*text[:5], 2])])
    model.truncate(again, 0)
    assert np.array_equal(model.step(step((again, [2], [0]))), [expected([2])])
    with pytest.raises(ValueError, match="cannot be cut to 9"):
        model.truncate(child, 9)


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_step_that_fails_leaves_every_sequence_as_it_was(library: Library, gpt2: Path, fails: int) -> None:
    model = open_whole(gpt2)
    a, b, bystander = (model.alloc() for _ in range(3))
    model.step(step((a, [1, 2, 3], []), (bystander, [6, 7], [])))
    library.opened[0].fail_in = fails
    with pytest.raises(Cancelled):
        model.step(step((a, list(range(10)), [9]), (b, list(range(9)), [8])))
    assert [model.length(s) for s in (a, b, bystander)] == [3, 0, 2]
    rows = model.step(step((b, [5], [0]), (bystander, [8], [0]), (a, [4], [0])))
    assert np.array_equal(rows, [expected([5]), expected([6, 7, 8]), expected([1, 2, 3, 4])])


def test_there_is_room_for_one_sequence_more_than_run_together(library: Library, gpt2: Path) -> None:
    model = open_whole(gpt2)
    taken = [model.alloc() for _ in range(model.max_sequences + 1)]
    assert len(set(taken)) == model.max_sequences + 1 == 5
    with pytest.raises(BudgetError, match="room for 4 sequences"):
        model.alloc()
    with pytest.raises(BudgetError, match="room for 4 sequences"):
        model.fork(taken[0])
    model.free(taken[2])
    assert model.alloc() == taken[2]


def test_a_sequence_ends_at_the_context(library: Library, gpt2: Path) -> None:
    model = open_whole(gpt2, ctx=10)
    seq = model.alloc()
    model.step(step((seq, list(range(9)), [])))
    with pytest.raises(BudgetError, match=r"up to 10 tokens here; ask for more with --ctx"):
        model.step(step((seq, [1, 2], [1])))
    assert model.length(seq) == 9
    assert model.step(step((seq, [1], [0]))).shape == (1, N_VOCAB)


def test_cancel_and_rearm_reach_the_library(library: Library, gpt2: Path) -> None:
    model = open_whole(gpt2)
    model.cancel()
    assert library.opened[0].stopped
    model.rearm()
    assert not library.opened[0].stopped


# --- which backend


def test_a_known_architecture_is_planned_unless_the_library_is_asked_for(library: Library) -> None:
    source = open_model(model_file(cases.GQA))
    with pytest.raises(OptionError):  # here no backend is left that could be planned with
        predict_plans(source, options(backends=("reference",)))
    assert (
        predict_plans(source, options(backends=("summing",))).plan(1).segments[0].why == "asked for by name"
    )
    assert not library.opened


def test_with_others_it_is_refused(library: Library, gpt2: Path) -> None:
    remove = registry.register(Descriptor("other", lambda: Available(""), lambda: pytest.fail("made")))
    try:
        assert registry.choose(None) == ["other"]
        assert registry.choose(["summing"]) == ["summing"]
        with pytest.raises(
            OptionError, match=r"^summing runs whole models and cannot be combined with other backends"
        ):
            predict_plans(open_model(gpt2), options(backends=("other", "summing")))
        with pytest.raises(ModelFileError, match=r"so other cannot run it; only --backend summing can$"):
            predict_plans(open_model(gpt2), options(backends=("other",)))
    finally:
        remove()


def test_without_a_library_that_works_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, gpt2: Path) -> None:
    monkeypatch.setattr(entry_points, "_points", dict)
    remove = registry.register(Library(False).descriptor("missing", works=False))
    try:
        with pytest.raises(ModelFileError, match=r"missing, which might .* cannot work here: it is not inst"):
            predict_plans(open_model(gpt2), options())
        with pytest.raises(BackendUnavailable, match="missing cannot work here: it is not installed"):
            predict_plans(open_model(gpt2), options(backends=("missing",)))
    finally:
        remove()


# --- what is promised, and what it takes


def test_a_vision_tower_is_no_model(library: Library, tmp_path: Path) -> None:
    path = tmp_path / "mmproj-model.gguf"
    writer = GGUFWriter(path, "clip")
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="it is a model's vision tower"):
        predict_plans(open_model(path), options())


def test_the_plan_says_what_is_off(library: Library, gpt2: Path) -> None:
    plans = predict_plans(open_model(gpt2), options(ubatch=None, threads=3))
    assert {(s.name, s.backend, s.why) for p in plans.plans.values() for s in p.segments} == {
        ("everything", "summing", "hetrun has no architecture 'gpt2'")
    }
    assert plans.promises_off[-1] == "what this library does not do"
    assert "4 sequences of 256 tokens" in plans.promises_off[0]
    assert {p.threads for p in plans.plans.values()} == {3}
    text = plans.to_text()
    assert "    all  everything             summing" in text
    assert text.count("not promised: ") == 2
    layers, width = foreign.LAYERS, foreign.EMBD
    assert plans.memory["KV, estimated"] == 4 * 256 * layers * 2 * width * 2
    assert plans.memory["weights, estimated"] == gpt2.stat().st_size


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"deterministic": True}, "--deterministic"),
        ({"plan": Path("p.json")}, "--plan"),
        ({"streaming": "none"}, "--streaming none"),
    ],
)
def test_what_cannot_be_had_is_refused(library: Library, gpt2: Path, wish: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        predict_plans(open_model(gpt2), options(**wish))


def test_its_budget_stays(library: Library, gpt2: Path) -> None:
    model = open_whole(gpt2)
    with pytest.raises(OptionError, match="summing holds the whole model; open it again with another --ram"):
        model.set_ram(1 << 30)
    assert model.streaming() is None
    model.close()


def test_memory_decides_how_many_sequences_there_are(
    library: Library, gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetrun.executor.library.plan.besides", lambda entries: 90 << 20)
    fixed = sum(predict_plans(open_model(gpt2), options()).memory.values())
    kv = predict_plans(open_model(gpt2), options()).memory["KV, estimated"]
    at_rest, one = fixed - kv + (90 << 20) + HELPER, kv // 4

    def first_promise(ram: int, ctx: int | None = None) -> str:
        return predict_plans(open_model(gpt2), options(ram=ram, ctx=ctx)).promises_off[0]

    assert "4 sequences of 256" in first_promise(at_rest + 4 * one)
    assert "2 sequences of 256" in first_promise(at_rest + 3 * one)
    assert "2 sequences of 256" in first_promise(at_rest + 2 * one)
    assert "of 1 sequence of 256" in first_promise(at_rest + 2 * one - 1)
    assert "4 sequences of 64" in first_promise(at_rest + one, ctx=64)
    with pytest.raises(BudgetError, match=r"^--ram .* is too little: one sequence of 256 tokens"):
        first_promise(at_rest + one - 1)
    with pytest.raises(
        BudgetError, match=r"^half of what is free beside the weights, .* one sequence of 2000000000 tokens"
    ):
        predict_plans(open_model(gpt2), options(ctx=2_000_000_000))


def test_a_limit_is_for_python_and_its_libraries_too(
    library: Library, gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_hetrun = Figures(60 << 20, 30 << 20)  # not what this process of pytest has loaded by now
    monkeypatch.setattr(memory_estimates, "kernel_figures", lambda: of_hetrun)
    bill = predict_plans(open_model(gpt2), options(ram=1 << 30)).memory
    assert {"interpreter", "libraries", "helper processes", "reserve"} <= bill.keys()
    assert bill["left"] >= 0
    assert "interpreter" not in predict_plans(open_model(gpt2), options()).memory


def test_states_are_counted(library: Library, tmp_path: Path) -> None:
    source = open_model(foreign.write(foreign.MAMBA, tmp_path / "mamba.gguf"))
    per_layer = 4 * foreign.INNER * (foreign.STATE + foreign.CONV - 1)
    assert predict_plans(source, options()).memory["KV, estimated"] == 5 * foreign.LAYERS * per_layer


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_count", 0), ("block_count", 1 << 31), ("context_length", 0), ("attention.head_count", 1 << 30)],
)
def test_absurd_settings_are_refused_with_the_keys_name(
    library: Library, tmp_path: Path, key: str, value: int
) -> None:
    bad = foreign.write(foreign.GPT2, tmp_path / "bad.gguf", {key: value})
    with pytest.raises(ModelFileError, match=key):
        predict_plans(open_model(bad), options())


def test_kv_types_count(library: Library, gpt2: Path) -> None:
    half = predict_plans(open_model(gpt2), options(kv_type="f16")).memory["KV, estimated"]
    assert predict_plans(open_model(gpt2), options(kv_type="f32")).memory["KV, estimated"] == 2 * half
