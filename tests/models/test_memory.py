"""The bill that is made before a model is loaded is what it then takes."""

from __future__ import annotations

import pytest

from hetrun.model import Options, prepare
from hetrun.planner import Wishes
from hetrun.source import open_model
from hetrun.weights import WeightStore
from tests.models import cases
from tests.models.test_sequences import backends
from tests.models.tiny import TinyLlama
from tests.rig import model_file

TIED = [
    TinyLlama(f"tied-{q}", embd=256, ffn=512, kv_heads=2, tied=True, quant=q) for q in ("Q4_0", "Q4_1", "F16")
]


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("case", [cases.GQA, cases.LLAMA[6], *cases.EACH_TYPE, *TIED], ids=str)
def test_weights_take_what_was_said_before_they_were_read(case: TinyLlama, backend: str) -> None:
    options = Options(Wishes(), (backend,), ctx=64)
    prepared = prepare(open_model(model_file(case)), options)
    store = WeightStore(prepared.backends)
    store.load(prepared.wanted)
    assert store.resident_bytes == prepared.plans.memory["weights"]
    for device in prepared.backends.values():
        device.close()
