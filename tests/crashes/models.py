"""The models that operations work with, made once, and a folder for what a process makes for itself."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.faults.models import make as make_small

FOLDER = "CRASHES_MODELS"
MODEL_OPTIONS: Mapping[str, Any] = {
    "backends": ["llamacpp"],
    "planner": "static",
    "deterministic": True,
    "ctx": 256,
    "ubatch": 32,
    "spec": "off",
    "ram": 1 << 30,
}
PROMPTS = (tuple(range(5, 65)), tuple(range(80, 150)))


def make(folder: Path) -> Path:
    """A GGUF file, and a folder with safetensors."""
    return make_small(folder)


def make_mixture(folder: Path) -> None:
    """A mixture before and after it is repacked."""
    from hetrun.tools.convert.reorder import RepackOptions, repack_model
    from tests.convert.test_expert_records import QWEN3, merged

    shutil.copyfile(merged(QWEN3), folder / "mixture.gguf")
    repack_model(RepackOptions(folder / "mixture.gguf", folder / "repacked.gguf"))


def models() -> Path:
    """Where they are, in a process of a trial."""
    return Path(os.environ[FOLDER])


@cache
def room() -> Path:
    """A folder of this process; it is removed with the models."""
    return Path(tempfile.mkdtemp(prefix="room-", dir=models()))
