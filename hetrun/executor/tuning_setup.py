"""What the autotuner of a loaded model may change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from hetrun.backend import Backend, Descriptor, registry
from hetrun.executor.autotune.setup import Setup
from hetrun.executor.loading.context_length import USUAL_CONTEXT
from hetrun.executor.loading.load_plan import LoadPlan
from hetrun.graph import Op, kept_by, states_of
from hetrun.graph.signature import coarse
from hetrun.memory.kv.cache import sequence_bytes
from hetrun.planner.costmodel import path_of_machine
from hetrun.planner.options import Options, this_machine

LEAST_MEASURED = 8 << 20  # bytes of weights: measuring a smaller model takes longer than it could win


def setup_of(prepared: LoadPlan, options: Options) -> Setup | None:
    """What an autotuner needs; None where nothing is to be decided while the model runs."""
    wishes = options.wishes
    if not options.measures or wishes.plan or wishes.deterministic:
        return None
    if prepared.streamed or prepared.mapped or prepared.experts:
        return None
    if sum(w.nbytes for w in prepared.graph.weights().values()) < LEAST_MEASURED:
        return None
    known, plan = registry.backends(), prepared.plans.plan(1)
    home = {coarse(op.scope): s.backend for s in plan.segments for op in s.ops}
    allowed = options.backends or ()
    chosen = [n for n in prepared.backends if n in home.values() or _may_be_chosen(n, known.get(n), allowed)]
    machine = this_machine()
    details = {n: str(known[n].probe()) for n in chosen if n in known} | {"precision": options.precision}
    return Setup(
        home,
        tuple(chosen),
        (wishes.threads,) if wishes.threads else machine.counts,
        prepared.room,
        prepared.context,
        _is_eager(options, [prepared.backends[n] for n in chosen]),
        path_of_machine(machine.cores, details),
        options.precision,
        () if wishes.threads else machine.wide,
        prepared.own,
        partial(_rows_of, prepared, options.ctx or min(prepared.context, USUAL_CONTEXT)),
        prepared.plans.host_ubatch,
    )


def _rows_of(prepared: LoadPlan, tokens: int, ops: Sequence[Op]) -> int:
    """Keys and values of a text, as far as some ops keep them."""
    return sequence_bytes(kept_by(ops), prepared.quant, prepared.plans.ubatch, tokens, states_of(ops))


def _is_eager(options: Options, backends: Sequence[Backend]) -> bool:
    """Copies in the memory of a device take none of the host's, and its speed is worth the start."""
    return any(b.asynchronous for b in backends) if options.eager is None else options.eager


def _may_be_chosen(name: str, known: Descriptor | None, allowed: Collection[str]) -> bool:
    """Whether a planner may choose a backend; another way to work of one that it may is not known itself."""
    return known is None or not known.is_last_resort or name in allowed
