"""Closed forms, against what can be worked out on paper."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hetrun.errors import OptionError
from hetrun.models import opt
from hetrun.tools.simulate.costs import LayerPart, decode, model_of, prefill, work
from hetrun.tools.simulate.shapes import SHAPES, shape_of
from tests.simulate.questions import cpu, gpu, machine, model

D = 7168  # OPT-30B's width


def parts(name: str) -> dict[str, LayerPart]:
    return {part.name: part for part in model(name).layers[0]}


def test_a_layer_of_opt() -> None:
    of = parts("opt-30b")
    assert list(of) == ["qkv", "score", "out", "up", "down"]
    qkv = work(of["qkv"], decode(4, 1000))
    assert qkv.weights == 2 * 3 * D * D + 4 * 5 * D  # float16 products; biases and norm in float32
    assert sum(c for c, _, _ in qkv.products) == 2 * 3 * D * D * 4
    assert (qkv.takes, qkv.gives) == (2 * 4 * D, 2 * 4 * 3 * D)
    score = work(of["score"], decode(4, 1000))
    assert score.past + score.fresh == 4 * 1000 * 2 * D * 2
    assert score.fresh == 4 * 2 * D * 2
    assert list(score.products) == [(4 * 4 * 1000 * D, 1, False)]
    assert of["out"].takes == 2 * D  # what attention gives, and the stream that it is added to
    fc1 = work(of["up"], decode(4, 1000))
    assert fc1.weights == pytest.approx(8 * D * D, rel=1e-3)  # algorithms: D_Y = 8 d^2, C = 8 B d^2
    assert sum(c for c, _, _ in fc1.products) == 8 * 4 * D * D


def test_a_layer_of_llama_with_shared_heads_and_a_gate() -> None:
    of, d, ff, kv = parts("llama-70b"), 8192, 28672, 1024
    assert work(of["qkv"], decode(2, 10)).weights == 2 * d * (d + 2 * kv) + 4 * d
    score = work(of["score"], decode(2, 10))
    assert score.past == 2 * 9 * 2 * kv * 2
    assert list(score.products) == [(4 * 2 * 10 * d, 8, False)]  # eight heads share their keys
    assert sum(c for c, _, _ in work(of["up"], decode(2, 10)).products) == 2 * 2 * 2 * d * ff
    assert work(of["down"], decode(2, 10)).weights == 2 * d * ff


def test_a_prompt_sees_half_of_itself() -> None:
    score = work(parts("opt-30b")["score"], prefill(3, 100))
    assert score.past == 0
    assert score.fresh == 3 * 100 * 2 * D * 2
    assert list(score.products) == [(4 * 300 * 50.5 * D, 100, False)]


def test_experts_that_were_not_chosen_are_not_read() -> None:
    experts = parts("mixture")["experts"]
    one, many = (work(experts, decode(n, 10)).weights for n in (1, 1000))
    router = 8 * 512 * 2
    assert one == pytest.approx(router + (experts.weight_bytes - router) / 4)
    assert many == pytest.approx(experts.weight_bytes)


def test_seconds_are_bytes_and_operations() -> None:
    of = work(parts("opt-30b")["out"], decode(1, 10))
    nbytes = of.weights + of.takes + of.gives
    assert of.seconds(cpu()) == pytest.approx(nbytes / 100e9 + 2 * D * D / 2e12)
    assert of.seconds(cpu(half_tokens=1)) == pytest.approx(nbytes / 100e9 + 2 * D * D / 1e12)
    assert of.seconds(cpu(half_tokens=1, vector=2e12)) == pytest.approx(of.seconds(cpu()))


def test_weights_in_blocks_use_the_faster_units() -> None:
    device = cpu(int8=4e12)
    assert device.rate(8, blocks=True) == 2 * device.rate(8, blocks=False)
    (_, tokens, blocks), *_ = work(parts("llama-70b:q4_0")["out"], decode(1, 10)).products
    assert (tokens, blocks) == (1, True)


@given(st.sampled_from(["opt-30b", "llama-70b", "mixture"]), st.integers(1, 64), st.integers(1, 2000))
def test_more_of_anything_takes_longer(name: str, batch: int, length: int) -> None:
    for part in model(name).layers[0]:
        for device in (cpu(), gpu()):
            once = work(part, decode(batch, length)).seconds(device)
            assert work(part, decode(batch + 1, length)).seconds(device) >= once
            assert work(part, decode(batch, length + 1)).seconds(device) >= once


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("opt-6.7b", 6.7), ("opt-13b", 13), ("opt-30b", 30), ("opt-66b", 66), ("opt-175b", 175)),
        *(("llama-7b", 6.74), ("llama-8b", 8.03), ("llama-13b", 13.0), ("llama-70b", 69.0)),
    ],
)
def test_shapes_have_their_names_size(name: str, billions: float) -> None:
    assert model(name).weight_bytes / 2e9 == pytest.approx(billions, rel=0.02)


def test_shapes_by_name_and_type() -> None:
    assert {len(model(name).layers) for name in ("opt-30b", "llama-70b")} == {48, 80}
    quarter = model("llama-70b:q4_0").weight_bytes / model("llama-70b").weight_bytes
    assert quarter == pytest.approx(18 / 64, rel=0.01)
    assert model_of(shape_of("OPT-30B").graph(opt)).weight_bytes == model("opt-30b").weight_bytes
    for wrong in ("opt-31b", "opt-30b:q9", "", ":f16"):
        with pytest.raises(OptionError):
            shape_of(wrong)


def test_equal_layers_are_one_object() -> None:
    for name in SHAPES:
        kinds = 3 if name.startswith("qwen35") else 2  # the last one works on wanted rows only
        assert len({id(layer) for layer in model(name).layers}) == kinds


def test_published_models_have_the_parameters_of_their_names() -> None:
    for name, billions in (("0.8b", 0.75), ("4b", 4.2), ("27b", 26.9), ("35b-a3b", 34.7), ("397b-a17b", 396)):
        assert model(f"qwen35-{name}").weight_bytes / 2e9 == pytest.approx(billions, rel=0.02)


def test_a_state_is_read_and_written_once_a_step() -> None:
    layer = model("qwen35-4b").layers[0]
    numbers = 32 * 128 * 128 + 3 * 8192
    one, two = (sum(work(p, decode(n, 10)).past for p in layer) for n in (1, 2))
    assert one == 2 * 4 * numbers
    assert two == 2 * one


def test_what_lies_outside_the_layers() -> None:
    assert work(model("opt-30b").before, decode(4, 10)).weights == 2 * 4 * 2 * D  # words and positions
    assert machine().cpu.usable < machine().cpu.memory
