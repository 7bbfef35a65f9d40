"""What is Gemma 4's own: which layers lend keys and values, what only wanted rows go through, and tables that
stay in their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hetrun import LLM
from hetrun.errors import ModelFileError
from hetrun.graph import Extent, Graph, kv_shapes
from hetrun.graph.ops import Attention
from hetrun.loader.architectures import build_graph
from hetrun.loader.fingerprint import fingerprint
from hetrun.loader.hf_source import open_folder
from hetrun.loader.table_rows import TableRows
from hetrun.loader.weight_reader import FileReader
from hetrun.models import gemma4
from tests.models import cases_hf, hf, tiny
from tests.models.settings import Settings

SIX = {
    "embedding_length": 64,
    "block_count": 6,
    "attention.head_count": 4,
    "attention.head_count_kv": [2, 2, 1, 2, 2, 1],
    "attention.key_length": 64,
    "attention.key_length_swa": 32,
    "attention.shared_kv_layers": 2,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, True, False, True, True, False],
    "feed_forward_length": [96, 96, 96, 96, 192, 192],
    "embedding_length_per_layer_input": 32,
    "context_length": 256,
}
ROWS = {row.name: row for row in cases_hf.GEMMA_4}


def graph(**changed: object) -> Graph:
    """The graph of a GGUF file with such settings; a dot in a key is two underscores here."""
    settings = Settings({**SIX, **{k.replace("__", "."): v for k, v in changed.items()}})
    return gemma4.build(settings.builder(), settings)


def attentions(found: Graph) -> list[Attention]:
    return [op.attrs for op in found.ops if isinstance(op.attrs, Attention)]


def test_layers_use_the_keys_and_values_of_the_last_one_of_their_kind() -> None:
    found = attentions(graph())
    assert [a.layer for a in found] == [0, 1, 2, 3, 3, 2]
    assert [a.sharing for a in found] == ["", "", "lends", "lends", "borrows", "borrows"]
    assert [a.window for a in found] == [8, 8, 0, 8, 8, 0]
    assert [(a.n_kv_heads, a.head_dim) for a in found] == [
        (2, 32),
        (2, 32),
        (1, 64),
        (2, 32),
        (2, 32),
        (1, 64),
    ]
    assert sorted(kv_shapes(graph())) == [0, 1, 2, 3]


@pytest.mark.parametrize(("shared", "last"), [(0, 5), (1, 4), (2, 3), (3, 2)])
def test_only_wanted_rows_go_through_layers_that_borrow(shared: int, last: int) -> None:
    found = graph(attention__shared_kv_layers=shared)
    wanted = [op.rows for op in found.ops if op.kind == "attention"]
    assert wanted == ["tokens"] * last + ["wanted"] * (6 - last)
    late = [op for op in found.ops if op.scope.startswith(tuple(f"blk.{i}." for i in range(last + 1, 6)))]
    assert {op.rows for op in late} <= {"wanted"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention__shared_kv_layers": 6}, "shared_kv_layers"),
        ({"attention__shared_kv_layers": 4}, "no layer lends"),
        ({"attention__head_count_kv": [3] * 6}, "cannot share"),
        ({"attention__head_count_kv": [0] * 6}, "cannot share"),
        ({"feed_forward_length": None}, "feed_forward_length"),
        ({"rope__freq_base_swa": -1.0}, "freq_base_swa"),
    ],
)
def test_settings_that_make_no_model_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        graph(**changed)


def test_tables_of_layers_stay_in_their_file() -> None:
    path = hf.folder(ROWS["plain"])
    source = open_folder(path)
    found = build_graph(source)
    (table,) = found.tables
    assert len(table.values) == 4
    assert not any(name.startswith("per_layer_token_embd") for name in found.weights())
    read: list[str] = []
    fill = FileReader.fill

    def noted(self: FileReader, target: memoryview, part: Extent, skip: int, name: str) -> None:
        read.append(name)
        fill(self, target, part, skip, name)

    with LLM(path, backends=["llamacpp"], kv_type="f32") as llm:
        with mock.patch.object(FileReader, "fill", noted):
            llm.logits([5, 6, 5, 7, 5])
    assert read == ["per_layer_token_embd.weight"] * 3  # of each token once


def test_rows_are_those_of_the_table() -> None:
    source = open_folder(hf.folder(ROWS["plain"]))
    table = source.find("per_layer_token_embd.weight")
    assert table is not None
    rows, numbers = TableRows(table), [300, 0, 17, 0, 319]
    raw = np.empty(table.nbytes, np.uint8)
    reader = FileReader()
    reader.read(table, raw)
    reader.close()
    expected = table.quant.dequantise(raw, table.shape[1])[numbers]
    np.testing.assert_array_equal(rows(numbers), expected)
    np.testing.assert_array_equal(rows(np.array(numbers)), expected)
    rows.close()


def test_a_table_tells_models_apart(tmp_path: Path) -> None:
    """Whose keys and values a file holds depends on what tokens are looked up as."""
    found = build_graph(open_folder(hf.folder(ROWS["plain"])))
    (table,) = found.tables
    assert table.factor == pytest.approx(32**0.5)
    other = Graph(found.ops, found.hidden, found.logits, found.given)
    assert fingerprint(found) != fingerprint(other)


def test_a_prompt_in_pieces_is_one_in_a_pass() -> None:
    """Of which no row is wanted but the last: layers that borrow then have one row, or none."""
    tokens = tiny.random_tokens(70, seed=3)
    with LLM(hf.folder(ROWS["double-wide"]), backends=["llamacpp"], kv_type="f32", deterministic=True) as llm:
        whole = llm.logits(tokens)
    with LLM(hf.folder(ROWS["double-wide"]), backends=["llamacpp"], kv_type="f32", ubatch=16) as llm:
        np.testing.assert_allclose(llm.logits(tokens), whole, atol=1e-2)
