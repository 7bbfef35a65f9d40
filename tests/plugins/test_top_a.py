"""The sampler plugin: its rule, and its way through everything that a request passes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from hetrun.client import sampler_plugins
from hetrun.client.sampler_plugins import Link, Parameter
from hetrun.client.sampling_params import SAMPLERS, SamplingParams
from hetrun.errors import OptionError, PluginError
from hetrun.sampling.candidates import Candidates, Rule
from hetrun.sampling.sampler import ChainSampler, make_sampler
from tests.plugins.strangers import PLUGINS, Home, Register
from tests.plugins.test_docs import home_of_all_pages


@pytest.fixture
def top_a(register: Register, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """The plugin as if it were installed."""
    monkeypatch.syspath_prepend(str(PLUGINS / "hetrun-top-a"))
    import hetrun_top_a

    register("samplers", "top_a", hetrun_top_a.link)
    yield hetrun_top_a.link
    sys.modules.pop("hetrun_top_a", None)


def left(logits: list[float], **params: object) -> list[int]:
    sampler = make_sampler(SamplingParams.from_mapping({"seed": 1, **params}))
    assert isinstance(sampler, ChainSampler)
    found = sampler.left(Candidates(None, np.array(logits, np.float32)))
    return list(range(len(logits))) if found.ids is None else sorted(int(i) for i in found.ids)


OFF = {"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1}


def test_what_is_left_is_what_the_formula_says(top_a: Link) -> None:
    rng = np.random.default_rng(1)
    for scale in (0.5, 2.0, 8.0):
        logits = rng.standard_normal(200) * scale
        p = np.exp(logits - logits.max())
        p /= p.sum()
        for a in (0.01, 0.2, 1.0):
            kept = np.flatnonzero(p >= a * p.max() ** 2)
            assert left(logits.tolist(), top_a=a, **OFF) == kept.tolist()


def test_it_is_off_unless_it_is_asked_for(top_a: Link) -> None:
    assert left([3.0, 0.0, -9.0], **OFF) == [0, 1, 2]
    assert left([3.0, 0.0, -9.0], top_a=0, **OFF) == [0, 1, 2]
    assert SamplingParams().samplers == SAMPLERS


def test_it_stands_before_the_temperature_or_where_it_is_put(top_a: Link) -> None:
    usual = SamplingParams.from_mapping({"top_a": 0.2})
    assert usual.samplers == (*SAMPLERS[:-1], "top_a", "temperature")
    assert usual.more == {"top_a": 0.2}
    put = SamplingParams(samplers="top_a;top_k", more={"top_a": 0.2})
    assert put.samplers == ("top_a", "top_k")
    with pytest.raises(OptionError, match=r"samplers holds 'top_b'; there are .*, temperature, top_a"):
        SamplingParams(samplers="top_b")


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "much", True])
def test_what_it_may_not_be(top_a: Link, value: object) -> None:
    with pytest.raises(OptionError, match=r"top_a must be a number from 0 to 1 \(0: off\), not"):
        SamplingParams.from_mapping({"top_a": value})


def test_without_it_there_is_no_such_parameter() -> None:
    with pytest.raises(OptionError, match="unknown sampling parameter 'top_a': did you mean"):
        SamplingParams.from_mapping({"top_a": 0.2})


# --- links that are no good


def rules_that(do: Callable[[Candidates], object]) -> Link:
    rule = cast(Rule, lambda c, past: do(c))
    return Link((Parameter("bad", 0, 0, 1, "of a test"),), lambda setting: [rule])


def divide(c: Candidates) -> object:
    return 1 / 0


def nothing(c: Candidates) -> object:
    return c.pick(np.array([], np.intp))


def impossible(c: Candidates) -> object:
    return Candidates(None, np.full_like(c.logits, -np.inf))


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (divide, "its rule fails: ZeroDivisionError: division by zero"),
        (nothing, "its rule leaves no candidates"),
        (impossible, "its rule leaves only impossible tokens"),
        (lambda c: None, "its rule leaves no candidates"),
    ],
)
def test_a_rule_that_fails_is_named_and_gets_no_other_answer(
    register: Register, do: Callable[[Candidates], object], said: str
) -> None:
    register("samplers", "bad", rules_that(do))
    asked = SamplingParams.from_mapping({"bad": 1, "seed": 1})
    row = np.zeros(8, np.float32)
    with pytest.raises(PluginError, match=rf"^the sampler bad of stranger 0\.1 is left out: {said}$"):
        make_sampler(asked).sample(row)
    with pytest.raises(PluginError, match=said):
        make_sampler(asked)
    assert make_sampler(SamplingParams(seed=1)).sample(row).token >= 0  # the others go on


@pytest.mark.parametrize(
    "thing",
    [
        "text",
        Link((Parameter("no name", 0, 0, 1, ""),), lambda s: []),
        Link((Parameter("x", 5, 0, 1, ""),), lambda s: []),
    ],
)
def test_a_link_that_is_none_is_left_out(register: Register, thing: object) -> None:
    register("samplers", "bad", thing)
    assert sampler_plugins.usable() == {}
    with pytest.raises(PluginError, match="the sampler bad"):
        sampler_plugins.link("bad")


# --- as a stranger has it


@pytest.fixture
def installed(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The environment of the pages: a test there sees that their sampler is this one."""
    return home_of_all_pages(tmp_path_factory)


@pytest.mark.slow
def test_installed_it_is_an_option_and_a_field(installed: Home, tmp_path: Path) -> None:
    home = installed
    assert "--top-a N" in home.hetrun("run", "--help").stdout
    words = (
        "run",
        "Once upon a time",
        "--raw",
        "-n",
        "12",
        "--seed",
        "7",
        "--temp",
        "1.5",
        "--top-k",
        "0",
        "--min-p",
        "0",
    )
    free = home.hetrun(*words).stdout
    bound = home.hetrun(*words, "--top-a", "1").stdout
    assert free != bound
    requests = tmp_path / "requests.jsonl"
    body = {"prompt": "Once", "max_tokens": 4, "top_a": 0.5}
    requests.write_text(json.dumps(body) + "\n" + json.dumps(body | {"top_a": 7}) + "\n")
    done = home.hetrun("run", "-f", str(requests), code=3)
    good, bad = (json.loads(line) for line in done.stdout.splitlines())
    assert good["usage"]["completion_tokens"] == 4
    assert bad["error"]["param"] == "top_a"
    assert home.hetrun("run", "x", "--top-a", "7", code=2).stderr.startswith(
        "hetrun: top_a (--top-a) must be"
    )
