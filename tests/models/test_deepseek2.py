"""What is DeepSeek 2's own: one short row of each token, matrices of single heads, and files that are left to
llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from numpy.typing import NDArray
from safetensors.numpy import load_file

from hetrun import LLM, SamplingParams
from hetrun.errors import ModelFileError
from hetrun.graph import Weight, kv_shapes
from hetrun.graph.ops import Attention, Rope
from hetrun.graph.quant import by_name
from hetrun.loader.architectures import build_graph, is_known
from hetrun.loader.hf_source import open_folder
from hetrun.loader.open_model import open_model
from hetrun.loader.weight_reader import FileReader
from hetrun.memory.kv.cache import token_bytes
from hetrun.models import deepseek2
from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from tests.models import cases_hf, hf, tiny
from tests.models.settings import Settings

ROWS = {str(row): row for row in cases_hf.DEEPSEEK2}
PLAIN = ROWS["deepseek_v2-plain"]
LITE = {
    "vocab_size": 64,
    "context_length": 256,
    "block_count": 2,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.key_length": 48,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 16,
    "expert_count": 4,
    "expert_used_count": 2,
}


def test_the_cache_holds_the_latent_row_and_what_rope_turns() -> None:
    graph = build_graph(open_folder(hf.folder(PLAIN)))
    (row,) = {token_bytes(shape, by_name("F16")) for shape in kv_shapes(graph).values()}
    assert row == 2 * (cases_hf.LATENT["kv_lora_rank"] + cases_hf.LATENT["qk_rope_head_dim"])


def test_heads_get_their_matrices() -> None:
    """What the folder has of keys and values in one, turned and apart."""
    source, c = open_folder(hf.folder(PLAIN)), cases_hf.LATENT
    weights = {w.name: w for w in source.weights()}
    found = [
        numbers(weights[f"blk.0.attn_{part}_b.weight"]).reshape(4, rows, -1)
        for part, rows in (("k", 64), ("v", 32))
    ]
    both = published()["model.layers.0.self_attn.kv_b_proj.weight"]
    heads = both.reshape(4, c["qk_nope_head_dim"] + c["v_head_dim"], c["kv_lora_rank"])
    np.testing.assert_array_equal(found[0], heads[:, : c["qk_nope_head_dim"]].transpose(0, 2, 1))
    np.testing.assert_array_equal(found[1], heads[:, c["qk_nope_head_dim"] :])


def numbers(weight: Weight) -> NDArray[np.float32]:
    out = np.empty(weight.nbytes, np.uint8)
    FileReader().read(weight, out)
    return out.view("<f4")


def test_yarn_makes_scores_larger_and_not_what_is_turned() -> None:
    settings = Settings(
        {
            **LITE,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        }
    )
    graph = deepseek2.build(settings.builder(), settings)
    attention = next(op.attrs for op in graph.ops if isinstance(op.attrs, Attention))
    rope = next(op.attrs for op in graph.ops if isinstance(op.attrs, Rope))
    assert attention.scale == pytest.approx((1 + 0.0707 * np.log(40)) ** 2 / 24**0.5)
    assert rope.attn_factor * (1 + 0.1 * np.log(40)) == pytest.approx(1)


def test_larger_scores_with_other_betas_are_refused() -> None:
    scaled = cases_hf.rope("yarn", **cases_hf.YARN, **cases_hf.MSCALE, **cases_hf.BETAS)
    row = hf.Row("betas", "deepseek_v3", {**cases_hf.LATENT, "n_group": 1, "topk_group": 1, **scaled})
    with pytest.raises(
        ModelFileError, match="mscale_all_dim, which hetrun does for YaRN with its usual betas"
    ):
        open_folder(hf.folder(row))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention.key_length": 64}, "a key of 64 columns is not 32 latent ones and 16 of rope"),
        ({"attention.head_count_kv": 2}, "a latent row is one head of keys, not 2"),
        ({"attention.key_length_mla": 16}, "is not 32 latent ones"),
    ],
)
def test_sizes_that_do_not_fit_are_said(changed: dict[str, int], said: str) -> None:
    settings = Settings({**LITE, **changed})
    with pytest.raises(ModelFileError, match=said):
        deepseek2.build(settings.builder(), settings)


def test_an_old_file_is_left_to_llama_cpp(tmp_path: Path) -> None:
    """Its matrices of keys and values are not apart."""
    new = tmp_path / "new.gguf"
    convert_model(ConversionOptions(hf.folder(PLAIN), by_option("f32"), new))
    old = not_apart(new, tmp_path / "old.gguf")
    assert is_known(open_model(new))
    assert not is_known(open_model(old))
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompt = tiny.random_tokens(12)
    answers = []
    for path in (new, old):
        with LLM(path, threads=1) as llm:
            answers.append(llm.generate([prompt], params)[0].tokens)
    assert answers[0] == answers[1]


def published() -> dict[str, NDArray[np.float32]]:
    """The folder's tensors."""
    return load_file(next(hf.folder(PLAIN).glob("*.safetensors")))


def not_apart(path: Path, target: Path) -> Path:
    """A copy of a GGUF file as llama.cpp's converter wrote them until 2025."""
    reader, writer = GGUFReader(path), GGUFWriter(target, "deepseek2")
    c, both = cases_hf.LATENT, published()
    head = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    changed = {"head_count_kv": 4, "key_length": head, "value_length": c["v_head_dim"]}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name.endswith("_mla"):
            continue
        sub = field.types[-1] if len(field.types) > 1 else None
        value = changed.get(name.removeprefix("deepseek2.attention."), field.contents())
        writer.add_key_value(name, value, field.types[0], sub)
    for tensor in reader.tensors:
        if tensor.name.endswith("attn_k_b.weight"):
            i = tensor.name.split(".")[1]
            whole = both[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
            writer.add_tensor(f"blk.{i}.attn_kv_b.weight", whole)
        elif not tensor.name.endswith("attn_v_b.weight"):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_kimi_k2_is_read_as_deepseek_3(tmp_path: Path) -> None:
    row = ROWS["deepseek_v3-plain"]
    for file in hf.folder(row).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "kimi_k2"}))
    tokens = tiny.random_tokens(20)
    answers = []
    for path in (hf.folder(row), tmp_path):
        with LLM(path, backends=["reference"], kv_type="f32") as llm:
            answers.append(llm.logits(tokens))
    assert np.array_equal(answers[0], answers[1])
