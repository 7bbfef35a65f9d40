"""Speeds that are predicted for a model that has not run here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrun.api.local_model import make_plan
from hetrun.api.model_path import model_path
from hetrun.cli.reports.plan import with_guesses
from hetrun.config import Settings
from hetrun.loader.open_model import open_model
from hetrun.memory.breakdown import EXPERTS
from hetrun.planner.plan import PlanSet
from hetrun.planner.rates import Residence, TokenRates
from hetrun.tools import outlook
from hetrun.tools.bench.roofline import RooflineDemand
from hetrun.tools.outlook import OF_MEMORY, OF_PRODUCTS, STEP_S, MeasuredMachine, with_outlook

SETTINGS = Settings.resolve(environ={}, backends=["llamacpp"], planner="static")
SOURCE = open_model(model_path(SETTINGS))


@pytest.fixture(scope="module")
def plans() -> PlanSet:
    return replace(make_plan(SETTINGS), rates=None)


def demand(tokens: int, nbytes: float, products: float | None) -> RooflineDemand:
    return RooflineDemand(tokens, nbytes, 0.0, products, None if products is None else 0.0)


def test_a_pass_takes_the_longer_of_reading_and_multiplying() -> None:
    machine = MeasuredMachine(memory=10e9, products=100e9)
    assert machine.seconds(demand(1, 1e9, 2e9), 100) == pytest.approx(0.1 / OF_MEMORY + 100 * STEP_S)
    assert machine.seconds(demand(512, 1e9, 1e12), 0) == pytest.approx(10 / OF_PRODUCTS)


def test_without_products_only_tokens_of_answers_are_known() -> None:
    machine = MeasuredMachine(memory=10e9, products=None)
    assert machine.seconds(demand(1, 1e9, None), 0) == pytest.approx(0.1 / OF_MEMORY)
    assert machine.seconds(demand(512, 1e9, 1e12), 0) is None


def test_a_model_that_has_not_run_has_predicted_speeds(plans: PlanSet) -> None:
    rates = with_outlook(plans, SETTINGS, SOURCE).rates
    assert rates is not None
    assert rates.basis == "predicted"
    assert rates.prompts
    assert rates.answers
    assert rates.full
    assert rates.full < rates.answers < rates.prompts
    assert "predicted: " in rates.words


def test_of_numpys_speed_nothing_is_predicted() -> None:
    settings = Settings.resolve(environ={}, backends=["reference"], planner="static")
    rates = with_outlook(replace(make_plan(settings), rates=None), settings, SOURCE).rates
    assert rates is None or rates.answers is None


def test_what_is_known_stays(plans: PlanSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(outlook, "_measured")
    known = replace(plans, rates=TokenRates(100.0, 10.0, 5.0, "measured"))
    assert with_outlook(known, SETTINGS, SOURCE) is known
    there = replace(plans, devices={"cuda:0": {"weights": 1}})
    assert with_outlook(there, SETTINGS, SOURCE) is there


def test_guesses_are_told_of_where_they_make_a_run_read_less(plans: PlanSet) -> None:
    streamed = replace(plans, weights=Residence(9, 5, 5, 4, 4))
    assert "guessed from the text (--spec)" in with_guesses(streamed, SETTINGS).notes[-1]
    off = Settings.resolve(environ={}, backends=["llamacpp"], spec="off")
    assert with_guesses(streamed, off) is streamed
    assert with_guesses(plans, SETTINGS) is plans


def test_prompts_of_streamed_weights_read_them_once_a_pass(
    plans: PlanSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlook, "_measured", lambda *_: MeasuredMachine(1e12, 1e15))
    streamed = replace(
        plans, ubatch=32, weights=Residence(9, 5, 5, 4, 4), rates=TokenRates(None, 2.0, 1.0, "predicted")
    )
    assert with_outlook(streamed, SETTINGS, SOURCE).rates == TokenRates(64.0, 2.0, 1.0, "predicted")
    measured = replace(streamed, rates=TokenRates(None, 2.0, 1.0, "measured"))
    rates = with_outlook(measured, SETTINGS, SOURCE).rates
    assert rates == TokenRates(64.0, 2.0, 1.0, "partly measured")
    assert "prompts predicted" in rates.words
    experts = replace(streamed, memory={EXPERTS: 1})
    assert with_outlook(experts, SETTINGS, SOURCE).rates == TokenRates(None, 2.0, 1.0, "predicted")
