"""Steps that take rows in place of tokens, with positions in time, height and width, as pictures do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3VLForConditionalGeneration

from hetrun.errors import ModelFileError
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.graph import Extent
from hetrun.graph.ops import Rope
from hetrun.loader.architectures import build_graph
from hetrun.loader.open_model import open_model
from hetrun.loader.source import ModelSource
from hetrun.planner.options import Options, Wishes
from tests.models import cases_hf, hf, tiny
from tests.models.hf import Row

ROWS = {str(row): row for row in cases_hf.ROWS}
SEEING = ROWS["qwen3_5_text-sections"]
KINDS: dict[str, type[PreTrainedModel]] = {
    "qwen3_5_text": Qwen3_5ForCausalLM,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}
TOKENS = tiny.random_tokens(60)
BEFORE, TALL, WIDE = 7, 4, 6  # tokens before a picture, and its size
PICTURE = TALL * WIDE


def positions() -> np.ndarray:
    """A text, a picture, and text again: what follows a picture goes on after its longer side."""
    text = np.repeat(np.arange(BEFORE)[:, None], 3, 1)
    high, wide = (a.reshape(-1) for a in np.mgrid[:TALL, :WIDE])
    picture = BEFORE + np.stack([np.zeros(PICTURE, int), high, wide], 1)
    rest = len(TOKENS) - BEFORE - PICTURE
    return np.concatenate([text, picture, np.repeat(BEFORE + WIDE + np.arange(rest)[:, None], 3, 1)])


def rows_of(width: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((PICTURE, width)).astype(np.float32)


def chunks(seq: int, rows: np.ndarray, whole: bool) -> list[Chunk]:
    """The text, the picture and the rest, one after the other."""
    ids, places = np.array(TOKENS, np.int64), positions()
    ends = [0, BEFORE, BEFORE + PICTURE, len(ids)]
    out = []
    for i, (a, b) in enumerate(pairwise(ends)):
        wanted = np.arange(b - a) if whole else np.array([b - a - 1])
        out.append(Chunk(seq, ids[a:b], wanted, places=places[a:b], embedded=rows if i == 1 else None))
    return out


@pytest.fixture(scope="module", params=[SEEING, ROWS["qwen3_vl-plain"]], ids=str)
def row(request: pytest.FixtureRequest) -> Row:
    found: Row = request.param
    return found


@pytest.fixture(scope="module")
def expected(row: Row) -> np.ndarray:
    theirs = KINDS[row.model_type].from_pretrained(
        hf.folder(row), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        embedded = theirs.get_input_embeddings()(torch.tensor([TOKENS]))
        embedded[0, BEFORE : BEFORE + PICTURE] = torch.from_numpy(rows_of(embedded.shape[-1]))
        places = torch.from_numpy(positions().T[:, None].copy())
        logits: np.ndarray = theirs(inputs_embeds=embedded, position_ids=places).logits[0].numpy()
    return logits


@pytest.fixture(params=["reference", "llamacpp"])
def model(request: pytest.FixtureRequest, row: Row) -> Iterator[PlannedModel]:
    options = Options(
        Wishes(ubatch=16), backends=(request.param,), planner="static", kv_type="f32", spatial=True
    )
    found = PlannedModel(open_model(hf.folder(row)), options)
    yield found
    found.close()


def test_a_picture_in_a_text(model: PlannedModel, expected: np.ndarray) -> None:
    seq, found = model.alloc(), []
    for chunk in chunks(seq, rows_of(model.width), whole=True):
        found.append(model.step(Step((chunk,))).copy())
    logits = np.concatenate(found)
    assert np.abs(logits - expected).max() < 1e-3
    assert (logits.argmax(-1) == expected.argmax(-1)).all()
    model.free(seq)


def test_beside_a_text_and_with_hidden_states(model: PlannedModel, expected: np.ndarray) -> None:
    rows, seq, other = rows_of(model.width), model.alloc(), model.alloc()
    text, picture, rest = chunks(seq, rows, whole=False)
    ids = np.array(TOKENS[:9], np.int64)
    alone = model.step(Step((Chunk(other, ids, np.array([8])),))).copy()
    model.truncate(other, 0)
    model.step(Step((text,)))
    # Rows and tokens go through passes of their own, in one step.
    found = model.step(Step((picture, Chunk(other, ids, np.array([8]))))).copy()
    assert np.abs(found[0] - expected[BEFORE + PICTURE - 1]).max() < 1e-3
    assert np.abs(found[1] - alone[0]).max() < 1e-4
    kept = Chunk(seq, rest.tokens, rest.wanted, places=rest.places, hidden=3)
    found = model.step(Step((kept,)))
    assert np.abs(found[0] - expected[-1]).max() < 1e-3
    assert model.hidden.shape == (3, model.width)
    hidden = Step((Chunk(other, ids[:4], np.arange(4), embedded=rows[:4]),), hidden=True)
    assert model.step(hidden).shape == (4, model.width)


def test_a_text_is_the_same_to_a_model_that_may_see() -> None:
    found = []
    for spatial in (False, True):
        model = PlannedModel(
            open_model(hf.folder(SEEING)),
            Options(Wishes(), backends=("llamacpp",), planner="static", kv_type="f32", spatial=spatial),
        )
        ids = np.array(TOKENS, np.int64)
        found.append(model.step(Step((Chunk(model.alloc(), ids, np.arange(len(ids))),))).copy())
        axes = [op.attrs.axis for op in model.graph.ops if isinstance(op.attrs, Rope)]
        assert sorted(set(axes)) == ([0, 1, 2] if spatial else [0])
        model.close()
    assert np.abs(found[0] - found[1]).max() < 1e-4


@pytest.mark.parametrize("row", ["llama-tied", "gemma3_text-softcap", "opt-narrow-words"])
def test_every_model_takes_rows(row: str) -> None:
    """What tokens are looked up as, given as rows, is the same text."""
    path = hf.folder(ROWS[row])
    model = PlannedModel(
        open_model(path), Options(Wishes(), backends=("reference",), planner="static", kv_type="f32")
    )
    ids = np.array(TOKENS[:20], np.int64)
    expected = model.step(Step((Chunk(model.alloc(), ids, np.arange(20)),))).copy()
    (embed,) = [op for op in model.graph.ops if op.kind == "embed"]
    table = open_model(path).find(embed.weights[0].name.split("[")[0])
    assert table is not None
    raw = np.concatenate([np.fromfile(p.path, np.uint8, p.rows * p.row_bytes, offset=p.offset)
                          for p in table.parts if isinstance(p, Extent)])  # fmt: skip
    rows = table.quant.dequantise(raw, table.shape[1])[ids]
    if model.graph.embedded != embed.out:  # scaled, as transformers' own rows are
        rows = rows * np.float32(np.sqrt(table.shape[1]))
    found = model.step(Step((Chunk(model.alloc(), ids * 0, np.arange(20), embedded=rows),)))
    assert np.abs(found - expected).max() < 1e-3
    model.close()


def test_sections_that_no_model_has() -> None:
    class Source:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def get_numbers(self, key: str, n: int) -> object:
            return (11.5, 11, 10, 0) if key.endswith("sections") else real.get_numbers(key, n)

    real = open_model(hf.folder(SEEING))
    with pytest.raises(ModelFileError, match=r"rope\.dimension_sections is 11\.5"):
        build_graph(cast(ModelSource, Source()))
