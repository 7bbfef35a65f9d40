"""Ministral 3: queries that grow with positions, and how files say it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import pytest

from hetrun.graph.ops import Grow, Rope
from hetrun.loader.architectures import build_graph
from hetrun.loader.open_model import open_model
from hetrun.loader.source import ModelSource
from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from tests.models import cases_hf, hf

T = TypeVar("T")
ROW = next(row for row in cases_hf.MINISTRAL3 if row.name == "plain")


class Told:
    """A model's file that says some things otherwise."""

    def __init__(self, real: ModelSource, **numbers: float) -> None:
        self._real, self._numbers = real, numbers

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def get_float(self, key: str, default: float) -> float:
        return self._numbers.get(key.split(".")[-1], self._real.get_float(key, default))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    path = tmp_path_factory.mktemp("mistral3") / "m.gguf"
    return open_model(
        Path(convert_model(ConversionOptions(hf.folder(ROW), by_option("f16"), path, threads=1)).path)
    )


def attrs_of(source: object, kind: type[T]) -> list[T]:
    graph = build_graph(cast(ModelSource, source))
    return [op.attrs for op in graph.ops if isinstance(op.attrs, kind)]


def test_both_ways_to_say_what_yarn_multiplies_by(converted: ModelSource) -> None:
    """Ours, and that of llama.cpp's converter."""
    theirs = attrs_of(Told(converted, attn_factor=1.0, yarn_log_multiplier=1.0), Rope)
    for ours, other in zip(attrs_of(converted, Rope), theirs, strict=True):
        assert ours.attn_factor == pytest.approx(other.attn_factor)


def test_queries_grow(converted: ModelSource) -> None:
    found = attrs_of(converted, Grow)
    assert len(found) == converted.require_int("block_count", 1, 9)
    assert found[0].by == pytest.approx(0.3)
    assert found[0].every == ROW.config["rope_parameters"]["original_max_position_embeddings"]
    growth = found[0].growth(np.array([0, 15, 16, 47, 48]))
    np.testing.assert_allclose(growth, 1 + 0.3 * np.log([1, 1, 2, 3, 4]), rtol=1e-6)
    assert not attrs_of(Told(converted, temperature_scale=0.0), Grow)
