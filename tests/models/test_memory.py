"""The bill that is made before a model is loaded is what it then takes."""

from __future__ import annotations

import pytest

from hetrun.executor.loading.load_plan import prepare
from hetrun.executor.weight_store import WeightStore
from hetrun.loader.open_model import open_model
from hetrun.planner.options import Options, Wishes
from tests.models import cases, cases_hf
from tests.models.tiny import TinyLlama
from tests.support.part_backends import backends
from tests.support.rig import Case, model_file

TIED = [
    TinyLlama(f"tied-{q}", embd=256, ffn=512, kv_heads=2, tied=True, quant=q) for q in ("Q4_0", "Q4_1", "F16")
]
# Tables in F32 and BF16 that are also the head, fused experts, constants that rope needs.
MORE = {
    *("llama-tied", "llama-llama3", "llama-bf16", "llama-f16", "qwen2-tied", "gemma3_text-bf16", "phi3-tied"),
    *("phi3-bf16", "phi3-longrope-partial", "mixtral-fused", "mixtral-bf16-sharded", "qwen3_moe-bf16"),
    *("qwen3_moe-sparse-step", "opt-as-350m"),
}
FOLDERS = [*cases_hf.EACH, *(cases_hf.parameter(row) for row in cases_hf.ROWS if str(row) in MORE)]


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("case", [cases.GQA, cases.LLAMA[6], *cases.EACH_TYPE, *TIED, *FOLDERS], ids=str)
def test_weights_take_what_was_said_before_they_were_read(case: Case, backend: str) -> None:
    options = Options(Wishes(), (backend,), ctx=64)
    prepared = prepare(open_model(model_file(case)), options)
    store = WeightStore(prepared.backends)
    store.load(prepared.wanted)
    assert store.resident_bytes == prepared.plans.memory["weights"]
    for device in prepared.backends.values():
        device.close()
