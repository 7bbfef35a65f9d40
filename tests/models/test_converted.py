"""A converted file, in hetrun and in llama.cpp itself, against transformers and the folder it came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from hetrun import LLM
from hetrun.errors import ModelFileError
from hetrun.loader.hf_source import open_folder
from hetrun.models import gpt_oss
from hetrun.tools.convert import ConversionOptions, ConversionReport, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from hetrun.tools.evaluate import compare, evaluate
from tests.models import cases_hf, hf, tiny
from tests.models.hf import Row
from tests.models.tiny import F32
from tests.support.peer import llama_cpp

TOKENS = tiny.random_tokens(60)


@cache
def reason_against(row: Row) -> str:
    """Why GGUF cannot say what this model is, where it cannot."""
    return open_folder(hf.folder(row)).settings.get_str("gguf.inexpressible", "")


@pytest.fixture(scope="module")
def where() -> Iterator[Path]:
    with TemporaryDirectory(prefix="hetrun-converted-") as folder:
        yield Path(folder)


@cache
def converted(row: Row, where: Path) -> ConversionReport:
    """The row as a file, written once; with the numbers of the folder where last bits would flip
    choices of experts."""
    sensitive = "shared_expert_intermediate_size" in row.config or row in cases_hf.SENSITIVE
    kind = "f32" if sensitive else "f16"
    return convert_model(ConversionOptions(hf.folder(row), by_option(kind), where / f"{row}.gguf", threads=2))


@pytest.mark.parametrize("row", cases_hf.only(cases_hf.MANY, cases_hf.representative(cases_hf.ROWS)))
def test_the_file_says_what_the_folder_says(row: Row, where: Path, tmp_path: Path) -> None:
    """In hetrun and in llama.cpp itself; what GGUF cannot say is refused."""
    if reason_against(row):
        with pytest.raises(ModelFileError, match="cannot be converted: "):
            convert_model(ConversionOptions(hf.folder(row), by_option("f16"), tmp_path / "x.gguf"))
        assert not list(tmp_path.iterdir())
        return
    report, expected = converted(row, where), hf.logits(hf.folder(row), TOKENS)
    with LLM(report.path, backends=["llamacpp"], kv_type="f32", ctx=row.ctx) as llm:
        assert compare([expected], [llm.logits(TOKENS)]).mean_kl < 1e-4
    n = len(TOKENS)
    if report.notes == (gpt_oss.ROUNDS,):  # what llama.cpp computes is the model whose ramp is rounded
        rope = row.config["rope_parameters"] | {"truncate": True}
        rounded = replace(row, name=f"{row.name}-rounded", config={**row.config, "rope_parameters": rope})
        expected = hf.logits(hf.folder(rounded), TOKENS)
    elif report.notes:  # llama.cpp does not heed the window, so they agree as long as it holds everything
        n = int(row.config["sliding_window"])
        assert report.notes[0].startswith(f"the model sees {n} tokens at a time in some layers")
    theirs = llama_cpp_logits(report.path, TOKENS, row.ctx)
    assert compare([expected[:n]], [theirs[:n]]).mean_kl < 1e-4


@pytest.mark.slow
def test_most_models_can_be_said() -> None:
    others = [row for row in cases_hf.ROWS if reason_against(row)]
    said = {row.model_type for row in cases_hf.ROWS if row not in others}
    assert said == {row.model_type for row in cases_hf.ROWS} - {"opt"}
    assert len(cases_hf.ROWS) > 4 * len(others)


def llama_cpp_logits(path: Path, tokens: Sequence[int], context: int | None) -> F32:
    """[tokens, vocabulary], by llama.cpp with keys and values in float32."""
    c = llama_cpp().llama_cpp
    model = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
    assert model, "llama.cpp cannot load the file"
    params = c.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = context or 256, len(tokens), len(tokens)
    params.type_k = params.type_v = c.GGML_TYPE_F32
    params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_threads = params.n_threads_batch = 1
    params.swa_full = True
    made = c.llama_init_from_model(model, params)
    assert made, "llama.cpp cannot make a context"
    batch = c.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    assert c.llama_decode(made, batch) == 0
    n_vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    found = np.ctypeslib.as_array(c.llama_get_logits(made), (len(tokens), n_vocab)).copy()
    c.llama_batch_free(batch)
    c.llama_free(made)
    c.llama_model_free(model)
    return found


def test_llama_cpp_is_given_the_context_that_decides_on_longrope(where: Path) -> None:
    """Its factors change at 256 tokens; the text is shorter, and the model open for 1024."""
    row = next(row for row in cases_hf.PHI3 if row.name == "longrope-short")
    path, text = converted(row, where).path, "the rain on the hill and then in the inn " * 40
    found = evaluate(path, text, "llama.cpp", tokens=200, backends=["reference"], kv_type="f32")
    assert found.tokens == 200
    assert found.mean_kl < 1e-3
