"""Pictures on devices: a tower that is only found never takes attention from a device that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrun.api.local_model import vision_of
from hetrun.config import Settings
from hetrun.loader.open_model import open_model
from hetrun.loader.vision import NoVision, Vision
from tests.support.towers import write_pair

DEVICE = ("cuda", "llamacpp")


@pytest.mark.parametrize("backends", [None, ("llamacpp",), DEVICE])
@pytest.mark.parametrize("family", ["gemma3", "qwen35"])
def test_a_tower_that_is_found(tmp_path: Path, family: str, backends: tuple[str, ...] | None) -> None:
    text, mmproj = write_pair(family, tmp_path)
    source = open_model(text)
    found = vision_of(source, Settings.resolve(model=str(text), backends=backends))
    if family == "gemma3" and backends == DEVICE:
        assert isinstance(found, NoVision)
        assert "which cuda cannot compute" in found.reason
        assert f"--mmproj {mmproj}" in found.reason
    else:
        assert isinstance(found, Vision)
    named = vision_of(source, Settings.resolve(model=str(text), backends=backends, mmproj=str(mmproj)))
    assert isinstance(named, Vision), "who names it wants it"
