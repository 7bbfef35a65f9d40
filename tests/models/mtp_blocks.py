"""Tiny models with a block inside that predicts one more token, as transformers has its parts and as it is
published."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from tests.models import cases_hf, hf

ROWS = {str(row): row for row in (*cases_hf.HYBRID, *cases_hf.GLM4_MOE, *cases_hf.DEEPSEEK2)}
PLAIN = ROWS["qwen3_5_text-plain"]


class Family(NamedTuple):
    """What transformers calls the parts of a model, and how its block is published."""

    row: hf.Row
    module: str
    rotary: str
    parts: str  # what the names of its layers and norms begin with
    names: Mapping[str, str] = {}
    axes: int = 1  # that positions have

    def part(self, name: str, prefix: str | None = None) -> Callable[..., torch.nn.Module]:
        module = import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        found: type[torch.nn.Module] = getattr(module, f"{self.parts if prefix is None else prefix}{name}")
        return found

    def published(self, block: Block) -> dict[str, torch.Tensor]:
        """Its tensors under the names that they have in folders."""
        found = {}
        for name, weight in block.state_dict().items():
            if "rotary" not in name:
                first, _, rest = name.partition(".")
                to = self.names.get(first, f"mtp.{first}")
                rest = rest if to.startswith("mtp.") else rest.removeprefix("0.")
                found[".".join(part for part in (to, rest) if part)] = weight.contiguous()
        return found


def after_the_last(layers: int) -> dict[str, str]:
    """As GLM and DeepSeek have it: a layer like others, with more in it."""
    layer = f"model.layers.{layers}"
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    return {
        "layers": layer,
        "norm": f"{layer}.shared_head.norm",
        **{ours: f"{layer}.{theirs}" for ours, theirs in names.items()},
    }


QWEN = Family(PLAIN, "qwen3_5", "Qwen3_5TextRotaryEmbedding", "Qwen3_5", axes=3)
FAMILIES = {
    "qwen35": QWEN,
    **{
        row: Family(ROWS[row], module, f"{parts}RotaryEmbedding", parts, after_the_last(3))
        for row, module, parts in (
            ("glm4_moe-plain", "glm4_moe", "Glm4Moe"),
            ("glm4_moe_lite-plain", "glm4_moe_lite", "Glm4MoeLite"),
            ("deepseek_v3-groups", "deepseek_v3", "DeepseekV3"),
        )
    },
}


class Block(torch.nn.Module):
    """The block as it is published, of transformers' own parts."""

    def __init__(self, config: PretrainedConfig, family: Family) -> None:
        super().__init__()
        self.axes = family.axes
        self.rotary = family.part(family.rotary, "")(config)
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        last = config.layer_types.index("full_attention") if family is QWEN else config.num_hidden_layers - 1
        self.layers = torch.nn.ModuleList([family.part("DecoderLayer")(config, last)])
        norms = [family.part("RMSNorm")(config.hidden_size, config.rms_norm_eps) for _ in range(3)]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms

    def forward(self, embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)], -1)
        n = both.shape[1]
        places = torch.arange(n)[None]
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        x = self.fc(both)
        turns = self.rotary(x, places[None].expand(3, 1, n) if self.axes == 3 else places)
        out = self.layers[0](x, position_embeddings=turns, attention_mask=mask, position_ids=places)
        hidden: torch.Tensor = self.norm(out[0] if isinstance(out, tuple) else out)
        return hidden


def random_block(model: PreTrainedModel, family: Family) -> Block:
    block, random = Block(model.config, family), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in block.parameters():
            noise = torch.randn(weight.shape, generator=random)
            weight.copy_(noise * weight.shape[-1] ** -0.5 if weight.ndim > 1 else noise * 0.2)
    return block.eval()


class Published(NamedTuple):
    """A model with a block, as transformers has both, and as they are published and converted."""

    model: PreTrainedModel
    block: Block
    folder: Path
    file: Path


@cache
def published(name: str) -> Published:
    family = FAMILIES[name]
    model = AutoModelForCausalLM.from_pretrained(
        hf.folder(family.row), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    path = Path(tempfile.mkdtemp(prefix="mtp-", dir=hf.folder(family.row).parent))
    for file in hf.folder(family.row).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    block = random_block(model, family)
    weights = {**load_file(path / "model.safetensors"), **family.published(block)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    gguf = path.with_suffix(".gguf")
    return Published(
        model, block, path, convert_model(ConversionOptions(path, by_option("f32"), gguf, threads=1)).path
    )
