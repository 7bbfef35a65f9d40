"""The synthetic benchmark models: sizes, quantisation mixes, and llama.cpp's opinion of the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants

from hetrun.loader.architectures import build_graph
from hetrun.loader.open_model import open_model
from tests.models.test_placement import devices
from tests.support.peer import llama_cpp
from tests.support.rig import rig_of
from tests.support.tiers import first
from tests.tools import make_model
from tests.tools.make_model import LARGE, MIXES, SHAPES, Making, Shape, matrices


@pytest.mark.parametrize(
    ("shape", "quant", "megabytes"),
    [
        ("1b", "Q4_0", 632),
        ("1b", "Q4_K_M", 669),
        ("1b", "Q8_0", 1143),
        ("8b", "Q4_0", 4094),
        ("moe", "Q4_0", 2951),
    ],
)
def test_sizes(shape: str, quant: str, megabytes: int) -> None:
    tensors = sum(m.nbytes for m in matrices(SHAPES[shape], MIXES[quant]))
    tokenizer = 2e6
    assert (tensors + tokenizer) / 1e6 == pytest.approx(megabytes, abs=1)


def test_q4_k_m_gives_some_layers_more_bits() -> None:
    types = {m.name: m.type.name for m in matrices(SHAPES["1b"], MIXES["Q4_K_M"])}
    larger = [i for i in range(16) if types[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert larger == [0, 1, 4, 7, 10, 13, 14, 15]
    assert types["token_embd.weight"] == "Q6_K"
    assert types["blk.0.attn_q.weight"] == "Q4_K"


@pytest.mark.slow
@pytest.mark.parametrize("quant", first(sorted(MIXES, key="Q4_K_M".__ne__)))
def test_llama_cpp_runs_what_was_written(quant: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    assert make_model.main(["--shape", "tiny", "--quant", quant, "-o", str(path)]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]
    model = llama_cpp().Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    try:
        tokens = model.tokenize(b"The cache holds sixteen lines.", add_bos=False)
        assert model.detokenize(tokens) == b"The cache holds sixteen lines."
        model.eval(tokens)
        logits = np.array(model.scores[: len(tokens)])
    finally:
        model.close()
    assert logits.shape == (len(tokens), SHAPES["tiny"].vocab)
    assert 1 < logits.std() < 5


@pytest.mark.slow
def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first.gguf", "again.gguf", "other.gguf"))
    for path, seed in ((first, "1"), (again, "1"), (other, "2")):
        make_model.main(["--shape", "tiny", "--seed", seed, "-o", str(path)])
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()


@pytest.mark.slow
def test_weights_are_gaussian_behind_the_quantisation(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_model.main(["--shape", "tiny", "--quant", "Q4_K_M", "-o", str(path)])
    tensors = {t.name: t for t in GGUFReader(path).tensors}
    down = tensors["blk.0.ffn_down.weight"]
    values = quants.dequantize(down.data, GGMLQuantizationType(down.tensor_type))
    assert values.shape == (256, 512)
    assert values.std() == pytest.approx(512**-0.5, rel=0.05)
    assert np.linalg.matrix_rank(values) == 256


@pytest.mark.slow
def test_a_missing_folder_is_one_clear_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_model.main(["-o", str(tmp_path / "nowhere" / "tiny.gguf")]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "quant", "gigabytes"),
    [
        ("qwen35-35b-a3b", "Q4_K_M", 20.9),
        ("qwen35moe-8g", "Q4_K_M", 6.6),  # 4 layers more would be 8.6
        ("qwen3moe-8g", "Q4_K_M", 8.0),
        ("gpt-oss-20b", "MXFP4", 12.1),
        ("gemma4-26b-a4b-like", "Q4_K_M", 16.4),
    ],
)
def test_sizes_of_large_mixtures(shape: str, quant: str, gigabytes: float) -> None:
    tensors = sum(m.nbytes for m in matrices(SHAPES[shape], MIXES[quant]))
    assert tensors / 1e9 == pytest.approx(gigabytes, abs=0.1)


def test_rows_that_k_quants_cannot_hold_are_of_llama_cpps_other_types() -> None:
    types = {m.name: m.type.name for m in matrices(SHAPES["gemma4-26b-a4b-like"], MIXES["Q4_K_M"])}
    assert types["blk.0.ffn_down_exps.weight"] == "Q8_0"
    assert types["blk.4.ffn_down_exps.weight"] == "Q5_0"
    assert types["blk.4.ffn_up_exps.weight"] == "Q4_K"


def test_only_experts_of_a_mixture_are_mxfp4() -> None:
    types = {m.name: m.type.name for m in matrices(SHAPES["gpt-oss-20b"], MIXES["MXFP4"])}
    assert {name for name, kind in types.items() if kind == "MXFP4"} == {
        f"blk.{i}.ffn_{part}_exps.weight" for i in range(24) for part in ("gate", "up", "down")
    }
    assert types["token_embd.weight"] == types["output.weight"] == types["blk.0.attn_q.weight"] == "Q8_0"


@pytest.mark.slow
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(
    ("shape", "quant"),
    [
        ("qwen3moe-tiny", "Q4_K_M"),
        ("odd-tiny", "Q4_K_M"),
        ("odd-tiny", "MXFP4"),
        ("qwen35moe-tiny", "Q4_K_M"),
        ("gpt-oss-tiny", "MXFP4"),
    ],
)
def test_hetrun_and_llama_cpp_run_mixtures(shape: str, quant: str, pooled: bool, tmp_path: Path) -> None:
    path, making = tmp_path / "made.gguf", Making(real_routing=True, large=0 if pooled else LARGE)
    make_model.write_model(path, small_cuts(SHAPES[shape]), quant, 0, making)
    model = llama_cpp().Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    try:
        tokens = model.tokenize(b"The cache holds sixteen lines.", add_bos=False)
        model.eval(tokens)
        theirs = np.array(model.scores[: len(tokens)])
    finally:
        model.close()
    made = rig_of(build_graph(open_model(path), 64), devices(["reference"]), context=64)
    ours = made.logits(made.kv.alloc(), tokens)
    made.close()
    said = theirs > theirs.max() - 20  # not those that no text has
    assert np.corrcoef(ours[said], theirs[said])[0, 1] > 0.98


def small_cuts(shape: Shape) -> Shape:
    """With matrices that are large enough to come from pools."""
    return replace(shape, experts=64, used=4)


@pytest.mark.slow
def test_a_large_file_has_experts_that_differ_and_is_the_same_for_a_seed(tmp_path: Path) -> None:
    shape = small_cuts(SHAPES["qwen3moe-tiny"])
    paths = [tmp_path / f"{i}.gguf" for i in range(2)]
    for path in paths:
        make_model.write_model(path, shape, "Q4_K_M", 3, Making(large=0))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    tensors = {t.name: t for t in GGUFReader(paths[0]).tensors}
    experts = [bytes(e) for i in range(2) for e in tensors[f"blk.{i}.ffn_up_exps.weight"].data]
    assert len(experts) == len({*experts}) == 128
    up = tensors["blk.0.ffn_up_exps.weight"]
    values = quants.dequantize(up.data, GGMLQuantizationType(up.tensor_type))
    assert values.std() == pytest.approx(256**-0.5, rel=0.05)


def test_nothing_is_routed_where_there_is_no_mixture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_model.main(["--routing", "real", "-o", str(tmp_path / "tiny.gguf")]) == 2
    assert "no mixture" in capsys.readouterr().err
