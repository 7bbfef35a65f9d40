"""Pictures as transformers has them: its models, their towers written as mmproj files; the same logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import PreTrainedModel

from hetrun.backend import registry
from hetrun.backend.picture_encoder import PictureSetup, PromptRows
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.loader.open_model import open_model
from hetrun.loader.vision import read_vision
from hetrun.pictures.picture import Picture
from hetrun.planner.options import Options, Wishes
from tests.models import hf
from tests.models.cases_hf import ROWS
from tests.support.picture_encoder import drawn
from tests.support.towers import add_numbers

F32 = np.ndarray
Tensors = Mapping[str, F32]
SIDE, PATCH = 16, 4  # of a picture, in pixels
PICTURE, BREAK, END = 300, 301, 302  # tokens that stand for rows, and for what is between and after them
BEFORE, AFTER = [41, 77, 52], [93, 60, 71, 45, 88]
CLOSE = 1e-2  # the error of logits, in parts of their size
MORE: Mapping[str, dict[str, object]] = {
    "gemma3": {},
    "qwen3_vl": {},
    "qwen3_5": {name: value for name, value in hf.VISION["qwen3_vl"].items() if "deepstack" not in name},
    "mistral3": {"hidden_act": "silu"},
}


def tensors_of(model: PreTrainedModel) -> dict[str, F32]:
    return {name: p.detach().float().numpy() for name, p in model.named_parameters()}


def layers(found: Tensors, root: str, names: Mapping[str, str]) -> dict[str, F32]:
    """A tower's layers; `names` of their parts, from transformers' to llama.cpp's."""
    out = {}
    for name, values in found.items():
        if not name.startswith(root):
            continue
        number, _, rest = name.removeprefix(root).partition(".")
        part, _, kind = rest.rpartition(".")
        out[f"v.blk.{number}.{names[part]}.{kind}"] = values
    return out


def both(name: str, target: str, found: Tensors) -> dict[str, F32]:
    """Weight and bias of something."""
    kinds = [kind for kind in ("weight", "bias") if f"{name}.{kind}" in found]
    assert kinds, name
    return {f"{target}.{kind}": found[f"{name}.{kind}"] for kind in kinds}


def gemma3(found: Tensors, model: PreTrainedModel) -> dict[str, F32]:
    tower, project = "model.vision_tower.", "model.multi_modal_projector."
    names = {"layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
    names |= {f"self_attn.{a}_proj": f"attn_{a}" for a in "qkv"} | {"self_attn.out_proj": "attn_out"}
    return {
        **both(f"{tower}embeddings.patch_embedding", "v.patch_embd", found),
        **both(f"{tower}embeddings.position_embedding", "v.position_embd", found),
        **layers(found, f"{tower}encoder.layers.", names),
        **both(f"{tower}post_layernorm", "v.post_ln", found),
        "mm.input_projection.weight": found[f"{project}mm_input_projection_weight"],
        "mm.soft_emb_norm.weight": found[f"{project}mm_soft_emb_norm.weight"] + 1,
    }


def qwen3_vl(found: Tensors, model: PreTrainedModel) -> dict[str, F32]:
    tower = "model.visual."
    names = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out"}
    names |= {"mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"}
    patches = found[f"{tower}patch_embed.proj.weight"]
    deeper = dict[str, F32]()
    for i, layer in enumerate(getattr(model.config.vision_config, "deepstack_visual_indexes", ())):
        for part, name in (("norm", "norm"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2")):
            deeper |= both(f"{tower}deepstack_merger_list.{i}.{part}", f"v.deepstack.{layer}.{name}", found)
    return {
        "v.patch_embd.weight": patches[:, :, 0],
        "v.patch_embd.weight.1": patches[:, :, 1],
        "v.patch_embd.bias": found[f"{tower}patch_embed.proj.bias"],
        "v.position_embd.weight": found[f"{tower}pos_embed.weight"],
        **layers(found, f"{tower}blocks.", names),
        **both(f"{tower}merger.norm", "v.post_ln", found),
        **both(f"{tower}merger.linear_fc1", "mm.0", found),
        **both(f"{tower}merger.linear_fc2", "mm.2", found),
        **deeper,
    }


def mistral3(found: Tensors, model: PreTrainedModel) -> dict[str, F32]:
    tower, project = "model.vision_tower.", "model.multi_modal_projector."
    names = {f"attention.{a}_proj": f"attn_{a}" for a in "qkv"} | {"attention.o_proj": "attn_out"}
    names |= {"attention_norm": "ln1", "ffn_norm": "ln2"}
    names |= {f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    heads = model.config.vision_config.num_attention_heads
    turned = layers(found, f"{tower}transformer.layers.", names)
    for name in [name for name in turned if "attn_q." in name or "attn_k." in name]:
        turned[name] = interleaved(turned[name], heads)
    return {
        **both(f"{tower}patch_conv", "v.patch_embd", found),
        **both(f"{tower}ln_pre", "v.pre_ln", found),
        **turned,
        "v.token_embd.img_break": found["model.language_model.embed_tokens.weight"][BREAK],
        **both(f"{project}norm", "mm.input_norm", found),
        **both(f"{project}patch_merger.merging_layer", "mm.patch_merger", found),
        **both(f"{project}linear_1", "mm.1", found),
        **both(f"{project}linear_2", "mm.2", found),
    }


def interleaved(weight: F32, heads: int) -> F32:
    """Rows in the order in which llama.cpp turns them: pairs beside each other."""
    rows, cols = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


Write = Callable[[Tensors, PreTrainedModel], dict[str, F32]]
FAMILIES: dict[str, tuple[str, str, Write, dict[str, object]]] = {
    "gemma3": ("gemma3-sees", "gemma3", gemma3, {"use_gelu": True, "vision.projector.scale_factor": 2}),
    "qwen3_vl": ("qwen3_vl-plain", "qwen3vl_merger", qwen3_vl, {"use_gelu": True}),
    "qwen3_5": ("qwen3_5_text-plain", "qwen3vl_merger", qwen3_vl, {"use_gelu": True}),
    "mistral3": (
        "mistral3-plain",
        "pixtral",
        mistral3,
        {"use_silu": True, "vision.spatial_merge_size": 2, "vision.attention.layer_norm_epsilon": 1e-5},
    ),
}


def write_mmproj(family: str, model: PreTrainedModel, path: Path) -> Path:
    _, kind, tensors, more = FAMILIES[family]
    said, writer = model.config.vision_config, GGUFWriter(None, "clip")
    numbers: dict[str, object] = {
        "has_vision_encoder": True,
        "projector_type": kind,
        "vision.image_size": SIDE,
        "vision.patch_size": PATCH,
        "vision.embedding_length": said.hidden_size,
        "vision.feed_forward_length": said.intermediate_size,
        "vision.projection_dim": model.config.text_config.hidden_size,
        "vision.block_count": getattr(said, "num_hidden_layers", None) or said.depth,
        "vision.attention.head_count": getattr(said, "num_attention_heads", None) or said.num_heads,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.image_mean": [0.5, 0.5, 0.5],
        "vision.image_std": [0.5, 0.5, 0.5],
    }
    add_numbers(writer, "clip", numbers | more)
    for name, values in tensors(tensors_of(model), model).items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- what transformers says


def pixels(picture: Picture) -> torch.Tensor:
    """[1, 3, height, width], from -1 to 1."""
    rgb = np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)
    return torch.tensor((rgb.astype(np.float32) / 255 - 0.5) / 0.5).permute(2, 0, 1)[None]


def in_patches(image: torch.Tensor) -> torch.Tensor:
    """As Qwen's processor gives them: two moments of each, four that become one row beside each other."""
    n = image.shape[-1] // PATCH
    twice = image.repeat(2, 1, 1, 1).reshape(1, 2, 3, n // 2, 2, PATCH, n // 2, 2, PATCH)
    return twice.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(n * n, -1)


def rows_of(family: str, side: int) -> list[int]:
    """The tokens that stand for a picture."""
    n = side // PATCH // 2
    if family == "mistral3":
        return [*([*[PICTURE] * n, BREAK] * n)[:-1], END]
    return [PICTURE] * (n * n)


def by_transformers(family: str, model: PreTrainedModel, picture: Picture) -> F32:
    """Logits of the tokens after the picture."""
    ids = [*BEFORE, *rows_of(family, picture.width), *AFTER]
    kinds = torch.tensor([[int(i == PICTURE) for i in ids]])
    image = pixels(picture)
    n = picture.width // PATCH
    qwen = {"image_grid_thw": torch.tensor([[1, n, n]]), "mm_token_type_ids": kinds}
    qwen["pixel_values"] = in_patches(image)
    more: dict[str, torch.Tensor] = {
        "gemma3": {"pixel_values": image, "token_type_ids": kinds},
        "qwen3_vl": qwen,
        "qwen3_5": qwen,
        "mistral3": {
            "pixel_values": image,
            "image_sizes": torch.tensor([[picture.height, picture.width]]),
        },
    }[family]
    with torch.no_grad():
        found: F32 = model(input_ids=torch.tensor([ids]), **more).logits[0].numpy()
    return found[-len(AFTER) :]


# --- what hetrun says


def by_hetrun(family: str, folder: Path, mmproj: Path, picture: Picture) -> F32:
    vision = read_vision(mmproj)
    encoder = registry.picture_encoder().open(PictureSetup(vision, 1, lambda mark: [1]))
    try:
        (piece,) = [p for p in encoder.lay_out(picture) if isinstance(p, PromptRows)]
        rows = np.ascontiguousarray(encoder.encode(piece), np.float32)
    finally:
        encoder.close()
    options = Options(Wishes(threads=1), ("reference",), ctx=128, kv_type="f32", planner="static")
    options = replace(options, spatial=vision.spatial, whole=vision.whole)
    model = PlannedModel(open_model(folder), options)
    try:
        seq, place = model.alloc(), 0

        def take(ids: Sequence[int], embedded: F32 | None = None) -> F32:
            nonlocal place
            places = np.repeat(np.arange(len(ids))[:, None], 3, 1) if embedded is None else piece.places
            chunk = Chunk(
                *(seq, np.array(ids), np.arange(len(ids))),
                embedded=embedded,
                places=place + places,
                whole=embedded is not None and piece.whole,
            )
            place += len(ids) if embedded is None else piece.advance
            return model.step(Step((chunk,))).copy()

        take(BEFORE)
        take([0] * len(rows), rows)
        last = [END, *AFTER] if family == "mistral3" else AFTER
        return take(last)[-len(AFTER) :]
    finally:
        model.close()


def model_of(family: str, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """As models are published: a tower's feed-forward part is wider than the rest, and Pixtral's has SiLU."""
    vision = hf.VISION.get(family, {}) | MORE[family] | {"intermediate_size": 48}
    monkeypatch.setitem(hf.VISION, family, vision)
    row = next(row for row in ROWS if str(row) == FAMILIES[family][0])
    model = hf.random_model(replace(row, model_type=family))
    model.config.image_token_id = PICTURE
    return model.eval()


@pytest.mark.parametrize(
    ("family", "side"),
    [
        ("gemma3", SIDE),
        *((family, side) for family in ("qwen3_vl", "qwen3_5", "mistral3") for side in (32, 40)),
    ],
)
def test_the_logits_of_transformers(
    family: str, side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = model_of(family, monkeypatch), tmp_path / "model"
    model.save_pretrained(folder)
    hf.write_tokenizer(folder)
    mmproj = write_mmproj(family, model, tmp_path / "mmproj.gguf")
    right = by_transformers(family, model, drawn(side, side, seed=3))
    found, other = (by_hetrun(family, folder, mmproj, drawn(side, side, seed)) for seed in (3, 4))
    size = np.square(right).sum()
    assert np.square(other - right).sum() > 100 * CLOSE**2 * size, "another picture is another thing"
    assert np.square(found - right).sum() <= CLOSE**2 * size
