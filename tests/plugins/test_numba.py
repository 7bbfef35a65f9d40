"""The numba backend: what it computes and what not, what it takes, and that the planner finds its place."""

from __future__ import annotations

import fcntl
import json
import sys
import tomllib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from hetrun import LLM
from hetrun.backend import Backend, Descriptor, Unavailable
from hetrun.backend.conformance.cases import CASES, OpCase, single
from hetrun.backend.conformance.runner import brought_in, build, outcome, reference, threads_for, tried
from hetrun.errors import Cancelled
from hetrun.graph import Constant
from hetrun.graph.ops import Attention, Rope
from hetrun.planner.plan import PlanSet
from tests.models import tiny
from tests.plugins.strangers import PLUGINS, Register, home_with
from tests.support.tiers import exhaustive, in_pairs

PROJECT = PLUGINS / "hetrun-numba"
TYPES = ("F32", "Q1_0", "Q2_0", "Q5_0", "Q5_1", "TQ1_0", "NVFP4")
KINDS = {"linear", "head", "rms_norm", "swiglu", "add", "rope", "attention", "select"}


@pytest.fixture(scope="module")
def descriptor() -> Iterator[Descriptor]:
    """The plugin as if it were installed."""
    sys.path.insert(0, str(PROJECT))
    import hetrun_numba

    yield hetrun_numba.descriptor
    sys.path.remove(str(PROJECT))


@pytest.fixture(scope="module")
def device(descriptor: Descriptor) -> Iterator[Backend]:
    """Started; the first time on a machine that compiles its kernels, in one process for all."""
    made = descriptor.create()
    with (PROJECT / "pyproject.toml").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made.start()
    yield made
    made.close()


def product(rows: int, cols: int, type_: str, tokens: int, kind: str = "linear", bias: str = "") -> OpCase:
    weights = ((rows, cols, type_), *([(1, rows, bias)] if bias else []))
    return OpCase(kind, (cols,), rows, single(tokens), 1e-10, weights=weights, note=f"{rows}x{cols}")


# Sizes that no tile and no panel divides, and more rows and columns than one of each has.
ODD = [
    *(product(rows, 1024, t, 27) for t in TYPES for rows in (7, 33, 320)),
    *(product(65, 13, "F32", n) for n in range(1, 27)),
    *(product(40, 256, t, 3, kind, "F16") for t in TYPES for kind in ("linear", "head")),
]


def facts(case: OpCase) -> Sequence[Hashable]:
    """What a case is about; `make test` has cases in which every two of them occur together."""
    return case.kind, case.quant, (case.kind, case.note), str(case.company)


@pytest.mark.parametrize("case", in_pairs([*CASES, *ODD], facts), ids=str)
def test_it_computes_what_the_reference_does_or_says_that_it_cannot(case: OpCase, device: Backend) -> None:
    op = build(case)
    able = case.kind in KINDS
    if case.kind in ("linear", "head"):
        able = case.weights[0][2] in TYPES
    if isinstance(case.attrs, Rope):
        able = not case.attrs.ext_factor  # YaRN
    if isinstance(case.attrs, Attention):
        able = not (case.attrs.softcap or case.attrs.sharing or case.weights)
    assert device.supports(op) == able
    if not able:
        return
    trial = tried(case, op, outcome(case, op, reference()), device, threads_for(case))
    assert trial.state == "ok", trial.said
    with brought_in(device, op) as buffers:
        assert device.resident_bytes(device.wants([op])) == sum(b.nbytes for b in buffers.values())


@pytest.mark.parametrize("tokens", [1, 64])
def test_any_number_of_threads_gives_the_same(tokens: int, device: Backend) -> None:
    case = product(320, 512, "Q2_0", tokens)
    op = build(case)
    found = []
    for threads in (1, 2, 1000):
        device.set_threads(threads)
        found.append(outcome(case, op, device).result)
    assert all(np.array_equal(found[0], other) for other in found)


def test_scales_that_are_no_numbers_stay_visible(device: Backend) -> None:
    """What is wrong in a file shows in the results, as it does with every backend."""
    case = product(32, 128, "Q2_0", 4)
    op = build(case)
    weight = op.weights[0]
    (part,) = weight.parts
    assert isinstance(part, Constant)
    raw = np.frombuffer(part.data, np.uint8).copy().reshape(32, -1)
    raw[3, :2] = np.array([np.nan], np.float16).view(np.uint8)
    broken = replace(op, weights=(replace(weight, parts=(replace(part, data=raw.tobytes()),)),))
    result = outcome(case, broken, device).result
    assert np.isnan(result[:, 3]).all()
    assert np.isfinite(np.delete(result, 3, axis=1)).all()


def test_it_ends_between_two_ops_when_it_is_told(device: Backend) -> None:
    case = product(32, 64, "Q2_0", 4)
    op = build(case)
    device.cancel()
    with pytest.raises(Cancelled):
        outcome(case, op, device)
    device.rearm()
    assert outcome(case, op, device).result.shape == (4, 32)


def test_kernels_are_compiled_anew_where_nothing_can_be_kept(
    device: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba.core import caching

    from hetrun_numba import compiling

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    monkeypatch.setattr(compiling, "_not_kept", [])

    def twice(x: int) -> int:
        return 2 * x

    assert compiling.compiled("int64(int64)")(twice)(4) == 8
    assert not compiling.are_kept()


def test_its_package_names_it(descriptor: Descriptor) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["hetrun.backends"].items()
    assert EntryPoint(name=name, value=value, group="hetrun.backends").load() is descriptor
    assert descriptor.name == name


def test_without_numba_it_says_what_to_install(
    descriptor: Descriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert descriptor.probe() == Unavailable("numba is not installed: pip install numba")


# --- chosen where it is faster

# Products of NVFP4 with many tokens take a third of the time that they take in ggml, which has a wide kernel
# for one row only. Large enough to be measured, small enough for a test.
MODEL = tiny.TinyLlama(
    "nvfp4", layers=3, embd=1024, ffn=2048, heads=16, kv_heads=4, head_dim=64, quant="NVFP4", context=1024
)
PROMPT = tiny.random_tokens(600)


def test_a_model_runs_on_it_where_it_is_named(
    descriptor: Descriptor, device: Backend, register: Register, tmp_path: Path
) -> None:
    register("backends", "numba", descriptor)
    path = tiny.write_gguf(tiny.TinyLlama("nvfp4", embd=256, ffn=512, quant="NVFP4"), tmp_path / "model.gguf")
    found = []
    for backend in ("numba", "reference"):
        with LLM(path, backends=(backend, "reference"), planner="static", ctx=64, kv_type="f32") as llm:
            assert backend in {s.backend for s in llm.plan.plan(32).segments}, llm.plan.to_text()
            found.append(llm.logits(tiny.random_tokens(20)))
    assert np.square(found[0] - found[1]).sum() <= 1e-8 * np.square(found[1]).sum()


# It is about what the clock says on a machine with nothing else to do.
@pytest.mark.alone
@pytest.mark.slow
def test_the_planner_takes_it_where_it_is_faster(
    descriptor: Descriptor,
    device: Backend,
    register: Register,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A busy machine measures little, and what it does not get to is not planned with.
    monkeypatch.setattr("hetrun.executor.autotune.measurement.backend_probe.others_running", lambda: 0.0)
    monkeypatch.setattr("hetrun.executor.autotune.measurement.model_measurement.PROBE_S", 60.0)
    register("backends", "numba", descriptor)
    path = tiny.write_gguf(MODEL, tmp_path / "model.gguf")

    def logits(*backends: str) -> tuple[PlanSet, np.ndarray]:
        with LLM(path, backends=backends, planner="measured", eager=True, ctx=1024, kv_type="f32") as llm:
            return llm.plan, llm.logits(PROMPT)

    plan, found = logits("llamacpp", "numba")
    assert "numba" in {s.backend for s in plan.plan(512).segments}, plan.to_text()
    plan, expected = logits("llamacpp")
    assert plan.backends == ["llamacpp"]
    # ggml rounds activations to 8 bits before it multiplies; numba's products do not.
    assert np.argmax(found) == np.argmax(expected)
    error = np.square(found - expected).mean() / np.square(expected).mean()
    assert error < 0.01


@exhaustive  # an environment built from nothing, in which the kernels are compiled
@pytest.mark.slow
def test_installed_as_a_stranger_has_it(tmp_path: Path) -> None:
    """Built, installed into a clean environment, found there, and right about all that it says it can."""
    home = home_with(tmp_path, PLUGINS / "hetrun-numba")
    found = json.loads(home.hetrun("devices", "--json").stdout)["backends"]
    (mine,) = (row for row in found if row["backend"] == "numba")
    assert mine["available"]
    said = home.hetrun("devices", "--conformance", "--backend", "numba", "--json").stdout
    cells = [cell for cell in json.loads(said)["cells"] if cell["backend"] == "numba"]
    assert {cell["state"] for cell in cells} == {"ok", "unsupported"}
    assert {"linear", "head", "attention", "rope", "rms_norm"} <= {
        c["op"] for c in cells if c["state"] == "ok"
    }
    answer = ("run", "The capital of France is", "--raw", "-n", "4", "--temp", "0", "--spec", "off")
    together = home.hetrun(*answer, "--backend", "numba", "--backend", "llamacpp").stdout
    assert together == home.hetrun(*answer, "--backend", "llamacpp").stdout
