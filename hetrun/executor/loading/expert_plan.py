"""What of a budget goes to the experts of mixtures that do not fit into it, and what to expect then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hetrun.backend import WeightUse
from hetrun.memory import breakdown
from hetrun.memory.ledger import MemoryGrant
from hetrun.planner.plan import PlanSet
from hetrun.planner.rates import Residence, TokenRates
from hetrun.prefetch.cached_experts import FEW, least_bytes
from hetrun.prefetch.disk_probe import Disk
from hetrun.prefetch.expert_outlook import TokenForecast
from hetrun.prefetch.expert_records import Records
from hetrun.prefetch.pass_times import Passes, basis_of
from hetrun.system.units import format_bytes


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """A model on one backend, its experts in slots."""

    backend: str
    plans: PlanSet
    wanted: dict[str, list[WeightUse]]
    records: Records
    whole: int  # bytes of weights that have to be there as a whole
    work_of: Callable[[int], int]  # bytes that passes of this many tokens work in
    work: int  # that the longest passes work in
    disk: Disk
    buffers: int
    besides: Mapping[str, int]  # what else is held, as a bill has it
    bytes_s: float  # of weights that a token computes with
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
        return TokenForecast(records, max(0, room), self.disk.rate, active / self.bytes_s, seen)

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
