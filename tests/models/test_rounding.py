"""Backends that round what they multiply: close to the model, wherever they run and whatever runs beside."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from hetrun.errors import Cancelled
from hetrun.graph.ops import Stateful
from tests.models import cases, cases_hf, hf, tiny
from tests.models.cases_hf import FEW, crossed
from tests.models.hf import Row
from tests.models.test_placement import UBATCHES, devices, random_placement, teacher_forced
from tests.models.test_sequences import LENGTHS, TEXTS, alone
from tests.models.tiny import TinyLlama
from tests.support.closeness import HASTY, KL, mean_kl
from tests.support.part_backends import backends, rounding
from tests.support.rig import Case, graph_of, rig

(DELTA,) = (row for row in cases_hf.ROWS if str(row) == "qwen3_5_text-plain")


BLOCKS = ("q4_0", "q4_k", "q8_0")


def limit(backend: str) -> float:
    (device,) = devices([backend]).values()
    return KL[device.arithmetic]


CALM = [row for row in cases_hf.EACH if row.id not in HASTY]


@pytest.mark.parametrize(("row", "backend"), crossed(FEW, CALM, rounding()))
def test_an_architecture_stays_close(row: Row, backend: str) -> None:
    """By itself, in passes that a window moves within, and mixed with others."""
    tokens = tiny.random_tokens(150, seed=5)
    expected = hf.logits(hf.folder(row), tokens)
    for seed, pieces in ((0, (150,)), (1, (7, 1, 1, 91, 50))):
        names = [backend, *backends()]
        placed = random_placement(graph_of(row), names, seed) if seed else {"": backend}
        r = rig(row, devices(names), placed, ubatch=UBATCHES[2 + seed])
        found = teacher_forced(r, pieces, tokens)
        r.close()
        assert mean_kl(expected, found) <= limit(backend), placed


@pytest.mark.parametrize(
    ("case", "kv_type", "backend"),
    crossed(cases.COMMON_TYPES, [c for c in cases.EACH_TYPE if c.id in BLOCKS], ("F16", "Q8_0"), rounding()),
)
def test_a_quantised_model_stays_close(case: TinyLlama, kv_type: str, backend: str) -> None:
    reference = rig(case, devices(["reference"]), kv_type=kv_type)
    expected = teacher_forced(reference, (48,))
    reference.close()
    r = rig(case, devices([backend]), kv_type=kv_type)
    assert mean_kl(expected, teacher_forced(r, (30, 1, 1, 16))) <= limit(backend)
    r.close()


def repeatable() -> list[str]:
    """int8 products choose their exact columns by the rows that they have seen."""
    return [name for name, device in devices(rounding()).items() if device.arithmetic != "int8"]


@pytest.mark.skipif("not rounding()", reason="torch is not installed")
def test_delta_nets_alone_stay_closer() -> None:
    """Their share of what rounding costs: in chunks less than products, one by one nothing."""
    tokens = tiny.random_tokens(250, seed=5)
    expected = hf.logits(hf.folder(DELTA), tokens)
    for pieces, kl in (((250,), KL["bf16"] / 5), ((1,) * 30 + (220,), KL["bf16"] / 5), ((1,) * 250, 1e-9)):
        nets = {op.scope: "amx" for op in graph_of(DELTA).ops if isinstance(op.attrs, Stateful)}
        r = rig(DELTA, devices(["amx", "reference"]), {"": "reference", **nets})
        found = teacher_forced(r, pieces, tokens)
        assert mean_kl(expected, found) <= kl
        r.close()


@pytest.mark.parametrize("backend", repeatable())
@pytest.mark.parametrize("case", [cases.GQA, cases.QUANTISED[3], DELTA], ids=str)
def test_sequences_do_not_see_each_other_when_passes_have_one_row(case: Case, backend: str) -> None:
    r = rig(case, devices([backend]), deterministic=True)
    expected = [alone(r, text, n) for text, n in zip(TEXTS, LENGTHS, strict=True)]
    seqs = [r.kv.alloc() for _ in TEXTS]
    together = [r.step(*[(s, t[:n], [n - 1]) for s, t, n in zip(seqs, TEXTS, LENGTHS, strict=True)])]
    for i in range(6):
        together.append(r.step(*[(s, [t[n + i]], [0]) for s, t, n in zip(seqs, TEXTS, LENGTHS, strict=True)]))
    for i, want in enumerate(expected):
        assert np.array_equal(want, np.stack([rows[i] for rows in together]))
    r.close()


@pytest.mark.parametrize("backend", rounding())
def test_a_cancel_from_another_thread_ends_the_pass_and_is_forgotten(backend: str) -> None:
    r = rig(replace(cases.GQA, name="gqa-cancelled"), devices([backend]))
    seq, tokens = r.kv.alloc(), tiny.random_tokens(20, seed=3)
    expected = r.logits(seq, tokens)
    r.kv.truncate(seq, 0)
    canceller = threading.Thread(target=r.backends[backend].cancel)
    canceller.start()
    canceller.join()
    with pytest.raises(Cancelled):
        r.logits(seq, tokens)
    assert r.kv.length(seq) == 0
    r.backends[backend].rearm()
    assert mean_kl(expected, r.logits(seq, tokens)) <= limit(backend)
    r.close()


@pytest.mark.skipif("llamacpp" not in backends(), reason="llama-cpp-python is not installed")
@pytest.mark.parametrize(
    "case", [c for c in cases.EACH_TYPE if c.id in ("q4_0", "q4_k", "q5_k", "q8_0", "iq4_xs", "mxfp4")]
)
def test_exact_says_what_float32_says(case: TinyLlama) -> None:
    """16 bits of an activation are next to all of it: also where passes are cut."""
    reference = rig(case, devices(["reference"]))
    expected = teacher_forced(reference, (48,))
    reference.close()
    far = {}
    for exact in (False, True):
        (device,) = devices(["llamacpp"]).values()
        device.exact = exact
        r = rig(case, {"llamacpp": device})
        far[exact] = mean_kl(expected, teacher_forced(r, (30, 1, 1, 16)))
        r.close()
    assert far[True] < 1e-6
    assert far[True] < far[False] / 100
