"""What of a budget goes to the experts of mixtures that do not fit into it, and what to expect then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from hetrun.executor.loading.disk_estimates import AS_MANY, BYTES_S, disk_of_weights, passes_of
from hetrun.executor.loading.load_parts import LoadChoice, LoadParts
from hetrun.executor.loading.memory_estimates import mixture_bytes, work_bytes
from hetrun.executor.loading.placement_planner import Wanted
from hetrun.executor.loading.prompt_device import WORK_SHARE
from hetrun.memory import breakdown
from hetrun.memory.ledger import MemoryGrant
from hetrun.planner.plan import PlanSet
from hetrun.planner.rates import Residence, TokenRates
from hetrun.prefetch import expert_cache
from hetrun.prefetch.cached_experts import FEW, ExpertPart, buffers_in, least_bytes, readers_of
from hetrun.prefetch.disk_probe import Disk
from hetrun.prefetch.expert_outlook import TokenForecast
from hetrun.prefetch.expert_records import Records, records_of
from hetrun.prefetch.pass_times import Passes, basis_of
from hetrun.system.units import format_bytes

PROMPTS = (2048, 1024, 512, 256)  # tokens of a pass while experts come from disk


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """A model on one backend, its experts in slots."""

    backend: str
    plans: PlanSet
    wanted: Wanted
    records: Records
    whole: int  # bytes of weights that have to be there as a whole
    work_of: Callable[[int], int]  # bytes that passes of this many tokens work in
    work: int  # that the longest passes work in
    disk: Disk
    buffers: int
    besides: Mapping[str, int]  # what else is held, as a bill has it
    passes: Passes  # as earlier runs saw them

    @property
    def window(self) -> int:
        """Bytes of the buffers that experts are read to."""
        return self.buffers * self.records.buffer_bytes

    @property
    def fixed(self) -> int:
        """Bytes that are held whatever stays of the experts."""
        return self.whole + self.work + self.window + sum(self.besides.values())

    @property
    def least(self) -> int:
        """The same with the fewest slots."""
        return self.fixed + least_bytes(self.records)

    def expected(self, room: int) -> TokenForecast:
        """A token, with so much memory for slots."""
        records = self.records
        active = self.whole + sum(m.used * m.slot_bytes for m in records.mixtures)
        seen = self.passes.at(max(0, room) / records.packed_bytes)
        return TokenForecast(records, max(0, room), self.disk.rate, active / BYTES_S, seen)

    def _rates(self, first: TokenForecast, full: TokenForecast) -> TokenRates:
        """Passes as the last runs saw them, or as other mixtures run."""
        tokens, prompts = self.plans.ubatch, None
        if first.seen and (seconds := first.seen.seconds(tokens, self.records.stored_bytes, first.rate)):
            prompts = tokens / seconds
        return TokenRates(prompts, first.tokens_per_s, full.tokens_per_s, basis_of(first.seen))

    def billed(self, one: int, short: int, granted: MemoryGrant) -> PlanSet:
        """The plan within a budget: what it takes beside keys and values of one sequence, and why. Experts
        have the room that a `short` text leaves, until a longer one comes."""
        records, room = self.records, granted.nbytes - self.fixed - max(short, one)
        first = self.expected(granted.nbytes - self.fixed + self.work - self.work_of(FEW) - short)
        expected = self.expected(room)
        size = int(expected.share * records.packed_bytes)
        notes = (
            f"in a full context {expected.slots:,} of {len(records.where):,} experts have a slot in memory, "
            f"{format_bytes(size)} of {format_bytes(records.packed_bytes)}, because {granted.words} is "
            "less than all of them need; the others are read when they are chosen, "
            f"{format_bytes(expected.chosen_bytes)} for a token that finds none in memory",
            *expected.notes,
            f"disk: {self.disk.why}",
        )
        if expected.share == 1:
            notes = (f"all experts have a slot now: {granted.words} is enough",)
        paid = {
            breakdown.WEIGHTS: self.whole,
            breakdown.WINDOW: self.window,
            breakdown.EXPERTS: size,
            breakdown.KV_ONE: one,
            breakdown.WORK: self.work,
            **self.besides,
        }
        return replace(
            self.plans,
            memory=breakdown.complete(paid, granted.nbytes),
            notes=notes,
            weights=Residence(
                self.whole + records.packed_bytes,
                self.whole + int(first.share * records.packed_bytes),
                self.whole + size,
                first.missing_bytes,
                expected.missing_bytes,
            ),
            rates=self._rates(first, expected),
        )


class ExpertPlanner:
    """Plans of a model on one backend, with slots in memory for as many experts as there is room for."""

    def __init__(self, parts: LoadParts) -> None:
        self._options, self._contexts = parts.options, parts.contexts
        self._placement, self._budget = parts.placement, parts.budget

    def plan(self, name: str) -> LoadChoice | None:
        """Everything on this backend; None where it cannot, or the fewest slots have no room."""
        found, budget, contexts = self._slots(name), self._budget, self._contexts
        if found is None or not budget.is_enough(found.least, found.plans):
            return None
        context = contexts.choose(found.least, found.plans, whole=False)
        one = contexts.kv_bytes(found.plans)(context.tokens)
        short = contexts.short_kv(found.plans, context.tokens)
        of_all = budget.kv_of_all(one, found.least)
        self._placement.close_unused(found.plans, budget.block)
        part = ExpertPart(
            backend=name,
            records=found.records,
            granted=budget.granted,
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
        plans = part.within(budget.granted)
        return LoadChoice(plans, found.wanted, context, found.whole, of_all, experts=part)

    def refuse(self, name: str, short: int) -> None:
        """Raise TooLittle if slots on this backend need less than a budget that is `short` of more bytes."""
        found = self._slots(name)
        if found and found.least + self._contexts.least_kv(found.plans) < self._budget.nbytes + short:
            self._contexts.choose(found.least, found.plans, whole=False)

    def _slots(self, name: str) -> ExpertPlan | None:
        """None where not all mixtures can have slots for their experts."""
        placement, budget, graph = self._placement, self._budget, self._contexts.graph
        backend = placement.backends[name]
        caching = backend.experts()
        if caching is None or not expert_cache.library():
            return None
        plans, wanted, segment = placement.plan_on(name)
        mixtures = caching.mixtures(segment.ops) if segment else ()
        records = records_of(mixtures) if mixtures else None
        if records is None:
            return None
        experts = {weight for mixture in mixtures for weight in mixture.weights}
        whole = backend.resident_bytes([use for use in wanted[name] if use.weight not in experts])
        parts = budget.parts()  # measured once: the bill must add up
        disk = disk_of_weights(graph, self._options.measures)

        def work_of(tokens: int) -> int:
            return work_bytes(graph, tokens) + mixture_bytes(mixtures, tokens)

        plans = self._lengthen_passes(plans, work_of)
        work = work_of(plans.ubatch)
        room = budget.room(plans, sum(parts.values()) + whole + work)
        return ExpertPlan(
            backend=name,
            plans=plans,
            wanted=wanted,
            records=records,
            whole=whole,
            work_of=work_of,
            work=work,
            disk=disk,
            buffers=buffers_in(records, room, readers_of(records, disk.way)),
            besides=parts,
            passes=passes_of(self._contexts.source, name, plans, placement.homes),
        )

    def _lengthen_passes(self, plans: PlanSet, work_of: Callable[[int], int]) -> PlanSet:
        """A pass of a prompt reads nearly all experts that have no slot, however many tokens it has."""
        if self._options.wishes.ubatch:
            return plans
        most = WORK_SHARE * self._budget.nbytes
        n = next((n for n in PROMPTS if work_of(n) <= most), min(plans.ubatch, PROMPTS[-1]))
        return replace(plans, ubatch=n, ubatch_why=AS_MANY.format("experts that its tokens choose"))
