"""What is Gemma 3's own: which layers see how far, by which rope, and how queries are scaled."""

from __future__ import annotations

import pytest

from hetrun.graph import Graph
from hetrun.graph.ops import Attention, RmsNorm, Rope
from hetrun.loader.architectures import build_graph
from hetrun.loader.hf_mapping import AddOne
from hetrun.loader.hf_source import open_folder
from hetrun.models import gemma3
from tests.models import cases_hf, hf
from tests.models.settings import Settings

SEVEN = {
    "embedding_length": 64,
    "block_count": 7,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "feed_forward_length": 96,
    "context_length": 256,
    "attention.sliding_window": 8,
}


def graph(**changed: object) -> Graph:
    """The graph of a GGUF file with such settings; a dot in a key is two underscores here."""
    settings = Settings({**SEVEN, **{k.replace("__", "."): v for k, v in changed.items()}})
    return gemma3.build(settings.builder(), settings)


def attentions(found: Graph) -> list[Attention]:
    return [op.attrs for op in found.ops if isinstance(op.attrs, Attention)]


@pytest.mark.parametrize(
    ("pattern", "slides"),
    [
        (None, "sssssfs"),  # what llama.cpp's converter writes, for it is every sixth
        (2, "sfsfsfs"),
        (7, "ssssssf"),
        ([True, False, False, True, True, False, True], "sffssfs"),
        ([1, 0, 0, 1, 1, 0, 1], "sffssfs"),
        ([True] * 7, "sssssss"),
    ],
)
def test_which_layers_see_a_window(pattern: object, slides: str) -> None:
    found = graph(attention__sliding_window_pattern=pattern, rope__freq_base=1e6, rope__scaling__factor=8.0)
    assert [a.window for a in attentions(found)] == [{"s": 8, "f": 0}[s] for s in slides]
    ropes = [op.attrs for op in found.ops if isinstance(op.attrs, Rope)]
    assert len(ropes) == 14
    for i, s in enumerate(slides):
        for rope in ropes[2 * i : 2 * i + 2]:
            assert (rope.base, rope.freq_scale) == {"s": (10000.0, 1.0), "f": (1e6, 0.125)}[s]


def test_without_a_window_all_layers_see_all() -> None:
    found = graph(attention__sliding_window=None, rope__freq_base=1e6)
    assert [a.window for a in attentions(found)] == [0] * 7
    assert {op.attrs.base for op in found.ops if isinstance(op.attrs, Rope)} == {1e6}


def test_the_base_of_layers_with_a_window() -> None:
    found = graph(rope__freq_base_swa=500.0)
    assert {op.attrs.base for op in found.ops if isinstance(op.attrs, Rope)} == {500.0, 10000.0}


@pytest.mark.parametrize(("layers", "scale"), [(7, 32**-0.5), (62, 16**-0.5), (26, 32**-0.5)])
def test_queries_are_scaled_as_llamacpp_does(layers: int, scale: float) -> None:
    found = attentions(graph(block_count=layers))
    assert [a.scale for a in found] == pytest.approx([scale] * layers)


def test_gains_are_stored_less_one_in_folders_and_whole_in_gguf() -> None:
    source = open_folder(hf.folder(cases_hf.GEMMA3[0]))
    offsets = [op.attrs.offset for op in build_graph(source).ops if isinstance(op.attrs, RmsNorm)]
    assert offsets == [1.0] * (3 * 6 + 1)
    assert {op.attrs.offset for op in graph().ops if isinstance(op.attrs, RmsNorm)} == {0.0}
    changes = source.imported.changes
    assert len(changes) == 3 * 6 + 1
    assert set(changes.values()) == {AddOne()}


def test_what_llamacpp_has_to_know() -> None:
    """And nothing of it where it is what llama.cpp takes for granted."""
    said = {row.name: open_folder(hf.folder(row)).imported.settings for row in cases_hf.GEMMA3}
    key = "attention.sliding_window"
    assert said["pattern"][f"{key}_pattern"] == (True, False, True)
    assert said["layer-types"][f"{key}_pattern"] == (False, True, True)
    assert f"{key}_pattern" not in said["pattern-of-six"]
    assert said["pattern-of-six"][key] == 8
    assert not any(name.startswith(key) for name in said["none-slide"])
    assert said["bases"]["rope.freq_base_swa"] == 100.0
    assert said["softcap"]["final_logit_softcapping"] == 3.0
    assert "final_logit_softcapping" not in said["pattern"]
