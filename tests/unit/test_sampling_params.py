"""The parameters of a request: what is taken, in which form it is kept, and what is refused."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import OptionError


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_tokens", 0, "max_tokens must be an integer of 1 or more, not 0"),
        ("max_tokens", 1.0, "max_tokens must be an integer"),
        ("max_tokens", True, "not True"),
        ("temperature", -0.1, "temperature must be 0 (greedy) or a finite number of 1e-06 or more, not -0.1"),
        ("temperature", math.nan, "not nan"),
        ("temperature", math.inf, "not inf"),
        ("temperature", 1e-7, "not 1e-07"),
        ("temperature", "1", "not '1'"),
        ("temperature", 10**400, "temperature must be"),
        ("top_k", -2, "top_k must be an integer of -1 or more (0 or -1 switches it off), not -2"),
        ("top_k", None, "not None"),
        ("top_p", 1.1, "top_p must be a number from 0 to 1 (1 switches it off), not 1.1"),
        ("top_p", math.nan, "not nan"),
        ("min_p", -1, "min_p must be a number from 0 to 1 (0 switches it off), not -1.0"),
        ("seed", -2, "seed must be an integer from -1 to 18446744073709551615 (-1 for a random one)"),
        ("seed", 2**64, "seed must be"),
        ("seed", 1.5, "not 1.5"),
        ("stop", "", "stop holds an empty string"),
        ("stop", ["a", 1], "stop must be a string or a list of strings"),
        ("stop", b"a", "stop must be a string"),
        ("stop", {"a"}, "stop must be a string"),
        ("typical_p", 2, "typical_p must be a number from 0 to 1 (1 switches it off)"),
        ("repeat_penalty", 0, "repeat_penalty must be a number from 1e-06 to 1e+06"),
        ("repeat_last_n", -2, "repeat_last_n must be an integer of -1 or more"),
        ("stop", ["x"] * 1025, "stop may hold 1024 strings, not 1025"),
        ("stop", ["x" * 10_000, "y" * 10_000], "stop may hold 16384 characters, not 20000"),
        ("dry_sequence_breakers", "x" * 20_000, "dry_sequence_breakers may hold 16384 characters, not 20000"),
        ("samplers", ["top_k"] * 100_000, "samplers holds 100000 names; there are"),
        ("dry_sequence_breakers", [""], "dry_sequence_breakers holds an empty string"),
        ("mirostat", 3, "mirostat must be an integer from 0 to 2"),
        ("samplers", ["top_k", "mirostat"], "samplers holds 'mirostat'; there are penalties, dry"),
        ("samplers", "top_k;top_p;top_k", "samplers holds top_k twice"),
        ("ignore_eos", 1, "ignore_eos must be true or false, not 1"),
        ("logprobs", -1, "logprobs must be an integer from 0 to 128, not -1"),
        ("logprobs", 129, "not 129"),
        ("logit_bias", [1], "logit_bias must map token ids to numbers"),
        ("logit_bias", {"x": 1}, "a token id in logit_bias must be an integer"),
        ("logit_bias", {"9" * 5000: 1}, "a token id in logit_bias must be an integer"),
        ("logit_bias", {-1: 1}, "not -1"),
        ("logit_bias", {1: math.nan}, "logit_bias of token 1 must be a number from -1e+09 to 1e+09"),
        ("logit_bias", {1: math.inf}, "not inf"),
        ("logit_bias", {1: "2"}, "not '2'"),
    ],
)
def test_values_out_of_range_are_refused_in_a_sentence(name: str, value: object, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert len(str(caught.value)) < 200


def test_values_are_kept_in_one_form() -> None:
    params = SamplingParams(stop="a", seed=-1, temperature=1, logit_bias={5: 1})
    assert params.stop == ("a",)
    assert params.seed is None
    assert isinstance(params.temperature, float)
    assert params.logit_bias == {5: 1.0}
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
    counted = SamplingParams.from_mapping({"max_tokens": np.int64(3), "top_p": np.float32(0.5)})
    assert (type(counted.max_tokens), counted.top_p) == (int, 0.5)
    assert SamplingParams() == SamplingParams()
    assert hash(SamplingParams(logit_bias={1: 2})) == hash(SamplingParams())


def test_params_cross_a_pipe() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=7)
    assert pickle.loads(pickle.dumps(params)) == params


def test_from_a_json_object() -> None:
    given = {"max_tokens": 5, "stop": ["x"], "logit_bias": {"12": -100}, "seed": None, "top_k": None}
    params = SamplingParams.from_mapping(given)
    assert params == SamplingParams(max_tokens=5, stop=("x",), logit_bias={12: -100.0})
    assert SamplingParams.from_mapping({}) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temp", "did you mean temperature"),
        ("num_predict", "did you mean max_tokens"),
        ("repeat_pen", "did you mean repeat_penalty"),
        ("system", "a system message is one of the messages"),
    ],
)
def test_names_of_others_lead_to_ours(name: str, hint: str) -> None:
    with pytest.raises(OptionError, match=hint):
        SamplingParams.from_mapping({name: 1})


def test_unknown_names_are_errors() -> None:
    with pytest.raises(
        OptionError, match=r"unknown sampling parameter 'temprature': did you mean temperature\?"
    ):
        SamplingParams.from_mapping({"temprature": 1})
    with pytest.raises(OptionError, match="parameters 'foo', 'bar': known are max_tokens, temperature"):
        SamplingParams.from_mapping({"foo": 1, "top_k": 3, "bar": None})
    with pytest.raises(TypeError, match="foo"):
        SamplingParams(foo=1)  # type: ignore[call-arg]
