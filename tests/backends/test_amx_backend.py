"""The backend amx without torch's numbers: what it says before it starts, what it fuses, how it cuts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest

from hetrun.backend import Available, Unavailable, WeightUse, registry
from hetrun.backends import amx
from hetrun.backends.amx import fusion
from hetrun.backends.amx.sizes import bytes_of, packed_bytes
from hetrun.graph import Op, Value
from tests.conformance.test_segments import BLOCKS, block, gated_once, opt
from tests.models import cases
from tests.support.rig import graph_of

needs_torch = pytest.mark.skipif("importlib.util.find_spec('torch') is None", reason="torch is not installed")

NO_AMX = "no AMX in this CPU, oneDNN runs without it (avx2)"


def test_a_missing_or_old_torch_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = amx.probe()
    assert isinstance(missing, Unavailable)
    assert "pip install 'torch>=2.6'" in missing.reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(amx, "version", lambda name: "2.5.1+cpu")
    old = amx.probe()
    assert isinstance(old, Unavailable)
    assert "2.5.1" in old.reason
    monkeypatch.setattr(amx, "version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(amx, "instructions", lambda: ("amx_bf16",))
    assert amx.probe() == Available("torch 2.13.0+cpu: amx_bf16")
    monkeypatch.setattr(amx, "instructions", lambda: ("avx2",))
    assert amx.probe() == Available(f"torch 2.13.0+cpu: {NO_AMX}")


@pytest.mark.parametrize(("flag", "is_slow"), [("avx2", True), ("avx_vnni", False), ("amx_int8", False)])
def test_without_vnni_int8_says_that_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, flag: str, is_slow: bool
) -> None:
    monkeypatch.setattr(amx, "probe", lambda: Available("torch"))
    monkeypatch.setattr(amx, "cpu_flags", lambda: frozenset({flag}))
    slow = Available("torch; very slow: fast int8 products need AVX-512, VNNI or AMX")
    assert amx.probe_int8() == (slow if is_slow else Available("torch"))


@pytest.mark.parametrize(
    ("torch", "ipex", "cpu", "said"),
    [
        ("2.8.0+cpu", "2.8.0", "avx2", Available(f"IPEX 2.8.0, torch 2.8.0+cpu: {NO_AMX}")),
        (
            "2.13.0",
            None,
            "avx2",
            "IPEX is not installed: pip install 'torch<2.9' 'intel-extension-for-pytorch<2.9' in an",
        ),
        ("2.13.0", "2.8.0", "avx2", "IPEX 2.8 and torch 2.8 are needed, not 2.8.0 and 2.13.0: pip install"),
        ("2.7.1", "2.7.0", "avx2", "not 2.7.0 and 2.7.1"),
        ("2.8.0", "2.8.0", "", "IPEX needs a CPU with AVX2"),
        ("2.5.0", "2.8.0", "avx2", "torch 2.5.0 is older"),
    ],
)
def test_ipex_wants_the_torch_that_it_was_made_for(
    monkeypatch: pytest.MonkeyPatch, torch: str, ipex: str | None, cpu: str, said: Available | str
) -> None:
    def version(name: str) -> str:
        found = {"torch": torch, "intel-extension-for-pytorch": ipex}[name]
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(amx, "version", version)
    monkeypatch.setattr(amx, "instructions", lambda: tuple(cpu.split()))
    found = amx.probe_ipex()
    assert found == said if isinstance(said, Available) else said in str(found)


def test_ipex_is_there_only_for_those_who_name_it(request: pytest.FixtureRequest) -> None:
    for made in (amx.descriptor, amx.ipex):
        request.addfinalizer(registry.register(replace(made, probe=lambda: Available("works here"))))
    assert "amx-ipex" not in registry.choose(None)
    assert "amx-ipex" not in registry.choose(["amx"])
    assert registry.choose(["amx-ipex"]) == ["amx-ipex"]
    assert {"amx", "amx-ipex"} <= set(registry.choose(["amx", "amx-ipex"]))


@needs_torch
def test_nothing_loads_torch_before_the_start() -> None:
    code = (
        "import sys; from hetrun.backends import amx; from tests.models import cases;"
        "from tests.support.rig import graph_of; b = amx.descriptor.create(); g = graph_of(cases.GQA);"
        "assert all(b.supports(op) for op in g.ops); b.resident_bytes(b.wants(g.ops)); b.set_threads(1);"
        "b.cancel(); b.rearm(); assert b.overhead_bytes == 0 and not b.started;"
        "b.close(); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]


@needs_torch
@pytest.mark.skipif("not hasattr(__import__('ctypes').CDLL(None), 'mallopt')", reason="not glibc")
def test_memory_that_was_freed_is_there_for_the_next_values() -> None:
    """In a thread, as the engine is: its heap is one of those that malloc gives back most readily."""
    code = (
        "import threading, torch; from resource import RUSAGE_SELF, getrusage;"
        "from hetrun.backends.amx.buffers import keep_freed_memory; keep_freed_memory();"
        "use = lambda n: [len([torch.ones(1 << 18) for _ in range(6)]) for _ in range(n)];"  # 1 MiB each
        "faults = lambda: getrusage(RUSAGE_SELF).ru_minflt;"
        "body = lambda: seen.extend((use(12), faults(), use(2), faults()));"
        "seen = []; t = threading.Thread(target=body); t.start(); t.join(); print(seen[3] - seen[1])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 300  # of 3072 pages


def test_the_ways_take_what_they_say() -> None:
    (weight,) = {op.weights[0] for op in graph_of(cases.QUANTISED[3]).ops if op.kind == "head"}
    use, table = WeightUse(weight, "product"), WeightUse(weight, "lookup")
    rows, cols = weight.shape
    assert bytes_of(use, "packed") >= packed_bytes(rows, cols) >= 2 * rows * cols
    assert bytes_of(use, "lean") == weight.nbytes
    assert rows * cols < bytes_of(use, "int8") < bytes_of(use, "packed")
    assert bytes_of(WeightUse(weight, "logits"), "int8") == bytes_of(use, "packed")
    assert {bytes_of(table, way) for way in ("packed", "lean", "int8")} == {weight.nbytes}


def kinds(items: list[fusion.Fused]) -> list[str]:
    return [type(item).__name__ if not isinstance(item, Op) else item.kind for item in items]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("build", BLOCKS, ids=lambda b: b.__name__)
def test_every_op_is_run_once_and_weights_do_not_depend_on_what_is_kept(build: object, inside: bool) -> None:
    ops = block(build).ops  # type: ignore[arg-type]
    every: tuple[Value, ...] = tuple(op.out for op in ops)
    for kept in ((), every[-1:], every):
        items = fusion.fuse(ops, kept, inside)
        made = [member.out for item in items for member in fusion.members(item)]
        assert sorted(v.name for v in made) == sorted(v.name for v in every)
        used = {use for item in items for use in fusion.uses(item)}
        assert used == set(fusion.wants(ops, inside))


def test_activations_run_inside_of_products_that_nothing_else_reads() -> None:
    ops = block(gated_once).ops
    assert kinds(fusion.fuse(ops, (), True)) == ["GatedProduct", "StackedLinear"]
    linear = "StackedLinear"
    assert kinds(fusion.fuse(ops, (ops[0].out,), True)) == [linear, linear, "swiglu", linear]
    assert kinds(fusion.fuse(ops, (), False)) == ["StackedLinear", "swiglu", "StackedLinear"]
    assert kinds(fusion.fuse(block(opt).ops, (), True)) == ["layer_norm", "ActivatedLinear", "StackedLinear"]


def test_a_layer_has_one_product_for_q_k_and_v_and_one_rotation() -> None:
    layer = [op for op in graph_of(cases.GQA).ops if op.scope.startswith("blk.0.attn")]
    assert kinds(fusion.fuse(layer, (), True)) == [
        *("rms_norm", "StackedLinear", "Rotation", "attention", "StackedLinear", "add")
    ]


@needs_torch
def test_long_products_are_cut_and_short_ones_are_not() -> None:
    from hetrun.backends.amx.lowering import FEWEST_ROWS, most_rows

    assert most_rows(576 * 576, 2, "bf16") > 4096
    assert most_rows(8192 * 2048, 2, "bf16") < 512 <= most_rows(8192 * 2048, 2, "int8")
    assert most_rows(1 << 40, 1, "bf16") == FEWEST_ROWS
