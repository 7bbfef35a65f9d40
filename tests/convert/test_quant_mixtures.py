"""Recipes: the same types and the same bytes as llama.cpp's own quantiser makes of the same floats."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from hetrun.errors import OptionError
from hetrun.graph.quant import by_name
from hetrun.loader.formats.gguf import read_gguf
from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import (
    RECIPES,
    ModelForm,
    by_option,
    can_change,
    choose,
    use_more_bits,
)
from tests.models.hf import Row, folder
from tests.support.peer import llama_cpp
from tests.support.tiers import exhaustive

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 9, "num_attention_heads": 8}
ROWS = (
    Row("grouped", "llama", WIDE, dtype=torch.bfloat16),
    # Rows of 128 and 144: no K-quant fits the first, and no block at all the second.
    Row("narrow", "qwen2", {"tie_word_embeddings": True, "intermediate_size": 144}, dtype=torch.float16),
    Row("experts", "mixtral", {**WIDE, "num_hidden_layers": 2, "num_local_experts": 8}),
    Row("alone", "llama", {**WIDE, "num_key_value_heads": 8, "num_hidden_layers": 3}),
)
SEES_GROUPS = ("Q2_K", "IQ4_NL", "IQ4_XS")  # recipes for which it matters whether heads share KV heads
CASES = [(row, r) for row in ROWS[:3] for r in RECIPES] + [(ROWS[3], r) for r in SEES_GROUPS]
TELLING = [(row, r) for row in ROWS for r in ("Q4_K_M", "Q2_K")] + [(ROWS[3], "IQ4_NL")]


def quantise_with_llama_cpp(source: Path, target: Path, file_type: int) -> None:
    library = llama_cpp().llama_cpp
    params = library.llama_model_quantize_default_params()
    params.nthread, params.ftype = 2, file_type
    code = library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    assert code == 0


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> dict[Row, Path]:
    """Each model as a GGUF file of the type it was trained in."""
    where = tmp_path_factory.mktemp("floats")
    names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
    return {
        row: convert_model(
            ConversionOptions(folder(row), by_option(names[row.dtype]), where / f"{row}.gguf")
        ).path
        for row in ROWS
    }


@pytest.mark.parametrize(
    ("row", "recipe"),
    # The first model in every mixture, the others in those that look at experts, heads and widths.
    [pytest.param(*c, marks=() if c[0] is ROWS[0] or c in TELLING else exhaustive) for c in CASES],
    ids=str,
)
def test_same_types_and_bytes_as_llama_cpp(
    row: Row, recipe: str, floats: dict[Row, Path], tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs.gguf", tmp_path / "ours.gguf"
    quantise_with_llama_cpp(floats[row], theirs, RECIPES[recipe].number)
    report = convert_model(ConversionOptions(folder(row), RECIPES[recipe], ours, threads=2))
    a, b = read_gguf(theirs), read_gguf(ours)
    assert {n: (t.quant, t.shape) for n, t in b.tensors.items()} == {
        n: (t.quant, t.shape) for n, t in a.tensors.items()
    }
    raw_a, raw_b = theirs.read_bytes(), ours.read_bytes()
    for name, t in a.tensors.items():
        u = b.tensors[name]
        assert raw_a[t.offset : t.offset + t.nbytes] == raw_b[u.offset : u.offset + u.nbytes], name
    assert report.bytes_after == len(raw_b)
    for key in ("general.file_type", "general.quantization_version"):
        assert a.metadata[key] == b.metadata[key]


def test_what_llama_cpp_takes_for_a_70b_has_more_bits_in_its_values() -> None:
    names = {f"blk.{i}.attn_v.weight": ((128, 256), by_name("F16")) for i in range(80)}
    form = ModelForm("llama", n_layers=80, n_heads=64, n_kv_heads=8, n_experts=0)
    chosen = choose(by_option("q3_k_s"), form, names)
    assert {q.name for q in chosen.values()} == {"Q5_K"}
    other = choose(by_option("q3_k_s"), ModelForm("llama", 40, 64, 8, 0), names)
    assert {q.name for q in other.values()} == {"Q3_K"}


def test_norms_routers_and_vectors_keep_their_precision() -> None:
    assert not can_change("blk.0.attn_norm.weight", (64,))
    assert not can_change("blk.0.attn_norm.weight", (1, 64))
    assert not can_change("blk.0.ffn_gate_inp.weight", (8, 64))
    assert not can_change("blk.0.attn_q.bias", (64, 64))
    assert can_change("blk.0.attn_q.weight", (64, 64))
    assert [i for i in range(16) if use_more_bits(i, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]


def test_names_people_type() -> None:
    assert by_option("q4_k_m") is by_option("Q4_K") is RECIPES["Q4_K_M"]
    with pytest.raises(OptionError, match=r"-q: there is no type 'q4_k_x'; there are f32, f16"):
        by_option("q4_k_x")
