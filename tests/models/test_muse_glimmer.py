"""What Muse Glimmer's folders may say that hetrun would not do justice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetrun.errors import ModelFileError
from hetrun.loader.formats.hf_folder import read_folder
from hetrun.loader.hf_mapping import Config, HfModel
from hetrun.models import muse_glimmer
from tests.models import cases_hf, hf


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({"layer_rope_theta": [0, 500000.0, 1e6, 500000.0, 0]}, "layer_rope_theta has 1e+06"),
        ({"layer_types": ["full_attention"] * 4}, "5 strings"),
        ({"sliding_window": None}, "no sliding_window"),
    ],
)
def test_settings_that_hetrun_would_not_do_justice_are_refused(changed: dict[str, Any], says: str) -> None:
    folder = read_folder(hf.folder(cases_hf.MUSE_GLIMMER[0]))
    values = json.loads((folder.path / "config.json").read_text())
    values["text_config"] |= changed
    with pytest.raises(ModelFileError) as refused:
        muse_glimmer.from_hf(HfModel(Config("the config", values), folder.tensors))
    assert says in str(refused.value)
