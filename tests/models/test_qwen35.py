"""What is Qwen 3.5's own: models that see pictures, layers that predict tokens beyond the next, other orders
of heads, and settings that no delta net can have."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from hetrun import LLM
from hetrun.errors import ModelFileError
from hetrun.executor.plan_prediction import predict_plans
from hetrun.graph.ops import Attention, DeltaNet
from hetrun.loader.architectures import build_graph
from hetrun.loader.hf_source import open_folder
from hetrun.loader.open_model import open_model
from hetrun.planner.options import Options, Wishes
from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from tests.models import cases_hf, hf, tiny
from tests.models.hf import SIZES

ROWS = {str(row): row for row in cases_hf.HYBRID}
PLAIN = ROWS["qwen3_5_text-plain"]
TOKENS = tiny.random_tokens(50)
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published form: a language model inside of one that sees."""
    path = tmp_path_factory.mktemp("qwen") / "seeing"
    torch.manual_seed(1)
    text = {**SIZES, **PLAIN.config, "tie_word_embeddings": False}
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(path)
    hf.write_tokenizer(path)
    return path


def test_the_language_model_of_one_that_sees(seeing: Path) -> None:
    assert "text_config" in json.loads((seeing / "config.json").read_text())
    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(seeing, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0].numpy()
    with LLM(seeing, backends=["reference"], kv_type="f32") as llm:
        found = llm.logits(TOKENS)
    assert np.abs(found - expected).max() < 1e-3
    assert (found.argmax(-1) == expected.argmax(-1)).all()
    options = Options(Wishes(), backends=("reference",))
    assert "vision tower is left out" in " ".join(predict_plans(open_model(seeing), options).notes)
    assert "vision" not in predict_plans(open_model(hf.folder(PLAIN)), options).to_text()


def test_which_layers_have_attention() -> None:
    graph = build_graph(open_folder(hf.folder(PLAIN)))
    kinds = [type(op.attrs) for op in graph.ops if isinstance(op.attrs, (Attention, DeltaNet))]
    assert kinds == [DeltaNet, DeltaNet, DeltaNet, Attention]
    ends = build_graph(open_folder(hf.folder(ROWS["qwen3_5_text-layer-types"])))
    kinds = [type(op.attrs) for op in ends.ops if isinstance(op.attrs, (Attention, DeltaNet))]
    assert kinds == [Attention, DeltaNet, Attention, DeltaNet]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen") / "plain.gguf"
    return convert_model(ConversionOptions(hf.folder(PLAIN), by_option("f32"), path, threads=1)).path


Changes = dict[str, object]


def rewritten(file: Path, to: Path, settings: Changes, layers: int = 0, predicting: int = 0) -> Path:
    """The file with other settings, and copies of its last layer after it."""
    reader = GGUFReader(file)
    writer = GGUFWriter(to, "qwen35")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = settings.get(name.removeprefix("qwen35."), field.contents())
        sub = field.types[1] if len(field.types) > 1 else None
        if value is not None:
            writer.add_key_value(name, value, field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
        for i in range(layers):
            if tensor.name.startswith("blk.3."):
                writer.add_tensor(tensor.name.replace("blk.3.", f"blk.{4 + i}.", 1), tensor.data)
    if layers or predicting:
        writer.add_uint32("qwen35.nextn_predict_layers", layers or predicting)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def test_layers_that_predict_tokens_beyond_the_next_are_left_out(file: Path, tmp_path: Path) -> None:
    settings: Changes = {"block_count": 5, "attention.recurrent_layers": None, "full_attention_interval": 4}
    more = rewritten(file, tmp_path / "more.gguf", settings, layers=1)
    found = []
    for path in (file, more):
        with LLM(path, backends=["llamacpp"], kv_type="f32") as llm:
            found.append(llm.logits(TOKENS))
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ssm.group_count": 3}, "4 heads of v cannot share 3 of k"),
        ({"ssm.group_count": 0}, "ssm.group_count"),
        ({"ssm.time_step_rank": 1 << 20}, "ssm.time_step_rank"),
        ({"ssm.time_step_rank": 8}, "but the settings say"),
        ({"ssm.inner_size": 130}, "ssm.inner_size is 130, which 4 heads cannot share"),
        ({"ssm.inner_size": 256}, "but the settings say"),
        ({"ssm.state_size": 1 << 30}, "ssm.state_size"),
        ({"ssm.state_size": 64}, "but the settings say"),
        ({"ssm.conv_kernel": 1}, "ssm.conv_kernel"),
        ({"ssm.conv_kernel": 5}, "but the settings say"),
        ({"ssm.conv_kernel": None}, "ssm.conv_kernel"),
        ({"full_attention_interval": 0, "attention.recurrent_layers": None}, "full_attention_interval"),
        ({"full_attention_interval": 2, "attention.recurrent_layers": None}, "attn_k.weight is missing"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_settings_that_no_model_has(file: Path, tmp_path: Path, settings: Changes, said: str) -> None:
    broken = rewritten(file, tmp_path / "broken.gguf", settings)
    with pytest.raises(ModelFileError, match=said):
        build_graph(open_model(broken))


@pytest.mark.parametrize("layers", [4, 1 << 10])
def test_more_predicting_layers_than_layers(file: Path, tmp_path: Path, layers: int) -> None:
    broken = rewritten(file, tmp_path / "broken.gguf", {}, predicting=layers)
    with pytest.raises(ModelFileError, match="predict tokens beyond the next"):
        build_graph(open_model(broken))
