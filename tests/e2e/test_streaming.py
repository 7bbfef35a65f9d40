"""Models bigger than their memory: whatever stays, and however the rest is read, they say what they say with
all weights in memory, to the last bit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.backend import Floats
from hetrun.backends.llamacpp.kernels.matmul import products
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import BudgetError
from hetrun.executor.loading.load_plan import LoadPlanner
from hetrun.executor.planned_model import PlannedModel
from hetrun.graph import Graph
from hetrun.prefetch import ring_buffer
from hetrun.prefetch.streamer import StreamStats
from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from tests.models import cases_hf, hf
from tests.models.tiny import TinyLlama, write_gguf
from tests.support.streamed import KIB, MIB, least, made_small, opened, seen
from tests.support.tiers import exhaustive
from tests.tools.make_model import Shape, write_model

pytestmark = pytest.mark.skipif(
    products() is None or ring_buffer.library() is None, reason="hetrun was installed without a C compiler"
)
WAYS = ("balanced", "unbalanced", "attention-first", "ffn-first", "none", "synchronous")
PROMPTS = ([5, 6, 7], list(range(40, 110)), [9] * 33)  # one is read in several passes
TEXT = [int(t) for t in np.random.default_rng(0).integers(3, 250, 150)]
LLAMA = TinyLlama("t", layers=4, embd=512, ffn=1024, heads=8, kv_heads=4, head_dim=64, quant="Q4_0")
MADE = Shape("m", embd=512, layers=3, ffn=1536, heads=8, kv_heads=4, head_dim=64, vocab=4096, context=512)
# Architectures with something of their own: stacked matrices that are one tensor, biases, norms of heads,
# windows, a gate that is no SwiGLU, a head that is the embedding.
ROWS = ("qwen2-plain", "qwen2-tied", "qwen3-plain", "phi3-plain", "gemma3_text-pattern", "llama-all-biases")


def answers(llm: LocalModel, n: int) -> list[list[int]]:
    """Of all prompts together, and of the first alone."""
    params = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)
    together = llm.generate([list(p) for p in PROMPTS], params)
    alone = llm.generate([list(PROMPTS[0])], replace(params, max_tokens=12))
    return [list(c.tokens) for c in (*together, *alone)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streaming") / "m.gguf"
    write_model(path, MADE, "Q4_K_M", seed=0)
    return path


# With the fewer of them, keys and values take the room of weights several times as well.
@pytest.fixture(scope="module", params=[64, pytest.param(256, marks=exhaustive)])
def tokens(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def in_memory(model: Path, tokens: int) -> list[list[int]]:
    with LocalModel(model, backends=["llamacpp"], planner="static", deterministic=True, ctx=512) as llm:
        return answers(llm, tokens)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_a_model_in_memory(
    model: Path, tokens: int, in_memory: list[list[int]], way: str
) -> None:
    with opened(model, 2 * MIB, streaming=way, planner="static", ctx=512) as (llm, _, _):
        locked = seen(llm).locked_bytes
        assert locked == 0 if way == "none" else 2 * MIB - 200 * KIB < locked <= 2 * MIB
        assert answers(llm, tokens) == in_memory
        assert seen(llm).streamed_bytes > 0


@pytest.fixture(scope="module", params=["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def of_a_type(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Floats]:
    """A model of a type of weights, and what it says behind each token of the text."""
    quant = str(request.param)
    path = write_gguf(replace(LLAMA, quant=quant), tmp_path_factory.mktemp("types") / f"{quant}.gguf")
    with LocalModel(path, backends=["llamacpp"], planner="static", deterministic=True) as llm:
        return path, llm.logits(TEXT)


@pytest.mark.parametrize("room", [0, 100 * KIB, 900 * KIB])
def test_logits_are_the_same_bits(room: int, of_a_type: tuple[Path, Floats]) -> None:
    """Also of every token of a text, for which the head is read for every row."""
    path, expected = of_a_type
    with opened(path, room, planner="static") as (llm, _, _):
        assert np.array_equal(llm.logits(TEXT).view(np.int32), expected.view(np.int32))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(LLAMA, tmp_path_factory.mktemp("tiny") / "t.gguf")


@pytest.mark.parametrize("room", [0, 900 * KIB])
def test_embeddings_are_the_same_bits_and_read_nothing_of_the_head(room: int, tiny: Path) -> None:
    texts = [list(p) for p in PROMPTS]
    with LocalModel(tiny, backends=["llamacpp"], planner="static", deterministic=True) as llm:
        vectors, logits = llm.embed(texts), llm.logits(texts[0])
    with opened(tiny, room, planner="static") as (llm, _, _):
        assert np.array_equal(llm.embed(texts), vectors)
        assert np.array_equal(llm.logits(texts[0]), logits)
        assert np.array_equal(llm.embed(texts[0]), vectors[:1])
        without = of_pass(llm)
        assert np.array_equal(llm.logits(texts[0]), logits)
        if not room:
            graph: Graph = llm.call(lambda loaded: cast("PlannedModel", loaded.model).graph)
            (head,) = (op for op in graph.ops if op.kind == "head")
            assert of_pass(llm) - without >= head.weights[0].nbytes > 0


def of_pass(llm: LocalModel) -> int:
    """Bytes that the last pass took from disk."""

    def stats(loaded: LoadedModel) -> StreamStats:
        disk = cast("PlannedModel", loaded.model)._weights.disk
        assert disk is not None
        return disk._streamer.stats

    return llm.call(stats).pass_bytes


@pytest.mark.parametrize("name", ROWS)
def test_architectures(name: str, tmp_path: Path) -> None:
    """In the order in which their graphs take weights."""
    row = next(row for row in cases_hf.ROWS if str(row) == name)
    path = convert_model(
        ConversionOptions(hf.folder(row), by_option("q8_0"), tmp_path / "m.gguf", threads=1)
    ).path
    with LocalModel(path, backends=["llamacpp"], planner="static", deterministic=True, ctx=128) as llm:
        expected = answers(llm, 12)
    # So small a model would fit anywhere.
    with mock.patch.object(LoadPlanner, "decide", LoadPlanner._not_in_memory):
        options: dict[str, Any] = {
            "backends": ["llamacpp"],
            "planner": "static",
            "deterministic": True,
            "ctx": 128,
        }
        for way in ("none", "balanced"):
            with LocalModel(path, streaming=way, **options) as llm:
                assert answers(llm, 12) == expected
                assert (seen(llm).streamed_bytes > 0) == (way == "none")


def test_keys_and_values_take_the_room_of_weights_and_give_it_back(tiny: Path) -> None:
    with opened(tiny, 900 * KIB, planner="static", ctx=256) as (llm, _, _):
        before = seen(llm).locked_bytes
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        llm.generate([[i, 5, 6, 7] for i in range(3, 11)], params)
        assert seen(llm).locked_bytes < before


def test_a_budget_that_cannot_work_is_refused_with_one_that_does(tiny: Path) -> None:
    with pytest.raises(BudgetError, match=r"--ram 2 MiB is too little: this model needs at least \d+ MiB"):
        LocalModel(tiny, ram="2MiB", backends=["llamacpp"], planner="static")


def test_where_nothing_may_come_from_disk_a_model_needs_all_of_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, MADE, "Q8_0", seed=0)
    options: dict[str, Any] = {"backends": ["llamacpp"], "planner": "static", "ctx": 256}
    with made_small():
        ram = least(path, **options)
        LocalModel(path, ram=ram, **options).close()
        with pytest.raises(BudgetError, match="too little"):
            LocalModel(path, ram=ram, streaming="off", **options)
