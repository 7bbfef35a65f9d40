"""Models that see pictures, too: their language model, as if it had been saved by itself."""

from __future__ import annotations

from collections.abc import Mapping

from hetrun.loader.hf_mapping import SEES, Config, HfModel, Setting
from hetrun.models.rope import rope_settings

OTHERS = (
    *("visual", "vision_tower", "audio_tower", "embed_vision", "embed_audio", "multi_modal_projector"),
    *("vision_adapter", "vision_projection"),
)
NOT_TEXT = tuple(f"{root}{part}." for root in ("model.", "") for part in OTHERS)
# As transformers 5 and 4 have it, the latter only in some types.
TEXT = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def text_model(hf: HfModel, tied: bool = False) -> HfModel:
    """Without what sees pictures. In a text rope's sections all turn by the same position, and so are one.
    `tied`: whether head and embeddings are one matrix where the settings do not say."""
    c = hf.config
    config = text_config(c)
    defaults: dict[str, object] = {"tie_word_embeddings": c.get_bool("tie_word_embeddings", tied)}
    kept = [name for name in hf.tensors if not name.startswith(NOT_TEXT)]
    if len(kept) < len(hf.tensors):
        defaults[SEES] = True
    tensors = {_by_itself(name): hf.tensors[name] for name in kept}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), Mapping):
            plain = {k: v for k, v in rope.items() if not k.startswith("mrope_")}
            config = config.without(key).with_defaults({key: plain})
    return HfModel(config.with_defaults(defaults), tensors)


def _by_itself(name: str) -> str:
    """A tensor's name in a model that sees nothing."""
    root = next((root for root in TEXT if name.startswith(root)), None)
    return name if root is None else TEXT[root] + name.removeprefix(root)


def text_config(c: Config) -> Config:
    """The settings of the language model, which may be all that there are."""
    return c.section("text_config") if c.has("text_config") else c


def rope_sections(c: Config, usual: tuple[int, int, int]) -> Setting:
    """How many pairs turn by time, height and width."""
    said = rope_settings(text_config(c)).get("mrope_section") or [*usual]
    if not isinstance(said, list) or len(said) != 3 or not all(type(n) is int and n >= 0 for n in said):
        c.refuse(f"mrope_section is {str(said)[:40]}, not three numbers of pairs")
    return (*map(int, said), 0)
