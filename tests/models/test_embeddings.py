"""Embeddings: the hidden states of Hugging Face's own code, pooled, wherever and beside whatever they run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import ContextFull, OptionError
from hetrun.executor.planned_model import PlannedModel
from hetrun.graph.pooling import Pooling
from tests.models import cases, cases_hf, hf, tiny
from tests.models.cases_hf import FEW, crossed, only
from tests.models.hf import Row
from tests.models.test_placement import devices, random_placement
from tests.models.tiny import F32
from tests.support.part_backends import backends
from tests.support.rig import Case, graph_of, model_file, rig, step

TEXTS = [tiny.random_tokens(n, seed=n) for n in (60, 1, 7, 30)]  # one is longer than every window
POOLED: dict[str, Any] = {"mean": lambda h: h.mean(0), "last": lambda h: h[-1], "cls": lambda h: h[0]}
OWN = [pytest.param(c, id=str(c)) for c in (cases.GQA, cases.QUANTISED[3])]
EACH = [
    *(pytest.param(*case.values, name, id=f"{case.id}-{name}") for case in OWN for name in backends()),
    *crossed(FEW, cases_hf.EACH, backends()),
]


def unit(vectors: F32) -> F32:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32)


@pytest.mark.parametrize("row", only(FEW, cases_hf.representative(cases_hf.ROWS)))
def test_the_reference_backend_agrees_with_transformers(row: Row) -> None:
    with LocalModel(hf.folder(row), backends=["reference"], kv_type="f32", ctx=row.ctx) as llm:
        for pooling in get_args(Pooling):
            (found,) = llm.embed(TEXTS[0], pooling=pooling)
            expected = unit(POOLED[pooling](hf.hidden(hf.folder(row), TEXTS[0])))
            assert found.dtype == np.float32
            assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize(("case", "backend"), EACH)
def test_together_as_alone_and_as_the_reference(case: Case, backend: str) -> None:
    with LocalModel(model_file(case), backends=["reference"], kv_type="f32") as llm:
        reference = llm.embed(TEXTS)
    with LocalModel(model_file(case), backends=[backend]) as llm:
        together = llm.embed(TEXTS)
        alone = np.concatenate([llm.embed([text]) for text in TEXTS])
    assert np.abs(together - alone).max() < 5e-3
    assert (together * reference).sum(-1).min() > 0.999


@pytest.mark.parametrize(("case", "backend"), EACH)
def test_the_same_bits_with_deterministic(case: Case, backend: str) -> None:
    found = []
    for ubatch in (None, 5):
        with LocalModel(model_file(case), backends=[backend], deterministic=True, ubatch=ubatch) as llm:
            found.append(llm.embed(TEXTS))
            found.append(np.concatenate([llm.embed([text]) for text in reversed(TEXTS)])[::-1])
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("seed", range(3))
def test_any_placement_gives_them(seed: int) -> None:
    """Also where the head runs on a backend of its own, or parts of it on several."""
    graph = graph_of(cases.GQA)
    names = backends()
    wanted = [(0, TEXTS[0], range(len(TEXTS[0]))), (1, TEXTS[2], [6])]
    found = []
    for placed in (
        {"": "reference"},
        random_placement(graph, names, seed) | {"output": names[seed % len(names)]},
    ):
        r = rig(cases.GQA, devices(names), placed, ubatch=16)
        hidden = step(*[(r.kv.alloc(), text, rows) for _, text, rows in wanted])
        found.append(r.executor.run(type(hidden)(hidden.chunks, hidden=True)).copy())
        r.close()
    assert found[0].shape == (61, graph.hidden.width)
    assert np.abs(found[0] - found[1]).max() < 2e-3


def test_the_output_matrix_is_not_multiplied() -> None:
    with LocalModel(model_file(cases.GQA), backends=["reference"]) as llm:
        llm.embed(TEXTS)
        ran = {key.segment for key, record in llm.stats if record.runs}
        assert ran == {"model (hidden)"}
        llm.logits([1, 2, 3])
        assert {key.segment for key, record in llm.stats if record.runs} == {"model (hidden)", "model"}


def test_keys_and_values_are_given_back_and_nothing_is_kept() -> None:
    with LocalModel(model_file(cases.GQA), backends=["reference"]) as llm:
        llm.embed(TEXTS)

        def held(loaded: LoadedModel) -> tuple[int, int, int]:
            model, prefixes = loaded.model, loaded.prefixes
            assert isinstance(model, PlannedModel)
            assert prefixes is not None
            return model.kv_bytes, prefixes.n_entries, prefixes.n_running

        assert llm.call(held) == (0, 0, 0)


def test_beside_answers() -> None:
    """Neither says anything else for it."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with LocalModel(model_file(cases.GQA), backends=["reference"], deterministic=True) as llm:
        answer, vectors = llm.generate([TEXTS[2]], params)[0], llm.embed(TEXTS)
        stream = llm.stream(TEXTS[2], params)
        next(stream)
        assert np.array_equal(llm.embed(TEXTS), vectors)
        assert llm.generate([TEXTS[2]], params)[0].tokens == answer.tokens


SAID = [(1, "mean"), (2, "cls"), (3, "last"), (0, "mean"), (99, "mean")]


@pytest.mark.parametrize(("said", "pooling"), SAID)
def test_a_file_says_what_its_embeddings_are_made_of(tmp_path: Path, said: int, pooling: Pooling) -> None:
    path = tiny.write_gguf(replace(cases.GQA, pooling=said), tmp_path / "tiny.gguf")
    with LocalModel(path, backends=["reference"]) as llm:
        assert llm.info.pooling == pooling
        assert np.array_equal(llm.embed("some words"), llm.embed("some words", pooling=pooling))
        others = [llm.embed("some words", pooling=kind) for kind in get_args(Pooling) if kind != pooling]
        assert not any(np.allclose(llm.embed("some words"), other) for other in others)


def test_a_folder_says_what_its_embeddings_are_made_of(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(hf.folder(cases_hf.ROWS[0]), folder)
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    with LocalModel(folder, backends=["reference"]) as llm:
        assert llm.info.pooling == "last"


def test_texts_strings_and_what_is_refused() -> None:
    with LocalModel(model_file(cases.GQA), backends=["reference"], ctx=32) as llm:
        assert np.array_equal(llm.embed("some words")[0], llm.embed([llm.tokenize("some words")])[0])
        raw = llm.embed(TEXTS[2], normalise=False)
        assert np.allclose(unit(raw), llm.embed(TEXTS[2]), atol=1e-6)
        assert not np.isclose(np.linalg.norm(raw), 1.0)
        with pytest.raises(ContextFull, match="the text has 33 tokens, but the context holds 32; shorten it"):
            llm.embed([TEXTS[2], tiny.random_tokens(33)])
        assert llm.embed([tiny.random_tokens(32)]).shape == (1, llm.info.width)
        with pytest.raises(OptionError, match="pooling is one of mean, last, cls, not 'max'"):
            llm.embed("some words", pooling="max")  # type: ignore[arg-type]
