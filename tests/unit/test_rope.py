"""Rope's settings as GGUF files have them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hetrun.errors import ModelFileError, OptionError
from hetrun.graph import GraphBuilder, Weight, constant
from hetrun.graph.ops import Rope
from hetrun.loader.hf_mapping import Config
from hetrun.models.rope import FACTORS, LONG_FACTORS, SHORT_FACTORS, check_rope, factors, read_rope


class Settings(Config):
    """GGUF's keys, and the names of tensors that there are."""

    def __init__(self, values: dict[str, object], tensors: tuple[str, ...] = ()) -> None:
        super().__init__("a file", {"context_length": 256, **values})
        self.tensors = tensors

    def find(self, name: str) -> Weight | None:
        return constant(name, np.ones(16, np.float32)) if name in self.tensors else None


def settings_of(**values: object) -> Settings:
    return Settings({f"rope.{k.replace('__', '.')}": v for k, v in values.items()})


def rope_of(**values: object) -> Rope:
    return read_rope(settings_of(**values), 4, 32, True)


def test_a_file_that_says_nothing_has_the_papers_rope() -> None:
    assert rope_of() == Rope(4, 32, 32, 10000.0, True, n_ctx_orig=256)


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ({"scaling__type": "linear", "scaling__factor": 4.0}, 0.25),
        ({"scaling__factor": 4.0}, 0.25),  # linear is what llama.cpp takes it for
        ({"scale_linear": 4.0}, 0.25),  # the key's first name
        ({"scaling__type": "none", "scaling__factor": 4.0}, 1.0),
        ({"scaling__type": "linear", "scaling__factor": 0.0}, 1.0),
    ],
)
def test_linear_scaling(values: dict[str, object], scale: float) -> None:
    found = rope_of(**values)
    assert (found.freq_scale, found.ext_factor) == (scale, 0.0)


def test_yarn() -> None:
    found = rope_of(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=64)
    assert (found.freq_scale, found.ext_factor, found.attn_factor, found.n_ctx_orig) == (0.25, 1.0, 1.0, 64)
    assert (found.beta_fast, found.beta_slow) == (32.0, 1.0)


def test_transformers_attention_factor_replaces_the_papers() -> None:
    found = rope_of(scaling__type="yarn", scaling__factor=4.0, scaling__yarn_attn_factor=0.7)
    assert math.isclose(found.attn_factor * (1 + 0.1 * math.log(4)), 0.7)
    unscaled = rope_of(scaling__yarn_attn_factor=0.7)
    assert unscaled.attn_factor == 1.0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dimension_count": 7}, "odd"),
        ({"freq_base": 0.0}, "freq_base"),
        ({"freq_base": 1.0, "scaling__type": "yarn"}, "freq_base"),
        ({"scaling__type": "yarn", "scaling__yarn_beta_slow": 0.0}, "beta"),
        ({"scaling__factor": 5e-324}, "scaling.factor"),
        ({"scaling__type": "su"}, "scaling.type is 'su'"),
    ],
)
def test_nonsense_is_refused(values: dict[str, object], says: str) -> None:
    settings = settings_of(**values)
    with pytest.raises(ModelFileError, match=says):
        check_rope(GraphBuilder(settings), settings, read_rope(settings, 4, 32, True))


def test_dynamic_rope_runs_within_the_trained_context() -> None:
    settings = Settings({"rope.dynamic": True})
    for context in (None, 64, 256):
        check_rope(GraphBuilder(settings, context), settings, rope_of())
    with pytest.raises(OptionError, match="use --ctx 256 or less"):
        check_rope(GraphBuilder(settings, 257), settings, rope_of())


@pytest.mark.parametrize(("context", "name"), [(None, LONG_FACTORS), (65, LONG_FACTORS), (64, SHORT_FACTORS)])
def test_long_contexts_have_factors_of_their_own(context: int | None, name: str) -> None:
    settings = Settings({}, (LONG_FACTORS, SHORT_FACTORS))
    rope = rope_of(scaling__original_context_length=64)
    assert factors(GraphBuilder(settings, context), settings, rope) == name
    assert factors(GraphBuilder(Settings({}), context), settings, rope) == FACTORS
