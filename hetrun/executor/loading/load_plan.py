"""Everything that is decided about a model before its weights are read: on what it runs, how long sequences
may become, and what of its weights is in memory.

What fits is held in memory. Where `--ram`, or what is free, is less than that, the weights are cut into
pieces, and those that do not fit come from disk for every pass (`hetrun.prefetch`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hetrun.backend import Backend, Segment, WeightUse
from hetrun.backend.weight_streaming import Cut, Mixture
from hetrun.errors import BudgetError
from hetrun.executor.loading.backend_selection import create_backends
from hetrun.executor.loading.context_length import (
    Context,
    KvBytes,
    TooLittle,
    choose_context,
    kv_quant,
    longest,
    trained_for,
    usual,
)
from hetrun.executor.loading.device_memory import DevicePlaces, Own, bills, granted_to, with_streaming
from hetrun.executor.loading.expert_plan import ExpertPlan
from hetrun.executor.loading.memory_estimates import (
    HELPER,
    LIBRARIES,
    MAX_SEQUENCES,
    besides,
    crossing_bytes,
    in_parts,
    kv_of_all,
    mixture_bytes,
    work_bytes,
)
from hetrun.executor.loading.pieced_plan import BYTES_S, PiecedPlan, Wanted, billed
from hetrun.executor.loading.plan_notes import about_states, about_vision, about_whole
from hetrun.executor.loading.prompt_device import WORK_SHARE, PromptDevice, PromptDevices
from hetrun.executor.mtp import PlannedBlock, plan_block
from hetrun.graph import Extent, Graph, Op, kept_by, states_of
from hetrun.graph.quant import QuantType
from hetrun.loader.architectures import build_graph
from hetrun.loader.source import ModelSource
from hetrun.memory import breakdown
from hetrun.memory.kv.cache import promised_for, sequence_bytes
from hetrun.memory.kv.paged_allocator import BLOCK
from hetrun.memory.ledger import MemoryGrant, granted
from hetrun.planner.options import Options, Wishes, this_machine
from hetrun.planner.plan import Placement, PlanSet
from hetrun.planner.rates import SHORT, Residence
from hetrun.planner.static import LARGEST_UBATCH, StaticPlanner
from hetrun.prefetch import expert_cache, ring_buffer
from hetrun.prefetch.cached_experts import ExpertPart, buffers_in, readers_of
from hetrun.prefetch.disk_probe import UNKNOWN_RATE, USUAL, Disk, disk_of
from hetrun.prefetch.expert_records import records_of
from hetrun.prefetch.extents import can_stream, lay_out
from hetrun.prefetch.lookahead import DiskLoad, Window, window
from hetrun.prefetch.mapped_weights import MappedPart
from hetrun.prefetch.pass_times import Passes, PassTimes
from hetrun.prefetch.residency_policy import LAYER, choose as choose_pieces
from hetrun.prefetch.streamed_weights import StreamingPlan, policy_of
from hetrun.system.units import format_bytes

PROMPTS = (2048, 1024, 512, 256)  # tokens of a pass while experts come from disk
MOST_AT_ONCE = 256  # tokens of a pass while weights come from disk: with more, computing takes far longer
AS_MANY = "each pass reads the {}, so it takes as many tokens as fit and are worthwhile"
OF_BYTES = 5e-3  # the error of a product whose activations are rounded to 8 bits, in parts of its size
WORTH = 1.1  # times as fast passes must be with less on a device


def plan_graph(
    places: DevicePlaces,
    backends: Mapping[str, Backend],
    wishes: Wishes,
    homes: Sequence[Placement] = (),
    rule: str = "",
    why: str = "",
    before: str = "",
) -> tuple[PlanSet, Wanted]:
    """The plan set, and which weights each backend must hold for it. `before`: a backend that has everything
    without a home, whatever the order is."""
    order = sorted((name for name in places.order() if name in backends), key=lambda name: name != before)
    plans = StaticPlanner(backends, order, homes, rule, why).plan(places.graph, this_machine(), wishes)
    wanted: dict[str, dict[WeightUse, None]] = {name: {} for name in backends}
    for segment in dict.fromkeys(
        s for p in {id(p.stages): p for p in plans.plans.values()}.values() for s in p.segments
    ):
        wanted[segment.backend].update(dict.fromkeys(backends[segment.backend].wants(segment.ops)))
    plans = replace(plans, precision="fast" if _rounds_to_bytes(plans, backends) else "exact")
    return plans, {name: list(uses) for name, uses in wanted.items()}


def _rounds_to_bytes(plans: PlanSet, backends: Mapping[str, Backend]) -> bool:
    """Whether products of the plan round activations to 8 bits: only some backends do that with `fast`."""
    if any(b.exact for b in backends.values()):
        return False
    segments = (s for p in {id(p.stages): p for p in plans.plans.values()}.values() for s in p.segments)
    return any(backends[s.backend].rounding(op) >= OF_BYTES for s in segments for op in s.ops)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything that is decided about a model before its weights are read."""

    graph: Graph
    backends: dict[str, Backend]
    plans: PlanSet
    wanted: Wanted
    quant: QuantType
    context: int
    granted: MemoryGrant
    weights: int  # bytes of those that are read when the model is opened, as a whole
    kv_bytes: int  # that all sequences together may take
    kv_one: int  # of one of full length
    room: int  # bytes that weights may take, and what backends hold besides; 0: nothing beyond these
    streamed: StreamingPlan | None = None
    mapped: MappedPart | None = None
    own: Own = field(default_factory=dict)  # what devices may take of the memory that they have to themselves
    block: PlannedBlock | None = None  # that predicts one more token
    experts: ExpertPart | None = None
    prompts: PromptDevice | None = None  # what runs prompts, where weights come from disk


def prepare(source: ModelSource, options: Options, to_come: int = LIBRARIES) -> LoadPlan:
    """Decide; the backends are the caller's to close. So much of libraries is still `to_come`."""
    graph = build_graph(source, options.ctx, options.spatial)
    quant = kv_quant(graph, options.kv_type)
    backends = create_backends(options, graph)
    try:
        block = plan_block(source, backends, options.wishes, quant) if options.mtp != "off" else None
        return LoadPlanner(source, options, graph, backends, quant, to_come, block).decide()
    except BaseException:
        for backend in backends.values():
            backend.close()
        raise


class LoadPlanner:
    """One model on its way through the decisions."""

    def __init__(
        self,
        source: ModelSource,
        options: Options,
        graph: Graph,
        backends: dict[str, Backend],
        quant: QuantType,
        to_come: int,
        block: PlannedBlock | None = None,
    ) -> None:
        self._to_come, self._block = to_come, block
        self._granted = granted(options.ram)
        if options.ram is not None:  # a container may have less
            options = replace(options, ram=self._granted.nbytes)
        self._source, self._options = source, options
        self._graph, self._backends, self._quant = graph, backends, quant
        own = granted_to(backends, options.vram)
        # No method of this object, which what it is handed to would keep.
        self._rows_of = partial(_row_bytes, source, options, quant)
        self._own = with_streaming(graph, backends, own, self._rows_of)
        self._prompts = PromptDevices(options, backends, self._own, self._rows_of, self._granted.nbytes)
        self._allowed = list(backends)
        self._homes: tuple[Placement, ...] = ()  # on devices, because RAM has no room for all
        self._spared = 0  # bytes of the process that writes templates that come out of the reserve

    def decide(self) -> LoadPlan:
        """In the smallest of budgets the process that writes templates takes its memory from the reserve."""
        try:
            return self._decide()
        except TooLittle as e:
            self._homes, self._spared = (), min(HELPER, e.short)
            with suppress(TooLittle):
                return self._decide()
        self._homes, self._spared = (), HELPER
        try:
            return self._decide()
        except TooLittle as e:
            raise BudgetError(str(e)) from None  # which others know

    def _decide(self) -> LoadPlan:
        """All in memory, if that is possible: in RAM or in that of one device; else in both together."""
        plans, wanted = self._planned(self._backends)
        self._leave_block_out(plans, wanted)
        if not self._fits(plans, wanted):
            self._homes = self._places.homes()
            plans, wanted = self._planned(self._backends)
            if self._options.streaming != "off" and not self._fits(plans, wanted):
                self._homes = self._fastest(self._prompts.leave_room(self._graph, self._homes))
                if found := self._not_in_memory():
                    return found
        return self._in_memory(plans, wanted)

    def _leave_block_out(self, plans: PlanSet, wanted: Wanted) -> None:
        """Where it was not asked for by name, the block that predicts is no reason to read from disk. Where
        weights come from there anyway, each pass is worth more tokens with it."""
        block = self._block
        if block and self._options.mtp == "auto" and not self._fits(plans, wanted):
            self._block = None
            if not self._fits(plans, wanted):
                self._block = block

    @property
    def _places(self) -> DevicePlaces:
        return DevicePlaces(self._graph, self._backends, self._own, self._rows_of)

    def _planned(
        self, backends: Mapping[str, Backend], why: str = "", before: str = ""
    ) -> tuple[PlanSet, Wanted]:
        options = self._options
        return plan_graph(self._places, backends, options.wishes, self._homes, options.rule, why, before)

    def _left_to(self, name: str) -> tuple[PlanSet, Wanted, list[Segment]]:
        """All that has no home on a device planned for one backend, and what that runs."""
        some = {name: self._backends[name]} | {h.backend: self._backends[h.backend] for h in self._homes}
        others = self._allowed != [name]
        why = f"the first of {', '.join(self._allowed)} that can read weights from disk" if others else ""
        plans, wanted = self._planned(some, why, name)
        segments = dict.fromkeys(s for plan in plans.plans.values() for s in plan.segments)
        mine = [s for s in segments if s.backend == name]
        return replace(plans, devices=bills(some, self._own, wanted)), wanted, mine

    def _fits(self, plans: PlanSet, wanted: Wanted) -> bool:
        held = self._besides() + self._weights(wanted) + work_bytes(self._graph, plans.ubatch)
        return held + self._usual_kv(plans) <= self._granted.nbytes

    def _besides(self) -> int:
        return sum(self._parts().values())

    def _parts(self) -> Mapping[str, int]:
        """What is held besides weights, keys and values."""
        parts = self._options.besides or in_parts(besides(self._source.vocabulary_entries, self._to_come))
        if self._spared:
            parts = {**parts, breakdown.HELPERS: parts.get(breakdown.HELPERS, 0) - self._spared}
            parts = {name: size for name, size in parts.items() if size > 0}
        return {**parts, breakdown.MTP: self._block.nbytes} if self._block else parts

    def _not_in_memory(self) -> LoadPlan | None:
        """In pieces where that is possible; else mapped. None where nothing of both is."""
        if self._options.streaming != "mmap":
            for name in self._backends:
                if cached := self._cached(name):
                    return cached
        pieces = next((found for name in self._backends if (found := self._cut(name))), None)
        fits = pieces and pieces.fixed + self._least_kv(pieces.plans) <= self._granted.nbytes
        if self._options.streaming == "mmap" or not fits:
            why = "--streaming mmap" if fits else "weights that cannot be cut into pieces do not fit"
            for name in self._backends:
                if mapped := self._mapped(name, why):
                    return mapped
        return self._from_disk(pieces) if pieces else None

    def _cached(self, name: str) -> LoadPlan | None:
        """Everything on one backend, experts in slots as far as there is room for them."""
        found = self._expert_plan(name)
        if found is None or found.least + self._least_kv(found.plans) > self._granted.nbytes:
            return None
        kv_bytes = self._kv_bytes(found.plans)
        context = choose_context(self._source, self._options, found.least, kv_bytes, whole=False)
        one, short = kv_bytes(context.tokens), self._short_kv(found.plans, context.tokens)
        of_all = max(one, min(MAX_SEQUENCES * one, self._granted.nbytes - found.least))
        self._keep_only(found.plans)
        part = ExpertPart(
            backend=name,
            records=found.records,
            granted=self._granted,
            whole=found.whole,
            fixed=found.fixed,
            work_of=found.work_of,
            disk=found.disk,
            buffers=found.buffers,
            learns=self._options.measures,
            within=partial(found.billed, one, short),
            short=short,
            key=found.passes.key,
            work=found.work,
        )
        plans = part.within(self._granted)
        return self._prepared(plans, found.wanted, context, found.whole, of_all, experts=part)

    def _expert_plan(self, name: str) -> ExpertPlan | None:
        """None where not all mixtures can have slots for their experts."""
        backend = self._backends[name]
        caching = backend.experts()
        if caching is None or not expert_cache.library():
            return None
        plans, wanted, (first, *further) = self._left_to(name)
        mixtures = () if further else caching.mixtures(first.ops)
        records = records_of(mixtures) if mixtures else None
        if records is None:
            return None
        experts = {weight for mixture in mixtures for weight in mixture.weights}
        whole = backend.resident_bytes([use for use in wanted[name] if use.weight not in experts])
        parts, disk = self._parts(), self._disk()  # measured once: the bill must add up
        plans = self._prompts_at_once(plans, mixtures)
        graph = self._graph

        def work_of(tokens: int) -> int:
            return work_bytes(graph, tokens) + mixture_bytes(mixtures, tokens)

        work = work_of(plans.ubatch)
        room = self._room(plans, sum(parts.values()) + whole + work)
        buffers = buffers_in(records, room, readers_of(records, disk.way))
        passes = self._passes(name, plans)
        return ExpertPlan(
            backend=name,
            plans=plans,
            wanted=wanted,
            records=records,
            whole=whole,
            work_of=work_of,
            work=work,
            disk=disk,
            buffers=buffers,
            besides=parts,
            bytes_s=BYTES_S,
            passes=passes,
        )

    def _prompts_at_once(self, plans: PlanSet, mixtures: Sequence[Mixture]) -> PlanSet:
        """A pass of a prompt reads nearly all experts that have no slot, however many tokens it has."""
        if self._options.wishes.ubatch:
            return plans
        most = WORK_SHARE * self._granted.nbytes
        fits = (n for n in PROMPTS if work_bytes(self._graph, n) + mixture_bytes(mixtures, n) <= most)
        n = next(fits, min(plans.ubatch, PROMPTS[-1]))
        return replace(plans, ubatch=n, ubatch_why=AS_MANY.format("experts that its tokens choose"))

    def _mapped(self, name: str, why: str) -> LoadPlan | None:
        """Everything on one backend, some weights where they lie in their files."""
        backend = self._backends[name]
        if (mapping := backend.mapping()) is None:
            return None
        plans, wanted, (first, *further) = self._left_to(name)
        held = self._besides() + work_bytes(self._graph, plans.ubatch)
        room = self._room(plans, held)
        weights = () if further else mapping.choose(first.ops, room)
        if not weights:
            return None
        left = backend.resident_bytes([use for use in wanted[name] if use.weight not in weights])
        least = held + left + mapping.least(first.ops, weights)
        context = choose_context(self._source, self._options, least, self._kv_bytes(plans), whole=False)
        one = self._kv_bytes(plans)(context.tokens)
        of_all = kv_of_all(one, self._granted.nbytes - least)
        room = self._granted.nbytes - held - left - of_all
        mapping.map(weights, room)
        self._keep_only(plans)
        paid = {
            breakdown.WEIGHTS: left,
            breakdown.MAPPED: room,
            breakdown.KV_ONE: one,
            breakdown.KV_ALL: of_all,
        }
        paid |= {breakdown.WORK: held - self._besides(), **self._parts()}
        size = sum(weight.nbytes for weight in weights)
        notes = (
            f"{format_bytes(size)} of weights are mapped ({why}): what a pass needs of them is read as soon "
            "as that is known, and what has not been used for longest is evicted",
        )
        there = Residence(left + size, left + min(size, room), left + min(size, room))
        memory = breakdown.complete(paid, self._granted.nbytes)
        plans = replace(plans, memory=memory, notes=notes, weights=there)
        mapped = MappedPart(mapping, size, left, room, self._granted.nbytes, least + one)
        return self._prepared(plans, wanted, context, left, of_all, mapped=mapped)

    def _keep_only(self, plans: PlanSet) -> None:
        used = {*plans.backends, *([self._block.backend] if self._block else ())}
        for other in [name for name in self._backends if name not in used]:
            self._backends.pop(other).close()

    def _in_memory(self, plans: PlanSet, wanted: Wanted) -> LoadPlan:
        options, parts = self._options, self._parts()  # measured once: the bill must add up
        held = sum(parts.values())
        all_weights = self._weights(wanted)
        plans = self._as_devices_take(plans, held + all_weights)
        work = self._work(plans)
        tight = held + all_weights + work + self._least_kv(plans) > self._granted.nbytes
        context = choose_context(
            self._source, options, held + all_weights + (0 if tight else work), self._kv_bytes(plans)
        )
        context = self._within_devices(context, plans, wanted)
        if self._build_for(context.tokens):
            again, wanted = self._planned(self._backends)
            plans = replace(
                again, ubatch=plans.ubatch, ubatch_why=plans.ubatch_why, host_ubatch=plans.host_ubatch
            )
        weights, one = self._weights(wanted), self._kv_bytes(plans)(context.tokens)
        free = self._granted.nbytes - held
        of_all = kv_of_all(one, free - weights - (0 if tight else work))
        paid = {breakdown.WEIGHTS: weights, breakdown.KV_ONE: one, breakdown.KV_ALL: of_all}
        # Where there is less, passes work in the reserve, and rows get no more than what is left.
        if (work := min(work, free - weights - of_all)) > 0:
            paid[breakdown.WORK] = work
        paid = breakdown.complete({**paid, **parts}, self._granted.nbytes)
        there, room = Residence(weights, weights, weights), max(weights, free - of_all)
        plans = replace(plans, memory=paid, weights=there)
        return self._prepared(plans, wanted, context, weights, of_all, room)

    def _work(self, plans: PlanSet) -> int:
        """What passes work in on the host: of as many tokens as it computes at once, or as devices do."""
        own = work_bytes(self._graph, plans.host_ubatch or plans.ubatch)
        return max(own, crossing_bytes(self._graph, plans.ubatch)) if plans.host_ubatch else own

    def _as_devices_take(self, plans: PlanSet, held: int) -> PlanSet:
        """Passes of as many tokens as a device takes, where plans may come to run prompts there alone:
        weights that do not stay there cross for each pass, however many tokens it has. The host's passes stay
        as long as they are."""
        if not self._prompts.decides_passes or self._homes:
            return plans
        devices = {n: b.most_at_once(self._graph.ops) for n, b in self._backends.items() if b.asynchronous}
        most = max(devices.values(), default=0)
        while most > plans.ubatch:
            why = f"as many as {max(devices, key=lambda n: devices[n])} has room for; {plans.ubatch} at once "
            why += "where the host computes"
            longer = replace(plans, ubatch=most, ubatch_why=why, host_ubatch=plans.ubatch)
            if held + self._work(longer) + self._usual_kv(longer) <= self._granted.nbytes:
                return longer
            most //= 2
        return plans

    def _from_disk(self, found: PiecedPlan) -> LoadPlan | None:
        """Weights in pieces."""
        kv_bytes = self._kv_bytes(found.plans)
        context = choose_context(self._source, self._options, found.fixed, kv_bytes, whole=False)
        context = self._within_devices(context, found.plans, found.wanted)
        if self._build_for(context.tokens) and (again := self._cut(found.backend)):
            found = again
        return self._in_pieces(found, context)

    def _fastest(self, homes: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """How much of what devices have room for is to lie there, where the others come from disk: all, the
        last half, or nothing. Each byte there is one less to read, so all of it unless passes have taken
        longer than they would with less on the device, by what disk and host are known to give. Passes of
        that are measured in turn, and the next start knows better."""
        if not self._options.measures or not homes:
            return homes
        found: list[tuple[float, tuple[Placement, ...]]] = []
        off = 1.0
        for some in dict.fromkeys((homes, homes[: len(homes) // 2], ())):
            self._homes = some
            pieces = next((p for name in self._backends if (p := self._cut(name))), None)
            if pieces is None:
                return homes
            seconds, seen = self._token_seconds(pieces, off)
            off = max(off, seen.off) if seen else off
            found.append((seconds if not found else seconds * WORTH, some))
        return min(found, key=lambda each: each[0])[1]

    def _token_seconds(self, found: PiecedPlan, off: float) -> tuple[float, PassTimes | None]:
        """A token of an answer in a short text, as runs saw it; else what disk and host would take, `off` by
        as much as other passes here."""
        context = self._options.ctx or usual(self._source, self._options)
        room = max(0, self._granted.nbytes - found.fixed - self._short_kv(found.plans, context))
        kept = choose_pieces(found.cut, room, policy_of(self._options.streaming))
        total = sum(piece.kept_bytes for piece in found.cut.pieces)
        seen = found.passes.at(kept.locked_bytes / total)
        if seen:
            return seen.seconds(1, kept.streamed_bytes, found.disk.rate), seen
        return off * max(total / BYTES_S, kept.streamed_bytes / found.disk.rate), None

    def _cut(self, name: str) -> PiecedPlan | None:
        """What has no home on a device on one backend, as one segment, in pieces."""
        backend = self._backends[name]
        partly = backend.partial()
        if partly is None or not ring_buffer.library():
            return None
        plans, wanted, (first, *further) = self._left_to(name)
        disk = self._disk()
        cut = None if further else partly.cut(first.ops, first.writes, disk.way.request)
        if cut is None or not all(map(can_stream, cut.pieces)):
            return None
        pieces = {piece.weight for piece in cut.pieces} | set(cut.lookups)
        whole = backend.resident_bytes([use for use in wanted[name] if use.weight not in pieces])
        parts = self._parts()  # measured once: the bill must add up
        others = sum(parts.values()) + whole
        plans = self._at_once(plans, others)
        work = work_bytes(self._graph, plans.ubatch)
        if prompts := self._prompts.choose(self._graph, name, plans, self._homes):
            work = max(work, crossing_bytes(self._graph, prompts.ubatch)) + prompts.host_bytes
            plans, wanted = prompts.over(plans), {**wanted, prompts.backend: [*prompts.wanted]}
        ahead = self._window(cut, disk, self._room(plans, others + work), plans.plan(1).threads)
        fixed, passes = others + work + ahead.nbytes, self._passes(name, plans)
        return PiecedPlan(name, plans, wanted, cut, whole, work, disk, ahead, fixed, parts, passes, prompts)

    def _passes(self, backend: str, plans: PlanSet) -> Passes:
        """Those of this model, by a name for all that take equally long."""
        file = f"{Path(self._source.path).name[-80:]} of {self._source.nbytes} bytes"
        there = Counter(home.backend for home in self._homes)
        beside = "".join(f", {n} units on {device}" for device, n in sorted(there.items()))
        return Passes(f"{file} on {backend} with {plans.plan(1).threads} threads{beside}")

    def _at_once(self, plans: PlanSet, others: int) -> PlanSet:
        """Each pass reads the same, however many tokens it has: as many as their memory is worth, which is
        not so much that nothing is left."""
        if self._options.wishes.ubatch:
            return plans
        left = self._room(plans, others)
        most = min(WORK_SHARE * self._granted.nbytes, left / 2)
        n = MOST_AT_ONCE
        while n > BLOCK and work_bytes(self._graph, n) > most:
            n //= 2
        return replace(plans, ubatch=n, ubatch_why=AS_MANY.format("weights from disk"))

    def _within_devices(self, context: Context, plans: PlanSet, wanted: Wanted) -> Context:
        """As long as the devices have room for keys and values of the layers that have their home there."""
        if self._options.ctx:
            return context
        for name in self._own.keys() & wanted.keys():
            own, backend = self._own[name], self._backends[name]
            ops = [op for s in plans.plan(1).segments if s.backend == name for op in s.ops]
            room = own.room + own.rows - backend.device_bytes(wanted[name])
            rows = self._sequence_bytes(ops, plans.ubatch)
            if (tokens := max(BLOCK, longest(context.tokens, rows, room))) < context.tokens:
                context = Context(tokens, f"what {name} has room for")
        return context

    def _least_kv(self, plans: PlanSet) -> int:
        return self._kv_bytes(plans)(self._options.ctx or BLOCK)

    def _short_kv(self, plans: PlanSet, context: int) -> int:
        tokens, shapes = min(SHORT, context), kept_by(self._graph.ops)
        return promised_for(shapes, self._quant, tokens, context, self._kv_bytes(plans))

    def _usual_kv(self, plans: PlanSet) -> int:
        return self._kv_bytes(plans)(usual(self._source, self._options))

    def _room(self, plans: PlanSet, held: int) -> int:
        """What is left beside that, once a text of the usual length has room for its keys and values; where
        not even that fits, beside the shortest."""
        left, length = self._granted.nbytes - held, usual(self._source, self._options)
        room = left - max(self._usual_kv(plans), self._short_kv(plans, length))
        return room if room > 0 else max(0, left - self._least_kv(plans))

    def _disk(self) -> Disk:
        """What the model's disk gives; a plan by a fixed order measures nothing."""
        if not self._options.measures:
            return Disk(USUAL, UNKNOWN_RATE, "nothing was measured")
        parts = (part for weight in self._graph.weights().values() for part in weight.parts)
        return disk_of(list(dict.fromkeys(part.path for part in parts if isinstance(part, Extent))))

    def _window(self, cut: Cut, disk: Disk, room: int, threads: int) -> Window:
        """How far ahead is read, if so much of the weights streams as does without any keys and values."""
        slots = [laid.nbytes for laid in map(lay_out, cut.pieces) if laid]
        streamed = max(0, sum(piece.nbytes for piece in cut.pieces) - room)
        pieces = -(-streamed * len(cut.pieces) // sum(piece.nbytes for piece in cut.pieces))
        layers = len({m.group(1) for piece in cut.pieces if (m := LAYER.fullmatch(piece.scope))})
        compute_s = sum(piece.kept_bytes for piece in cut.pieces) / BYTES_S
        load = DiskLoad(streamed, max(1, pieces), max(slots), max(1, layers), compute_s)
        return window(load, disk.way.readers, threads, disk.rate, room)

    def _in_pieces(self, found: PiecedPlan, context: Context) -> LoadPlan:
        one, limit = self._kv_bytes(found.plans)(context.tokens), self._granted.nbytes
        of_all = max(one, min(MAX_SEQUENCES * one, limit - found.fixed))
        paid = {
            breakdown.WINDOW: found.window.nbytes,
            breakdown.KV_ONE: one,
            breakdown.WORK: found.work,
            **found.besides,
        }
        short = self._short_kv(found.plans, context.tokens)
        within = partial(billed, found, paid, short, policy_of(self._options.streaming))
        self._keep_only(found.plans)
        streamed = StreamingPlan(
            backend=found.backend,
            cut=found.cut,
            granted=self._granted,
            whole=found.whole,
            fixed=found.fixed,
            work=found.work,
            disk=found.disk,
            window=found.window.nbytes,
            streaming=self._options.streaming,
            learns=self._options.measures,
            within=within,
            short=short,
            key=found.passes.key,
        )
        plans = within(self._granted)
        prepared = self._prepared(plans, found.wanted, context, found.whole, of_all, streamed=streamed)
        return replace(prepared, prompts=found.prompts)

    def _prepared(
        self,
        plans: PlanSet,
        wanted: Wanted,
        context: Context,
        weights: int,
        kv_bytes: int,
        room: int = 0,
        streamed: StreamingPlan | None = None,
        mapped: MappedPart | None = None,
        experts: ExpertPart | None = None,
    ) -> LoadPlan:
        notes = (
            *plans.notes,
            *about_states(self._graph, self._quant),
            *about_vision(self._source, self._options.vision),
            *about_whole(self._backends),
        )
        plans = replace(
            plans,
            devices=bills(self._backends, self._own, wanted),
            notes=notes,
            context=context.tokens,
            context_why=context.why,
        )
        own = {name: own for name, own in self._own.items() if name in self._backends}
        return LoadPlan(
            graph=self._graph,
            backends=self._backends,
            plans=plans,
            wanted=wanted,
            quant=self._quant,
            context=context.tokens,
            granted=self._granted,
            weights=weights,
            kv_bytes=kv_bytes,
            kv_one=self._kv_bytes(plans)(context.tokens),
            room=room,
            streamed=streamed,
            mapped=mapped,
            own=own,
            block=self._block,
            experts=experts,
        )

    def _weights(self, wanted: Mapping[str, Sequence[WeightUse]]) -> int:
        return sum(self._backends[name].resident_bytes(uses) for name, uses in wanted.items())

    def _kv_bytes(self, plans: PlanSet) -> KvBytes:
        return self._sequence_bytes(self._graph.ops, plans.ubatch)

    def _sequence_bytes(self, ops: Sequence[Op], ubatch: int) -> KvBytes:
        """What a sequence takes in the layers of some ops, by its length."""
        return partial(sequence_bytes, kept_by(ops), self._quant, ubatch, states=states_of(ops))

    def _build_for(self, context: int) -> bool:
        """Some models compute differently for sequences that stay shorter than they were built for: whether
        this one had to be built anew."""
        built_for = self._options.ctx or trained_for(self._source)
        before = self._graph
        if context != built_for:
            self._graph = build_graph(self._source, context, self._options.spatial)
        return self._graph != before


def _row_bytes(source: ModelSource, options: Options, quant: QuantType, ops: Sequence[Op]) -> int:
    """Keys and values of a sequence of some length, as far as some ops keep them."""
    most, context = options.wishes.ubatch or LARGEST_UBATCH, usual(source, options)
    return sequence_bytes(kept_by(ops), quant, most, context, states_of(ops))
