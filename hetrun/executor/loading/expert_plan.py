"""What of a budget goes to the experts of mixtures that do not fit into it, and what to expect then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hetrun.backend import WeightUse
from hetrun.memory import breakdown
from hetrun.memory.ledger import Granted
from hetrun.planner.plan import PlanSet
from hetrun.prefetch.cached_experts import least_bytes
from hetrun.prefetch.disk_probe import Disk
from hetrun.prefetch.expert_outlook import Expected
from hetrun.prefetch.expert_records import Records


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """A model on one backend, its experts in slots."""

    backend: str
    plans: PlanSet
    wanted: dict[str, list[WeightUse]]
    records: Records
    whole: int  # bytes of weights that have to be there as a whole
    work_of: Callable[[int], int]  # bytes that passes of so many tokens work in
    work: int  # that the longest passes work in
    disk: Disk
    buffers: int
    besides: Mapping[str, int]  # what else is held, as a bill has it
    bytes_s: float  # of weights that a token computes with

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

    def expected(self, room: int) -> Expected:
        """A token, with so much memory for slots."""
        records = self.records
        active = self.whole + sum(m.used * m.slot_bytes for m in records.mixtures)
        return Expected(records, room, self.disk.rate, active / self.bytes_s)

    def billed(self, one: int, granted: Granted) -> PlanSet:
        """The plan within a budget: what it takes beside keys and values of one sequence, and why."""
        records, room = self.records, max(0, granted.nbytes - self.fixed - one)
        expected = self.expected(room)
        size = int(expected.share * records.packed_bytes)
        notes = (
            f"{expected.slots:,} of {len(records.where):,} experts have a slot in memory, "
            f"{size / 1e9:.2f} of {records.packed_bytes / 1e9:.2f} GB: {granted.words} is less than all of "
            "them need; others are read when they are chosen, "
            f"{expected.chosen_bytes / 1e6:.0f} MB for a token of which none is there",
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
            streamed_bytes=expected.missing_bytes,
            pass_s=expected.token.seconds,
        )
