"""What of a budget goes to weights in pieces that do not all fit into it, and what to expect then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from hetrun.backend.weight_streaming import Cut
from hetrun.executor.loading.context_length import Context
from hetrun.executor.loading.disk_estimates import AS_MANY, BYTES_S, disk_of_weights, passes_of
from hetrun.executor.loading.load_parts import LoadChoice, LoadParts
from hetrun.executor.loading.memory_estimates import crossing_bytes, work_bytes
from hetrun.executor.loading.placement_planner import Wanted
from hetrun.executor.loading.prompt_device import WORK_SHARE, PromptDevice
from hetrun.memory import breakdown
from hetrun.memory.kv.paged_allocator import BLOCK
from hetrun.memory.ledger import MemoryGrant
from hetrun.planner.plan import Placement, PlanSet
from hetrun.planner.rates import Residence, TokenRates
from hetrun.prefetch import ring_buffer
from hetrun.prefetch.disk_probe import Disk
from hetrun.prefetch.extents import can_stream, lay_out
from hetrun.prefetch.lookahead import DiskLoad, Window, predict, window
from hetrun.prefetch.pass_times import Passes, PassTimes, basis_of
from hetrun.prefetch.residency_policy import LAYER, PinnedPieces, Policy, choose as choose_pieces
from hetrun.prefetch.streamed_weights import StreamingPlan, policy_of
from hetrun.system.units import format_bytes

MOST_AT_ONCE = 256  # tokens of a pass while weights come from disk: with more, computing takes far longer
WORTH = 1.1  # times as fast passes must be with less on a device


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


class PiecePlanner:
    """Plans of a model on one backend, with pieces of its weights from disk for every pass."""

    def __init__(self, parts: LoadParts) -> None:
        self._options, self._contexts, self._placement = parts.options, parts.contexts, parts.placement
        self._budget, self._prompts = parts.budget, parts.prompts

    def cut(self) -> PiecedPlan | None:
        """The weights in pieces for the first backend that can compute with them."""
        return next((found for name in self._placement.backends if (found := self._cut(name))), None)

    def plan(self, found: PiecedPlan) -> LoadChoice:
        """As many of the pieces in memory as the context leaves room for."""
        context = self._contexts.choose(found.fixed, found.plans, whole=False)
        context = self._placement.fit_context(context, found.plans, found.wanted)
        if self._contexts.rebuild(context.tokens) and (again := self._cut(found.backend)):
            found = again
        return self._in_pieces(found, context)

    def choose_homes(self, homes: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """How much of what devices have room for is to lie there, where the others come from disk: all, the
        last half, or nothing. Each byte there is one less to read, so all of it unless passes have taken
        longer than they would with less on the device, by what disk and host are known to give. Passes of
        that are measured in turn, and the next start knows better."""
        if not self._options.measures or not homes:
            return homes
        found: list[tuple[float, tuple[Placement, ...]]] = []
        off = 1.0
        for some in dict.fromkeys((homes, homes[: len(homes) // 2], ())):
            self._placement.homes = some
            pieces = self.cut()
            if pieces is None:
                return homes
            seconds, seen = self._token_seconds(pieces, off)
            off = max(off, seen.off) if seen else off
            found.append((seconds if not found else seconds * WORTH, some))
        return min(found, key=lambda each: each[0])[1]

    def _token_seconds(self, found: PiecedPlan, off: float) -> tuple[float, PassTimes | None]:
        """A token of an answer in a short text, as runs saw it; else what disk and host would take, `off` by
        as much as other passes here."""
        short = self._contexts.short_kv(found.plans, self._contexts.usual)
        room = max(0, self._budget.nbytes - found.fixed - short)
        kept = choose_pieces(found.cut, room, policy_of(self._options.streaming))
        total = sum(piece.kept_bytes for piece in found.cut.pieces)
        seen = found.passes.at(kept.locked_bytes / total)
        if seen:
            return seen.seconds(1, kept.streamed_bytes, found.disk.rate), seen
        return off * max(total / BYTES_S, kept.streamed_bytes / found.disk.rate), None

    def _cut(self, name: str) -> PiecedPlan | None:
        """What has no home on a device on one backend, as one segment, in pieces."""
        placement, budget, graph = self._placement, self._budget, self._contexts.graph
        backend = placement.backends[name]
        partly = backend.partial()
        if partly is None or not ring_buffer.library():
            return None
        plans, wanted, segment = placement.plan_on(name)
        disk = disk_of_weights(graph, self._options.measures)
        cut = partly.cut(segment.ops, segment.writes, disk.way.request) if segment else None
        if cut is None or not all(map(can_stream, cut.pieces)):
            return None
        pieces = {piece.weight for piece in cut.pieces} | set(cut.lookups)
        whole = backend.resident_bytes([use for use in wanted[name] if use.weight not in pieces])
        parts = budget.parts()  # measured once: the bill must add up
        others = sum(parts.values()) + whole
        plans = self._lengthen_passes(plans, others)
        work = work_bytes(graph, plans.ubatch)
        if prompts := self._prompts.choose(graph, name, plans, placement.homes):
            work = max(work, crossing_bytes(graph, prompts.ubatch)) + prompts.host_bytes
            plans, wanted = prompts.over(plans), {**wanted, prompts.backend: [*prompts.wanted]}
        ahead = _read_ahead(cut, disk, budget.room(plans, others + work), plans.plan(1).threads)
        fixed = others + work + ahead.nbytes
        passes = passes_of(self._contexts.source, name, plans, placement.homes)
        return PiecedPlan(name, plans, wanted, cut, whole, work, disk, ahead, fixed, parts, passes, prompts)

    def _lengthen_passes(self, plans: PlanSet, others: int) -> PlanSet:
        """Each pass reads the same, however many tokens it has: as many as their memory is worth, which is
        not so much that nothing is left."""
        if self._options.wishes.ubatch:
            return plans
        left = self._budget.room(plans, others)
        most = min(WORK_SHARE * self._budget.nbytes, left / 2)
        n = MOST_AT_ONCE
        while n > BLOCK and work_bytes(self._contexts.graph, n) > most:
            n //= 2
        return replace(plans, ubatch=n, ubatch_why=AS_MANY.format("weights from disk"))

    def _in_pieces(self, found: PiecedPlan, context: Context) -> LoadChoice:
        options, budget = self._options, self._budget
        one = self._contexts.kv_bytes(found.plans)(context.tokens)
        of_all = budget.kv_of_all(one, found.fixed)
        ahead = found.window.nbytes
        paid = {breakdown.WINDOW: ahead, breakdown.KV_ONE: one, breakdown.WORK: found.work, **found.besides}
        short = self._contexts.short_kv(found.plans, context.tokens)
        within = partial(billed, found, paid, short, policy_of(options.streaming))
        self._placement.close_unused(found.plans, budget.block)
        streamed = StreamingPlan(
            backend=found.backend,
            cut=found.cut,
            granted=budget.granted,
            whole=found.whole,
            fixed=found.fixed,
            work=found.work,
            disk=found.disk,
            window=ahead,
            streaming=options.streaming,
            learns=options.measures,
            within=within,
            short=short,
            key=found.passes.key,
        )
        return LoadChoice(
            plans=within(budget.granted),
            wanted=found.wanted,
            context=context,
            weights=found.whole,
            kv_bytes=of_all,
            streamed=streamed,
            prompts=found.prompts,
        )


def _read_ahead(cut: Cut, disk: Disk, room: int, threads: int) -> Window:
    """How far ahead is read, if so much of the weights streams as does without any keys and values."""
    slots = [laid.nbytes for laid in map(lay_out, cut.pieces) if laid]
    streamed = max(0, sum(piece.nbytes for piece in cut.pieces) - room)
    pieces = -(-streamed * len(cut.pieces) // sum(piece.nbytes for piece in cut.pieces))
    layers = len({m.group(1) for piece in cut.pieces if (m := LAYER.fullmatch(piece.scope))})
    compute_s = sum(piece.kept_bytes for piece in cut.pieces) / BYTES_S
    load = DiskLoad(streamed, max(1, pieces), max(slots), max(1, layers), compute_s)
    return window(load, disk.way.readers, threads, disk.rate, room)
