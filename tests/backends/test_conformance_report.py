"""The conformance table of backends that lie, fail, or are right; and the command that prints it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest

from hetrun.backend import (
    Available,
    Backend,
    Buffer,
    Descriptor,
    Floats,
    Pass,
    Probe,
    ReadInto,
    Unavailable,
    WeightUse,
    registry,
)
from hetrun.backend.conformance import report
from hetrun.backend.conformance.cases import CASES, MATRICES, OpCase
from hetrun.backend.conformance.formatting import to_json, to_text
from hetrun.backend.conformance.report import ConformanceReport, ReportCell, conformance
from hetrun.backend.conformance.self_test import Kind, cases_for, faults
from hetrun.backend.interpreter import InterpretingBackend, OpFunction
from hetrun.backends.reference.ops import TABLE
from hetrun.graph import Op
from hetrun.graph.ops import OPS
from hetrun.graph.quant import QUANTS
from hetrun.memory.kv.cache import KvCache
from hetrun.system import entry_points
from tests.cli.conftest import Run, run

__all__ = ["run"]  # a fixture

LINEAR = [c for c in CASES if c.kind == "linear" and c.quant in ("F32", "Q4_K") and len(c.weights) == 1]
FEW = [*LINEAR, *(c for c in CASES if c.kind in ("add", "rms_norm"))]
MODEL = tuple(
    Kind(*kind)
    for kind in (
        *(("embed", ("Q4_K",)), ("linear", ("Q4_K",)), ("linear", ("Q4_K", "F32")), ("head", ("Q6_K",))),
        *(("rms_norm", ("F32",)), ("rope", ()), ("rope", ("F32",)), ("attention", ()), ("swiglu", ())),
        *(("add", ()), ("select", ()), ("moe", ("F32", "Q4_K", "Q4_K", "Q6_K"))),
        ("layer_norm", ("F32", "F32")),
    )
)

Change = Callable[[Floats], object]


@dataclass
class Held:
    """What a backend was given and has not given back."""

    buffers: int = 0
    runners: int = 0
    threads: list[int] = field(default_factory=list)
    closed: int = 0


class Tried(InterpretingBackend):
    """The reference under another name, in which something may be otherwise."""

    def __init__(self, table: Mapping[str, OpFunction] = TABLE, name: str = "mine") -> None:
        super().__init__(name, table)
        self.held = Held()

    def upload(self, wanted: WeightUse, read: ReadInto) -> Buffer:
        self.held.buffers += 1
        return super().upload(wanted, read)

    def release(self, buffer: Buffer) -> None:
        self.held.buffers -= 1

    def set_threads(self, threads: int) -> None:
        self.held.threads.append(threads)

    def close(self) -> None:
        self.held.closed += 1


def changed(change: Change, kind: str = "linear") -> Tried:
    """A backend that makes something else of one kind of op."""

    def function(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
        return cast(Floats, change(TABLE[kind](op, x, w, work, kv)))

    return Tried({**TABLE, kind: function})


def nan(x: Floats) -> Floats:
    x[-1, -1] = np.nan
    return x


def divided(x: Floats) -> Floats:
    raise ZeroDivisionError("division by zero")


def left(x: Floats) -> Floats:
    raise SystemExit(3)


LIES: Mapping[str, tuple[Change, str]] = {
    "zeros": (np.zeros_like, r"the error is 1\.0e\+00 of the result"),
    "shape": (lambda x: x[:, :-1], r"the result is of shape \(1, 95\), not \(1, 96\)"),
    "nan": (nan, "NaN"),
    "doubles": (lambda x: x.astype(np.float64), "float64, not float32"),
    "nothing": (lambda x: None, "shape"),
    "raises": (divided, "it fails: ZeroDivisionError: division by zero"),
    "leaves": (left, "it fails: SystemExit: 3"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_backend_gets_wrong_is_found(lie: str) -> None:
    change, said = LIES[lie]
    backend = changed(change)
    (fault,) = faults(backend, [Kind("linear", ("F32",)), Kind("add", ())])
    assert (fault.kind, fault.types) == ("linear", ("F32",))
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(str(fault))
    assert backend.held == Held()


def test_a_backend_that_writes_into_its_inputs_is_found() -> None:
    def relu(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
        return np.maximum(x[0], 0, out=x[0])

    (fault,) = faults(Tried({**TABLE, "relu": relu}), [Kind("relu", ())])
    assert "it overwrites its inputs" in str(fault)


def test_a_backend_that_leaves_other_keys_and_values_is_found() -> None:
    def attention(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
        result = TABLE["attention"](op, x, w, work, kv)
        kv.tables[0][1].write(work.slots[0][:1], x[2][:1] * 2)
        return result

    (fault,) = faults(Tried({**TABLE, "attention": attention}), [Kind("attention", ())])
    assert "in the KV cache" in str(fault)


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_backend_that_is_right_has_no_faults(quick: bool) -> None:
    backend = Tried()
    assert not faults(backend, MODEL, quick)
    assert backend.held == Held()  # everything was given back, and its threads are as they were


@pytest.mark.parametrize("kind", MODEL, ids=lambda k: "-".join([k[0], *k[1]]))
def test_every_kind_of_op_is_tried_with_its_own_types(kind: Kind) -> None:
    cases = list(cases_for(kind, True))
    assert cases
    assert {c.kind for c in cases} == {kind[0]}
    assert {tuple(w[2] for w in c.weights) for c in cases} == {kind[1]}


def test_every_kind_of_op_and_every_type_can_be_vetted() -> None:
    counts = [(kind, n) for kind, spec in OPS.items() for n in range(5) if n in spec.n_weights]
    for kind, n in counts:
        for quant in QUANTS if kind in MATRICES else ("F32",):
            types = ("F32", *[quant] * 3) if kind == "moe" else (quant, *["F32"] * n)[:n]
            variant = ("mamba",) if (kind, n) == ("delta_net", 3) else ()
            assert list(cases_for(Kind(kind, types, variant), True)), (kind, types)


@pytest.mark.parametrize("case", [c for c in CASES if c.kind == "moe" and c.variant], ids=str)
def test_every_mixture_can_be_vetted(case: OpCase) -> None:
    types = tuple(w[2] for w in case.weights)
    tried = list(cases_for(Kind("moe", types, case.variant), True))
    assert {c.variant for c in tried} == {case.variant}
    assert {tuple(w[2] for w in c.weights) for c in tried} == {types}


def test_an_attention_that_forgets_its_sinks_is_found() -> None:
    def attention(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
        return TABLE["attention"](op, x, [], work, kv)

    backend = Tried({**TABLE, "attention": attention})
    assert not faults(backend, [Kind("attention", ())])
    (fault,) = faults(backend, [Kind("attention", ("F32",))])
    assert "sinks" in fault.case


def test_what_is_not_supported_is_no_fault() -> None:
    assert not faults(Tried({}), MODEL)
    assert not faults(changed(divided), [Kind("add", ())])


def test_a_backend_that_cannot_be_asked_has_a_fault() -> None:
    class Silent(Tried):
        def supports(self, op: Op) -> bool:
            raise RuntimeError("no \x1b answer\nat all")

    (fault,) = faults(Silent(), [Kind("add", ())])
    assert str(fault).startswith(r"add: it fails: RuntimeError: no \x1b answer\nat all (case add-")


def test_runners_and_buffers_are_given_back_when_something_fails() -> None:
    class Half(Tried):
        def upload(self, wanted: WeightUse, read: ReadInto) -> Buffer:
            if self.held.buffers:
                raise MemoryError("full")
            return super().upload(wanted, read)

    backend = Half()
    (fault,) = faults(backend, [Kind("moe", ("F32", "F32", "F32", "F32"))])
    assert "MemoryError: full" in str(fault)
    assert backend.held == Held()


def test_types_that_cannot_be_made_here_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "named", lambda group, name: None)
    assert not faults(changed(divided), [Kind("linear", ("Q4_K",))])
    found = conformance([described(Tried())], cases=LINEAR)
    assert states(found) == {("linear", "F32"): "ok", ("linear", "Q4_K"): "untried"}
    assert "not tried with weights of Q4_K: no weights of this type can be made here" in to_text(found)
    assert found.ok


# --- the table


def described(backend: Backend | Exception, probe: Probe | Exception | str = "") -> Descriptor:
    """An exception is raised instead of coming back."""

    def create() -> Backend:
        if isinstance(backend, Exception):
            raise backend
        return backend

    def ask() -> Probe:
        if isinstance(probe, Exception):
            raise probe
        return Available("it is here") if probe == "" else cast(Probe, probe)

    return Descriptor("mine", ask, create)


def states(found: ConformanceReport) -> dict[tuple[str, str], str]:
    return {(cell.kind, cell.type): cell.state for cell in found.cells}


def only(found: ConformanceReport, kind: str) -> ReportCell:
    (cell,) = [c for c in found.cells if (c.kind, c.type) in ((kind, ""), (kind, "F32"))]
    return cell


def test_the_table_of_a_backend_that_is_right() -> None:
    backend, told = Tried(), list[tuple[int, int, str]]()
    found = conformance([described(backend)], lambda *step: told.append(step), FEW)
    assert found.ok
    assert set(states(found).values()) == {"ok"}
    assert set(states(found)) == {("linear", "F32"), ("linear", "Q4_K"), ("add", ""), ("rms_norm", "")}
    assert only(found, "linear").cases == 10
    assert (only(found, "linear").part, only(found, "linear").unsupported) == (0.0, 0)
    assert told[0] == (0, len(FEW), "linear")
    assert (backend.held.buffers, backend.held.closed) == (0, 1)
    assert set(backend.held.threads) == {1}


@pytest.mark.parametrize("lie", LIES)
def test_the_table_of_one_that_is_not(lie: str) -> None:
    found = conformance([described(changed(LIES[lie][0]))], cases=FEW)
    state = "fails" if lie in ("raises", "leaves") else "wrong"
    assert not found.ok
    expected = {
        ("linear", "F32"): state,
        ("linear", "Q4_K"): state,
        ("add", ""): "ok",
        ("rms_norm", ""): "ok",
    }
    assert states(found) == expected
    assert only(found, "linear").case == "linear-F32-1@0w1-96"
    text = to_text(found)
    word = "is WRONG: " if state == "wrong" else "fails: "
    assert f"mine: linear with F32, Q4_K {word}" in text
    assert text.count("What to do") == 1
    cells = {
        (c["op"], c["type"]): c for c in json.loads(json.dumps(to_json(found), allow_nan=False))["cells"]
    }
    assert cells["linear", "F32"]["state"] == state
    assert cells["add", None] == {
        **{"op": "add", "type": None, "backend": "mine", "state": "ok", "cases": 5, "unsupported": 0},
        **{"error_of_allowed": 0.0, "case": None, "said": None},
    }


def test_the_table_of_one_that_supports_nothing_or_little() -> None:
    found = conformance([described(Tried({}))], cases=FEW)
    assert found.ok
    assert set(states(found).values()) == {"unsupported"}
    assert only(found, "linear").unsupported == 10

    class Few(Tried):
        def supports(self, op: Op) -> bool:
            return op.kind == "linear" and op.out.width == 96 and op.weights[0].quant.name == "F32"

    found = conformance([described(Few())], cases=FEW)
    assert (only(found, "linear").cases, only(found, "linear").unsupported) == (5, 5)
    lines = [line.split() for line in to_text(found).splitlines()]
    assert ["linear", "some"] in lines
    assert ["add", "-"] in lines
    assert ["F32", "linear*"] in lines
    assert ["Q4_K", "-"] in lines


@pytest.mark.parametrize(
    ("descriptor", "standing", "said"),
    [
        (described(Tried(), Unavailable("no such chip")), "away", "mine: not here: no such chip"),
        (
            described(Tried(), OSError("lost")),
            "broken",
            "mine fails: to ask whether it works here fails: OSError",
        ),
        (
            described(Tried(), "yes"),
            "broken",
            "mine fails: to ask whether it works here fails: AttributeError",
        ),
        (described(OSError("lost")), "broken", "it should work here, and does not start: OSError: lost"),
    ],
    ids=["away", "probe raises", "no probe", "create raises"],
)
def test_a_backend_that_cannot_be_used_is_a_sentence(
    descriptor: Descriptor, standing: str, said: str
) -> None:
    found = conformance([descriptor], cases=FEW)
    assert found.columns[0].standing == standing
    assert found.ok == (standing == "away")
    assert set(states(found).values()) == {"untried"}
    assert said in to_text(found)


def test_a_backend_that_does_not_start_is_closed() -> None:
    class Stuck(Tried):
        def start(self) -> None:
            raise TimeoutError("no answer")

        def close(self) -> None:
            super().close()
            raise RuntimeError("nor does it end")

    backend = Stuck()
    found = conformance([described(backend)], cases=FEW)
    assert "does not start: TimeoutError: no answer" in to_text(found)
    assert backend.held.closed == 1


# --- the command


@contextmanager
def registered(descriptor: Descriptor) -> Iterator[None]:
    unregister = registry.register(descriptor)
    yield
    unregister()


def test_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "CASES", FEW)
    with registered(described(Tried())):
        right = run("devices", "--conformance", "--backend", "mine")
    assert (right.code, right.err) == (0, "")
    assert [line.split() for line in right.out.splitlines()[:2]] == [
        ["op", "mine", "reference"],
        ["rms_norm", "ok", "oracle"],
    ]
    with registered(described(changed(np.zeros_like))):
        wrong = run("devices", "--conformance", "--backend", "mine")
        told = run("devices", "--conformance", "--backend", "mine,reference", "--json")
    assert wrong.code == told.code == 1
    assert "mine: linear with F32, Q4_K is WRONG: the error is" in wrong.out
    found = json.loads(told.out)
    assert set(found) == {"ok", "seconds", "backends", "cells"}
    assert found["ok"] is False
    assert [(b["backend"], b["standing"]) for b in found["backends"]] == [
        ("mine", "tried"),
        ("reference", "oracle"),
    ]
    assert sum(cell["state"] == "wrong" for cell in found["cells"]) == 2


def test_the_command_tries_all_that_is_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "CASES", FEW[:1])
    with registered(described(Tried(), Unavailable("no such chip"))):
        every = run("devices", "--conformance")
    assert every.code == 0
    assert "mine: not here: no such chip" in every.out
    assert "libllama: not in the table: it runs models as a whole" in every.out


def test_the_command_refuses_what_it_cannot_try(run: Run) -> None:
    with registered(described(Tried(), Unavailable("no such chip"))):
        away = run("devices", "--conformance", "--backend", "mine")
        unknown = run("devices", "--conformance", "--backend", "yours")
    alone = run("devices", "--backend", "reference")
    both = run("devices", "--conformance", "--measure")
    assert [r.code for r in (away, unknown, alone, both)] == [2, 2, 2, 2]
    assert "the backend mine cannot be tried: no such chip" in away.sentence
    assert "there is no backend 'yours'; there are " in unknown.sentence
    assert "--backend needs --conformance" in alone.sentence
    assert "use only one of them" in both.sentence
