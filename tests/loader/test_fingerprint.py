"""What tells computations of models apart, and what does not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.errors import ModelFileError
from hetrun.graph import Extent, Graph
from hetrun.graph.ops import RmsNorm
from hetrun.loader.architectures import build_graph
from hetrun.loader.fingerprint import SAMPLE, fingerprint
from hetrun.loader.open_model import open_model
from tests.models.cases import GQA
from tests.support.rig import model_file


def graph_of(path: Path) -> Graph:
    return build_graph(open_model(path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    shutil.copy(model_file(GQA), path)
    return path


def test_a_copy_is_the_same(model: Path) -> None:
    assert fingerprint(graph_of(model), "x") == fingerprint(graph_of(Path(model_file(GQA))), "x")
    assert len(fingerprint(graph_of(model))) == 32


def test_options_count(model: Path) -> None:
    graph = graph_of(model)
    assert len({fingerprint(graph), fingerprint(graph, "a", "b"), fingerprint(graph, "ab")}) == 3


def test_every_weight_counts(model: Path) -> None:
    """A model that was trained on has the same settings and other weights."""
    whole = model.read_bytes()
    found = {fingerprint(graph_of(model))}
    weights = graph_of(model).weights().values()
    parts = [part for w in weights for part in w.parts if isinstance(part, Extent)]
    assert parts
    for part in parts:
        last = min(SAMPLE, part.row_bytes)
        for at in (0, part.rows // 2 * part.stride, part.end - part.offset - last):
            changed = bytearray(whole)
            changed[part.offset + at] ^= 1
            model.write_bytes(changed)
            found.add(fingerprint(graph_of(model)))
    assert len(found) > 2 * len({p.offset for p in parts})


def test_settings_count(model: Path) -> None:
    """What is in the graph's attributes is part of the computation."""
    graph = graph_of(model)
    norm = next(i for i, op in enumerate(graph.ops) if op.kind == "rms_norm")
    other = replace(graph.ops[norm], attrs=RmsNorm(eps=0.5))
    changed = replace(graph, ops=(*graph.ops[:norm], other, *graph.ops[norm + 1 :]))
    assert fingerprint(changed) != fingerprint(graph)


def test_a_file_that_changed_has_none(model: Path) -> None:
    graph = graph_of(model)
    model.write_bytes(model.read_bytes() + b"x")
    with pytest.raises(ModelFileError, match="changed while in use"):
        fingerprint(graph)
