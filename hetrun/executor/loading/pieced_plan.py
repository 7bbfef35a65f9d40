"""What of a budget goes to weights in pieces that do not all fit into it, and what to expect then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetrun.backend import WeightUse
from hetrun.backend.weight_streaming import Cut
from hetrun.executor.loading.prompt_device import PromptDevice
from hetrun.memory import breakdown
from hetrun.memory.ledger import MemoryGrant
from hetrun.planner.plan import PlanSet
from hetrun.planner.rates import Residence, TokenRates
from hetrun.prefetch.disk_probe import Disk
from hetrun.prefetch.lookahead import Window, predict
from hetrun.prefetch.pass_times import Passes, PassTimes, basis_of
from hetrun.prefetch.residency_policy import PinnedPieces, Policy, choose as choose_pieces
from hetrun.system.units import format_bytes

Wanted = dict[str, list[WeightUse]]  # by backend
BYTES_S = 25e9  # of weights that a pass of one token computes with in a second, about


@dataclass(frozen=True, slots=True)
class PiecedPlan:
    """A model on one backend, its weights in pieces."""

    backend: str
    plans: PlanSet
    wanted: Wanted
    cut: Cut
    whole: int  # bytes of weights that have to be there as a whole
    work: int  # that passes work in
    disk: Disk
    window: Window
    fixed: int  # bytes that are held whatever stays of the weights
    besides: Mapping[str, int]  # of these what is no weight, as a bill has it
    passes: Passes  # as earlier runs saw them
    prompts: PromptDevice | None = None  # a device that reads all weights from disk itself for them


def billed(
    found: PiecedPlan, paid: Mapping[str, int], short: int, policy: Policy, granted: MemoryGrant
) -> PlanSet:
    """The plan of a model in pieces within a budget: what it takes beside what is `paid` anyway, and why.
    Weights have the room that a `short` text leaves, until a longer one comes."""
    room = granted.nbytes - found.fixed
    short = min(short, room)  # one text must fit whatever becomes of the weights
    kept = choose_pieces(found.cut, max(0, room - max(short, paid[breakdown.KV_ONE])), policy)
    first = choose_pieces(found.cut, room - short, policy)
    memory = {**paid, breakdown.WEIGHTS: found.whole + kept.locked_bytes}
    total = sum(piece.kept_bytes for piece in found.cut.pieces)
    outlook = _outlook(found, kept, total)
    notes: tuple[str, ...] = (
        f"in a full context each pass reads {format_bytes(kept.streamed_bytes)} of weights from disk, "
        f"because {granted.words} is less than all of them need; {kept.why}",
        f"a token in a full context: {outlook}",
        f"read ahead: {found.window.why}",
        f"disk: {found.disk.why}",
        *_about_prompts(found.prompts),
    )
    if not kept.streamed:
        notes = (f"all weights stay in memory now: {granted.words} is enough",)
    return replace(
        found.plans,
        memory=breakdown.complete(memory, granted.nbytes),
        notes=notes,
        weights=Residence(
            total,
            first.locked_bytes,
            kept.locked_bytes,
            first.streamed_bytes,
            kept.streamed_bytes,
        ),
        rates=_rates(found, first, kept, total),
    )


def _about_prompts(device: PromptDevice | None) -> tuple[str, ...]:
    if device is None:
        return ()
    return (
        f"long prompts: {device.device} can compute up to {device.ubatch:,} tokens at once, and reads "
        f"{format_bytes(device.nbytes)} of weights from disk for them; it does where that is faster",
    )


def _outlook(found: PiecedPlan, kept: PinnedPieces, total: int) -> str:
    """A token in a full context, as runs saw their passes; before the first, at most."""
    seen = found.passes.at(kept.locked_bytes / total)
    if seen is None:
        return str(predict(total / BYTES_S, kept.streamed_bytes, found.disk.rate))
    outlook = predict(seen.least_s, kept.streamed_bytes, seen.rate or found.disk.rate)
    return f"bound by {outlook.bound}: {outlook.times}"


def _rates(found: PiecedPlan, first: PinnedPieces, full: PinnedPieces, total: int) -> TokenRates:
    """Passes as the last runs saw them; before the first, none is faster than its disk."""

    def rate(kept: PinnedPieces, times: PassTimes | None, tokens: int) -> float | None:
        if times:
            seconds = times.seconds(tokens, kept.streamed_bytes, found.disk.rate)
            return tokens / seconds if seconds else None
        return 1 / max(total / BYTES_S, kept.streamed_bytes / found.disk.rate) if tokens == 1 else None

    short, long = (found.passes.at(kept.locked_bytes / total) for kept in (first, full))
    return TokenRates(
        rate(first, short, found.plans.host_ubatch or found.plans.ubatch),
        rate(first, short, 1),
        rate(full, long, 1),
        basis_of(short),
    )
