"""Mixtures whose experts do not fit into memory: mapped, they say what they say in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.backends.llamacpp.kernels.paging import pager
from hetrun.backends.llamacpp.kernels.sigbus_guard import guard
from hetrun.errors import ModelFileError
from hetrun.executor.loading.load_plan import LoadPlanner
from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from hetrun.tools.evaluate import compare
from tests.models import cases_hf, hf
from tests.support.mapped_models import mapped
from tests.support.streamed import seen

pytestmark = pytest.mark.skipif(not pager() or not guard(), reason="there was no C compiler")
OPTIONS: dict[str, Any] = {"backends": ["llamacpp"], "planner": "static", "ctx": 128, "precision": "fast"}
TEXT = [int(t) for t in np.random.default_rng(1).integers(3, 90, 40)]


@pytest.fixture(scope="module", params=["mixtral-plain", "qwen3_moe-normalised"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    row = next(row for row in cases_hf.ROWS if str(row) == request.param)
    path = tmp_path_factory.mktemp("mapped") / "m.gguf"
    return Path(convert_model(ConversionOptions(hf.folder(row), by_option("q8_0"), path, threads=1)).path)


def test_mapped_experts_say_what_those_in_memory_say(model: Path) -> None:
    """In memory products are our own, of mapped ones ggml's: both round to 8 bits, and are as exact."""
    with LocalModel(model, **OPTIONS | {"backends": ["reference"]}) as llm:
        exact = llm.logits(TEXT)
    with LocalModel(model, **OPTIONS) as llm:
        held = compare([exact], [llm.logits(TEXT)]).mean_kl
    with mock.patch.object(LoadPlanner, "decide", mapped), LocalModel(model, **OPTIONS) as llm:
        assert compare([exact], [llm.logits(TEXT)]).mean_kl < 1.05 * held
        found = llm.generate([TEXT[:8]], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0]
        assert len(found.tokens) == 12
        assert seen(llm).bytes_read > 0
        assert "are mapped (a test says so)" in str(llm.plan)


def test_a_file_that_is_cut_is_an_error_and_the_process_lives(model: Path) -> None:
    data = model.read_bytes()
    with mock.patch.object(LoadPlanner, "decide", mapped), LocalModel(model, **OPTIONS) as llm:
        try:
            with model.open("r+b") as file:
                file.truncate(len(data) // 2)
            with pytest.raises(ModelFileError, match="it was changed while in use"):
                llm.logits(TEXT)
        finally:
            model.write_bytes(data)
