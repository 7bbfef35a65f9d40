"""Architectures, planners, stores and readers of packages: used by name, and named where they are no good."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetrun import LLM
from hetrun.config import Settings
from hetrun.errors import ModelFileError, OptionError, PluginError, UserError
from hetrun.executor.loading.backend_selection import create_backends
from hetrun.graph import Graph, GraphBuilder, ModelMeta
from hetrun.loader.architectures import build_graph, builds
from hetrun.loader.hub.download import Progress
from hetrun.loader.hub.resolve import find
from hetrun.loader.open_model import open_model
from hetrun.loader.source import ModelSource
from hetrun.models import llama
from hetrun.planner.options import Options, Wishes
from hetrun.planner.plan import BUCKETS, Placement
from hetrun.planner.plugin_planners import Task
from hetrun.system import entry_points
from tests.models.tiny import TinyLlama, write_gguf
from tests.plugins.strangers import Register


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(TinyLlama("tiny"), path)
    return path


def quietly(done: int, whole: int, what: str) -> None:
    """A bar that is not shown."""


# --- architectures


def fails(b: GraphBuilder, meta: ModelMeta) -> Graph:
    raise KeyError("block_count")


@pytest.mark.parametrize(
    "thing", [SimpleNamespace(name="llama", build=fails), SimpleNamespace(name="llama"), "text"]
)
def test_ours_runs_where_an_architecture_is_no_good(register: Register, model: Path, thing: object) -> None:
    bad = register("models", "llama", thing)
    source = open_model(model)
    assert builds(source)
    assert build_graph(source).logits.width
    assert bad in entry_points.left_out()


def test_a_good_one_goes_before_ours(register: Register, model: Path) -> None:
    used: list[str] = []

    def build(b: GraphBuilder, meta: ModelMeta) -> Graph:
        used.append("mine")
        return llama.build(b, meta)

    register("models", "llama", SimpleNamespace(name="llama", build=build))
    with LLM(model, planner="static", backends=["reference"]) as llm:
        assert llm.generate(["a b"])[0].tokens
    assert used


def test_a_file_that_is_wrong_is_not_held_against_an_architecture(register: Register, model: Path) -> None:
    def refuse(b: GraphBuilder, meta: ModelMeta) -> Graph:
        raise ModelFileError("tiny.gguf", "it has no head")

    good = register("models", "llama", SimpleNamespace(name="llama", build=refuse))
    with pytest.raises(ModelFileError, match="it has no head"):
        build_graph(open_model(model))
    assert good not in entry_points.left_out()


# --- planners


def everything_on(backend: str) -> Callable[[Task], Mapping[str, tuple[int, Sequence[Placement]]]]:
    return lambda task: dict.fromkeys(BUCKETS, (1, [Placement("", backend, "a test")]))


def test_a_planner_decides(register: Register, model: Path) -> None:
    register("planners", "mine", everything_on("reference"))
    assert Settings.resolve(environ=None, planner="mine").planner == "mine"
    with LLM(model, planner="mine", backends=["llamacpp", "reference"]) as llm:
        plan = llm.plan.plan(1)
    assert {s.backend for s in plan.segments} == {"reference"}
    assert {s.why for s in plan.segments} == {"a test"}


def raising(task: Task) -> Mapping[str, tuple[int, Sequence[Placement]]]:
    raise IndexError("no plan")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (raising, "it made no plan: IndexError: no plan"),
        (lambda task: {}, "it made no plan: KeyError: '1'"),
        (lambda task: dict.fromkeys(BUCKETS, (0, [])), "0 is not a number of threads"),
        (lambda task: dict.fromkeys(BUCKETS, (1, ["llamacpp"])), "'llamacpp' is not a Placement"),
        (everything_on("tpu"), "the planner mine: the plan places everything on tpu, which cannot work here"),
    ],
)
def test_who_asks_for_a_planner_is_told_what_is_wrong_with_it(
    register: Register, model: Path, rule: object, said: str
) -> None:
    register("planners", "mine", rule)
    with pytest.raises(UserError, match=said):
        LLM(model, planner="mine", backends=["reference"])


def test_a_planner_that_is_not_there() -> None:
    with pytest.raises(OptionError, match="must be measured or static, not 'mine'"):
        Settings.resolve(environ=None, planner="mine")


# --- backends that are not there for everybody


def test_backends_that_cannot_be_created_are_left_out_or_told_of(register: Register, model: Path) -> None:
    from hetrun.backend import Available, Backend, Descriptor

    def create() -> Backend:
        raise OSError("no device")

    register("backends", "odd", Descriptor("odd", lambda: Available("yes"), create))
    graph = build_graph(open_model(model))
    assert "odd" not in create_backends(Options(Wishes()), graph)


# --- stores and readers of files


def test_a_store_brings_models_by_name(register: Register, model: Path) -> None:
    asked: list[tuple[str, bool]] = []

    def store(name: str, allowed: bool, progress: Progress) -> Path:
        asked.append((name, allowed))
        progress(1, 1, name)
        return model

    register("stores", "mine", store)
    assert find("mine:user/tiny:Q4", True, quietly) == model
    assert find("mine:user/tiny", False, quietly) == model
    assert asked[0][0] == "user/tiny:Q4"
    assert not asked[1][1]


def no_store(name: str, allowed: bool, progress: Progress) -> Path:
    raise TimeoutError("no answer")


@pytest.mark.parametrize(
    ("store", "said"),
    [
        (no_store, r"^the store mine of stranger 0\.1 fails: TimeoutError: no answer$"),
        (lambda *a: Path("/nowhere/x.gguf"), "says /nowhere/x.gguf, which does not exist"),
        (lambda *a: None, "the store mine of stranger 0.1 fails: TypeError"),
    ],
)
def test_a_store_that_fails(register: Register, store: object, said: str) -> None:
    register("stores", "mine", store)
    with pytest.raises(UserError, match=said):
        find("mine:x", True, quietly)


def test_a_reader_opens_files_of_its_suffix(register: Register, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "tiny.weights"
    other.write_bytes(b"a format of someone's own")

    def read(path: Path) -> ModelSource:
        assert path == other
        return open_model(model)

    register("sources", "weights", read)
    with LLM(other, planner="static", backends=["reference"]) as llm:
        assert llm.info.architecture == "llama"


def test_a_reader_that_fails(register: Register, tmp_path: Path) -> None:
    def read(path: Path) -> ModelSource:
        raise ZeroDivisionError

    register("sources", "weights", read)
    with pytest.raises(ModelFileError, match=r"the reader weights of stranger 0\.1 fails: ZeroDivisionError"):
        open_model(tmp_path / "x.weights")


def test_a_reader_for_another_version(register: Register, tmp_path: Path) -> None:
    register("sources", "weights", None, "0", fails=AssertionError("imported"))
    with pytest.raises(PluginError, match=r"the reader of files weights of stranger 0\.1 is left out"):
        open_model(tmp_path / "x.weights")
