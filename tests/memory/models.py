"""The models of the modes: SmolLM2, and synthetic ones, each made when it is first asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tests.support import towers
from tests.tools.make_model import SHAPES, Making, Shape, smollm2_file, write_model

ALIKE = Making(same_layers=True)  # sooner made
PICTURE_FAMILY = "qwen3vl"
TINY = [f"tiny-{seed}" for seed in range(4)]


class SyntheticModel(NamedTuple):
    """The options for `make_model`."""

    shape: Shape
    quant: str
    seed: int = 0
    making: Making = ALIKE


SYNTHETIC = {
    "1b": SyntheticModel(SHAPES["1b"], "Q4_0"),
    "mixture": SyntheticModel(replace(SHAPES["moe"], layers=4), "Q4_0"),
    "mtp": SyntheticModel(replace(SHAPES["qwen35-0.8b"], layers=8, predicting=1), "Q4_0"),
    "wide": SyntheticModel(replace(SHAPES["1b"], layers=2), "F16"),
    **{name: SyntheticModel(SHAPES["tiny"], "Q8_0", seed, Making()) for seed, name in enumerate(TINY)},
}


class ModelFolder:
    """Models by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, name: str) -> Path:
        """The file of a model."""
        if name == "smollm2":
            return smollm2_file()
        path = self.folder / f"{name}.gguf"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_model(path, *SYNTHETIC[name])
        return path

    def pair(self) -> towers.Seeing:
        """A model that reads pictures, and its tower."""
        folder = self.folder / "pictures"
        if not folder.exists():
            return towers.write_pair(PICTURE_FAMILY, folder)
        text, mmproj = sorted(folder.glob("*.gguf"), key=lambda path: path.name.startswith("mmproj"))
        return towers.Seeing(text, mmproj)
