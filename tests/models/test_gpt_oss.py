"""gpt-oss as it is published: experts in MXFP4, their numbers and their scales in tensors of their own."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from hetrun import LLM
from hetrun.errors import ModelFileError
from hetrun.graph import Weight
from hetrun.graph.quant import by_name
from hetrun.loader.architectures import build_graph
from hetrun.loader.hf_source import open_folder
from hetrun.loader.open_model import open_model
from hetrun.loader.weight_reader import FileReader
from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from hetrun.tools.evaluate import compare
from tests.models import cases_hf, hf, tiny

ROW = next(row for row in cases_hf.GPT_OSS if row.name == "plain")
TOKENS = tiny.random_tokens(40)
BLOCK = 32


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain row, with random experts as OpenAI's files have them."""
    path = tmp_path_factory.mktemp("gpt-oss")
    shutil.copytree(hf.folder(ROW), path, dirs_exist_ok=True)
    (file,) = path.glob("*.safetensors")
    random, tensors = torch.Generator().manual_seed(1), {}
    for name, tensor in load_file(file).items():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            tensors[name] = tensor
            continue
        experts, width, rows = tensor.shape
        blocks = (experts, rows, width // BLOCK)
        kinds = {"blocks": (0, 256, (*blocks, BLOCK // 2)), "scales": (121, 124, blocks)}
        for kind, (least, most, shape) in kinds.items():
            numbers = torch.randint(least, most, shape, generator=random, dtype=torch.uint8)
            tensors[f"{name}_{kind}"] = numbers
    save_file(tensors, file, metadata={"format": "pt"})
    said = json.loads((path / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(said))
    return path


def theirs(path: Path) -> np.ndarray:
    """transformers, which unpacks the experts to floats."""
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([TOKENS])).logits[0].float().numpy()
    return found


def test_a_folder_with_experts_in_mxfp4_is_what_transformers_reads(published: Path) -> None:
    with LLM(published, backends=["reference"], kv_type="f32") as llm:
        assert compare([theirs(published)], [llm.logits(TOKENS)]).mean_kl < 1e-4
    with LLM(published, backends=["llamacpp"], kv_type="f32") as llm:  # which rounds activations
        assert compare([theirs(published)], [llm.logits(TOKENS)]).top1 >= 0.9


def test_its_experts_are_the_same_bytes_in_a_file(published: Path, tmp_path: Path) -> None:
    file = convert_model(
        ConversionOptions(published, by_option("mxfp4_moe"), tmp_path / "x.gguf", threads=2)
    ).path
    folder, converted = open_folder(published), open_model(file)
    for part in ("gate", "up", "down"):
        found = []
        for source in (folder, converted):
            weight = source.find(f"blk.1.ffn_{part}_exps.weight")
            assert weight is not None
            assert weight.quant is by_name("MXFP4")
            found.append(read(weight))
        assert np.array_equal(found[0], found[1])
        # Rows from the middle, as experts and shares take them.
        weight = folder.find(f"blk.1.ffn_{part}_exps.weight")
        assert weight is not None
        row = weight.quant.row_bytes(weight.shape[1])
        assert np.array_equal(read(weight.rows(100, 103)), found[0][100 * row : 103 * row])


def read(weight: Weight) -> np.ndarray:
    out = np.empty(weight.nbytes, np.uint8)
    with closing(FileReader()) as reader:
        reader.read(weight, out)
    return out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
        ({"num_local_experts": 7}, "do not fit its settings"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    published: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "model"
    shutil.copytree(published, path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(ModelFileError, match=said):
        build_graph(open_folder(path))


def test_bytes_are_no_weights_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(hf.folder(next(row for row in cases_hf.LLAMA if row.name == "gqa")), path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.zeros(128, dtype=torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"output_norm\.weight' is U8; hetrun computes with F32, F16"):
        open_folder(path)
