"""Tokens per second of a model that has not run here: from the roofline, and what of it models usually reach.

Memory and products are measured, which takes a second; the model's weights are not read, except for one
matrix whose blocks are multiplied.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, replace

from hetrun.backend import registry
from hetrun.config import Settings
from hetrun.errors import HetrunError
from hetrun.loader.source import ModelSource
from hetrun.memory.breakdown import EXPERTS
from hetrun.planner.plan import PlanSet
from hetrun.planner.precision import precision_of
from hetrun.planner.rates import SHORT, Basis, TokenRates
from hetrun.system.progress import Progress, stretch
from hetrun.tools.bench.cases import BenchCase
from hetrun.tools.bench.matmul_peak import measure_peak, multiplier
from hetrun.tools.bench.memory_bandwidth import bandwidth, rounded
from hetrun.tools.bench.roofline import RooflineDemand, demands_of

log = logging.getLogger(__name__)

MOST_READ = 256 << 20  # bytes of the block that is read: few last caches hold as much
OF_MEMORY, OF_PRODUCTS = 0.8, 0.7  # that passes reach of what memory and products give, besides...
STEP_S = 1e-5  # ...what each operation takes to begin, and the engine between two tokens


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """What was measured."""

    memory: float  # bytes per second
    products: float | None  # operations per second; None: they could not be measured

    def seconds(self, demand: RooflineDemand, operations: int) -> float | None:
        """About what a pass takes; None: how long it multiplies is not known."""
        reading = demand.nbytes / (OF_MEMORY * self.memory)
        made = None if demand.products is None else demand.products + (demand.attention or 0.0)
        if made is None or self.products is None:
            return reading + STEP_S * operations if demand.tokens == 1 else None
        return max(reading, made / (OF_PRODUCTS * self.products)) + STEP_S * operations


def with_outlook(
    plans: PlanSet, settings: Settings, source: ModelSource, tell: Progress | None = None
) -> PlanSet:
    """The plan of a model with predicted speeds where nothing has been measured yet; those of a device are
    not known."""
    known = plans.rates or TokenRates()
    if plans.devices or (known.answers and known.prompts) or _has_slow(plans):
        return plans
    model, most = demands_of(source, settings.kv_type), min(plans.ubatch, plans.context or SHORT)
    cases = (
        BenchCase("decode", 1, min(SHORT, plans.context or SHORT)),
        BenchCase("decode", 1, plans.context),
        BenchCase("prefill", most),
    )
    short, full, prompt = (model.of(case) for case in cases)
    machine, n = (
        _measured(plans, settings, short, stretch(tell, 0, 1)),
        sum(len(s.ops) for s in plans.plan(1).segments),
    )
    prompts, answers, at_end = (_rate(d, machine.seconds(d, n)) for d in (prompt, short, full))
    if known.answers:
        found = _from_disk(plans, most, prompts, known.answers)
        basis: Basis = "partly measured" if found and known.basis == "measured" else known.basis
        return replace(plans, rates=replace(known, prompts=found, basis=basis))
    return replace(plans, rates=TokenRates(prompts, answers, at_end, "predicted"))


def _has_slow(plans: PlanSet) -> bool:
    """Whether a backend that is not made to be fast runs a part: no limit of the machine says how slow."""
    known = registry.backends()
    return any(name in known and known[name].is_last_resort for name in plans.plan(1).backends)


def _rate(demand: RooflineDemand, seconds: float | None) -> float | None:
    return demand.tokens / seconds if seconds else None


def _from_disk(plans: PlanSet, tokens: int, computed: float | None, answers: float) -> float | None:
    """Prompts of a model whose weights come from disk for every pass, as they do for a token of an answer;
    how many experts a prompt reads is not known before it runs."""
    if computed is None or EXPERTS in plans.memory:
        return None
    return min(computed, tokens * answers)


def _measured(plans: PlanSet, settings: Settings, step: RooflineDemand, tell: Progress) -> MeasuredMachine:
    """What memory gives to the threads of a step, and what the backend of prompts multiplies."""
    threads = plans.plan(1).threads
    block = rounded(min(MOST_READ, step.block))
    memory = bandwidth(threads, block)
    tell(0.5)
    return MeasuredMachine(memory, _products(plans, settings))


def _products(plans: PlanSet, settings: Settings) -> float | None:
    many = plans.plan(plans.ubatch)
    most = multiplier(many.segments)
    if most is None:
        return None
    try:
        with closing(registry.backends()[most.backend].create()) as backend:
            backend.exact = precision_of(settings.precision) == "exact"
            backend.set_threads(many.threads)
            return measure_peak(backend, most.weight, many.threads).rate
    except HetrunError as e:
        log.info("how fast %s multiplies could not be measured: %s", most.backend, e)
        return None
