"""The synthetic benchmark models: sizes, quantisation mixes, and llama.cpp's opinion of the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants

from tests.support.peer import llama_cpp
from tests.support.tiers import first
from tests.tools import make_model
from tests.tools.make_model import MIXES, SHAPES, matrices


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
