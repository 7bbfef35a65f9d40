"""A model whose experts are not all in memory, while it runs: how much of them there is room for.

Memory that nothing else needs holds experts. What the books have left is looked at between passes: when keys
and values grow, slots are given up, those first that are worth least; when there is more room again, there
are more slots, and what is chosen fills them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Backend
from hetrun.backend.weight_streaming import MOST_HINTED
from hetrun.client.events import Streaming
from hetrun.errors import BudgetError
from hetrun.memory import breakdown
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.ledger import Books, MemoryGrant
from hetrun.planner.plan import PlanSet
from hetrun.prefetch.disk_probe import Disk, ReadMethod, remember
from hetrun.prefetch.expert_cache import ExpertCache, ExpertReading
from hetrun.prefetch.expert_records import Records
from hetrun.prefetch.expert_trace import HitShares, judge
from hetrun.prefetch.hint_trial import HintTrial
from hetrun.prefetch.pass_times import learn
from hetrun.prefetch.streamed_weights import (
    GROWTH,
    LEAST_ALIKE,
    LOOK_S,
    SMOOTHING,
    WORTH,
    Compute,
    PassDelays,
    spare,
)
from hetrun.system.address_space import HUGE_PAGE
from hetrun.system.ema import smoothed
from hetrun.system.units import format_minimum

SHARES_S = 10.0  # between looks at which kinds of experts are worth their memory
AHEAD_SHARE = 16  # buffers take at most 1 / AHEAD_SHARE of the room
LEAST_BUFFERS = 4
UNDER_WAY = 4 << 20  # bytes of reads at once
MOST_READERS = 4  # 8 read no more, and what they read for hints that were wrong is twice as much
LEAST_LEARNT = 1 << 30  # bytes that were read; of fewer nothing is kept
FEW = 64  # tokens of passes that always have room to work in
LONG_S = 20.0  # for which there is still room for a long one afterwards


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """What was decided about a model whose experts are not all in memory."""

    backend: str
    records: Records
    granted: MemoryGrant
    whole: int  # bytes of weights that are there as a whole
    fixed: int  # bytes that are held whatever stays of the experts
    work_of: Callable[[int], int]  # bytes that passes of this many tokens work in
    disk: Disk
    buffers: int  # that experts are read to
    learns: bool  # what the disk gives is kept for the next start
    within: Callable[[MemoryGrant], PlanSet]  # the plan in a budget, with what it takes and why
    short: int  # bytes of keys and values that experts leave room for from the beginning
    key: str  # by which times of passes are kept
    work: int  # of `fixed` what the longest passes work in


def readers_of(records: Records, way: ReadMethod) -> int:
    """How many threads read experts: what is under way at once keeps the disk busy, and a part of an expert
    is less than what a way of reading asks for at a time."""
    return max(way.readers, min(MOST_READERS, -(-UNDER_WAY // records.read_bytes)))


def buffers_in(records: Records, room: int, readers: int) -> int:
    """How many experts are read or wait to be packed at once: all that a token may choose in one layer and as
    many of the next one, as far as there is room for them."""
    used = max(m.used for m in records.mixtures)
    return max(LEAST_BUFFERS, readers + 1, min(2 * used + readers, _most_buffers(records, room)))


def buffers_of_prompts(records: Records, room: int) -> int:
    """How many may be read for a prompt while all but the experts of a layer is computed: half of a mixture,
    as far as there is room for them. The disk rests after that."""
    return min(max(m.experts for m in records.mixtures) // 2, _most_buffers(records, room))


def _most_buffers(records: Records, room: int) -> int:
    return room // AHEAD_SHARE // records.buffer_bytes


def least_slots(records: Records) -> list[int]:
    """Of each kind: what a token chooses."""
    used = [0] * len(records.sizes)
    for mixture, kind in zip(records.mixtures, records.kinds, strict=True):
        used[kind] = max(used[kind], mixture.used)
    return [min(n, count) for n, count in zip(used, records.counts, strict=True)]


def least_bytes(records: Records) -> int:
    """What the fewest slots take."""
    slots = zip(least_slots(records), records.sizes, strict=True)
    return sum(-(-n * size // HUGE_PAGE) * HUGE_PAGE for n, size in slots)


def divided(records: Records, room: int, worth: NDArray[np.float64] | None = None) -> list[int]:
    """How many slots of each kind so much memory has room for: equal shares, or as many as hold what is worth
    most for its bytes."""
    sizes, counts = np.array(records.sizes), np.array(records.counts)
    room = max(room - HUGE_PAGE * len(sizes), 0)
    if room >= records.packed_bytes:
        return [int(n) for n in counts]
    if worth is None or len(sizes) == 1:
        found = (counts * (room / records.packed_bytes)).astype(np.int64)
    else:
        kinds = np.repeat(records.kinds, [m.experts for m in records.mixtures])
        by_worth = np.argsort(-(worth - np.log2(sizes[kinds])), kind="stable")
        fit = by_worth[np.cumsum(sizes[kinds[by_worth]]) <= room]
        found = np.bincount(kinds[fit], minlength=len(sizes))
    return [max(int(n), least) for n, least in zip(found, least_slots(records), strict=True)]


class FromExperts:
    """Between a backend that multiplies by experts, the cache that has them, and the budget.

    All of it belongs to the engine's thread.
    """

    def __init__(self, part: ExpertPart, backend: Backend, kv: KvCache, books: Books) -> None:
        caching = backend.experts()
        assert caching is not None
        self._part, self._backend, self._kv, self._books = part, backend, kv, books
        self.least = min(part.granted.nbytes, part.fixed + least_bytes(part.records) + kv.least_bytes)
        readers = readers_of(part.records, part.disk.way)
        most = max(m.experts for m in part.records.mixtures)
        self.cache = books.take(
            breakdown.WINDOW,
            "anonymous",
            part.buffers * part.records.buffer_bytes,
            lambda: ExpertCache(part.records, ExpertReading(part.buffers, readers, most=most)),
        )
        caching.prepare(part.records.mixtures, self.cache)
        self._late, self._compute, self.hints = PassDelays(), Compute(), HintTrial()
        self._looked = self._shared = self._long_s = 0.0
        self._longest = FEW  # tokens of passes that there is room for
        self._last = self.cache.counts
        self._found: dict[bool, float] = {}  # the share of chosen experts in short passes, and in long ones

    @property
    def granted(self) -> MemoryGrant:
        """The budget."""
        return self._books.granted

    def open(self) -> None:
        """Once everything else is in memory that is there from the beginning."""
        self._resize(self._room())
        self._kv.guard_growth(self._make_room)

    def _make_room(self, kv_bytes: int) -> None:
        """Keys and values may take so much from now on."""
        missing = -self._slack(kv_bytes)
        if missing > 0:
            self._resize(self.cache.promised_bytes - missing)
        self._books.grows(breakdown.KV, "shared", self._kv.held_bytes, kv_bytes)

    def expect(self, tokens: int) -> None:
        """A pass of `tokens` tokens comes: what it works in has room from now on."""
        if tokens > FEW:
            self._long_s = perf_counter()
        if tokens > self._longest:
            self._longest = tokens
            slack, promised = self._slack(), self.cache.promised_bytes
            buffers = max(self._part.buffers, buffers_of_prompts(self._part.records, promised + slack))
            if (slack := slack - self._more_bytes(buffers)) < 0:
                self._resize(promised + slack)
            self._widen(buffers)

    def _more_bytes(self, buffers: int) -> int:
        """What this number of buffers takes beside those that there are."""
        return (buffers - self.cache.buffers) * self._part.records.buffer_bytes

    def _widen(self, buffers: int) -> None:
        self.cache.widen(buffers)
        self._books.holds(breakdown.WINDOW, "anonymous", buffers * self._part.records.buffer_bytes)

    def tend(self) -> None:
        """Between two passes: give up what is too much, take what there is room for again."""
        now = perf_counter()
        if now - self._long_s > LONG_S and self._longest > FEW:
            self._longest = FEW
            self._widen(self._part.buffers)
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        if self._kv.held_bytes > self._kv.used_bytes + WORTH:
            self._kv.trim()
        slack, promised = self._slack(), self.cache.promised_bytes
        if slack < 0 or (slack > WORTH and promised < self._part.records.packed_bytes):
            self._resize(promised + slack - GROWTH)
        elif now - self._shared > SHARES_S and len(self._part.records.sizes) > 1:
            self._shared = now
            self._resize(promised)

    def set_limit(self, granted: MemoryGrant) -> None:
        """Another budget from now on."""
        if granted.nbytes < (least := self.least):
            raise BudgetError(f"{granted.words} is too little: at least {format_minimum(least)} are needed")
        before, self._books.granted = self.granted, granted
        self._widen(self._part.buffers)
        room = self._room()
        if room < least_bytes(self._part.records):
            self._books.granted = before
            needed = granted.nbytes - room + least_bytes(self._part.records)
            mend = f"Try again when fewer answers are running, or restart with {granted.as_option}"
            raise granted.below_use(needed, mend)
        self._resize(room)
        self._kv.limit_bytes = granted.nbytes - self._part.fixed - least_bytes(self._part.records)

    def _resize(self, room: int) -> None:
        """Slots in so much memory: of each kind as many as hold what is worth most, once that is known."""
        if room < least_bytes(self._part.records):  # the buffers of prompts go first
            room -= self._more_bytes(self._part.buffers)
            self._widen(self._part.buffers)
        worth = self.cache.worth if self._last.wanted else None
        self.cache.resize(divided(self._part.records, room, worth))
        self._book()

    def _book(self) -> None:
        self._books.grows(breakdown.EXPERTS, "anonymous", self.cache.held_bytes, self.cache.promised_bytes)

    def look(self) -> None:
        """Bring the books in line with what there is."""
        self._book()
        self._books.grows(breakdown.KV, "shared", self._kv.held_bytes, self._kv.promised_bytes)
        work = self._part.work_of(self._longest)
        self._books.promise(breakdown.WORK, max(0, work - self._backend.overhead_bytes))
        self._books.reconcile()

    def _slack(self, kv_bytes: int = 0) -> int:
        """Memory that may still be taken, once keys and values take so much: by the books, and by the plan,
        which they keep to where a process takes less than it might."""
        self.look()
        return spare(self._books, self._kv, kv_bytes, self._planned)

    def _planned(self, kv_bytes: int) -> int:
        """What the plan leaves beside experts, keys and values, with the passes and buffers of now."""
        part = self._part
        work = part.work_of(self._longest) - part.work
        buffers = (self.cache.buffers - part.buffers) * part.records.buffer_bytes
        others = part.fixed + work + buffers + max(kv_bytes, part.short)
        return self.granted.nbytes - others - self.cache.promised_bytes

    def _room(self) -> int:
        """What slots may take."""
        return self.cache.promised_bytes + self._slack()

    def observe(self, seconds: float, tokens: int, given: int, answering: bool, gap: float) -> None:
        """A pass has ended and gave `given` tokens; `answering`: all but one of each sequence were guesses.
        It began `gap` seconds after the last one of the same answer."""
        last, now = self._last, self.cache.counts
        waited = (now.waited - last.waited) / 1e9
        self._late.add(seconds, waited, now.bytes - last.bytes, given, answering, gap)
        self._compute.observe(tokens, max(0.0, seconds - waited))
        if tokens <= MOST_HINTED:
            self.hints.observe(seconds)
            self.cache.listen(self.hints.on)
        if wanted := now.wanted - last.wanted:
            found, long = 1 - (now.missed - last.missed) / wanted, tokens > FEW
            self._found[long] = smoothed(self._found.get(long), found, SMOOTHING)
        self._last = now

    def predict(self, tokens: int) -> float | None:
        """Seconds of a pass of `tokens` tokens; None before the first."""
        return self._compute.predict(tokens, self._missing(tokens), self._rate)

    @property
    def _rate(self) -> float:
        """Bytes a second, as reads showed."""
        counts = self._last
        return 1e9 * counts.bytes / counts.busy if counts.busy else self._part.disk.rate

    def _missing(self, tokens: int) -> float:
        """Bytes that a pass of `tokens` tokens reads: the experts that they are expected to choose together,
        if each chooses by itself, as far as these are not there."""
        misses, total = 1 - self._found.get(tokens > FEW, 0.0), 0.0
        records = self._part.records
        for mixture, size in zip(records.mixtures, records.expert_bytes, strict=True):
            chosen = mixture.experts * (1 - (1 - mixture.used / mixture.experts) ** tokens)
            total += misses * chosen * size
        return total

    def report(self) -> Streaming:
        """What passes are like."""
        late = self._late
        return Streaming(
            passes=late.passes,
            bytes_read=self._last.bytes,
            disk_bytes_s=self._rate,
            waiting=late.waited / late.seconds if late.seconds else 0.0,
            bytes_per_token=late.bytes_read / late.tokens if late.tokens else 0.0,
            locked_bytes=self._part.whole + self.cache.held_bytes,
            streamed_bytes=self._part.records.stored_bytes,
            budget=self.granted.nbytes,
            least=self.least,
            experts=len(self._part.records.where),
            slots=sum(self.cache.counts_of_kinds),
            found=self._found.get(False, self._found.get(True, 0.0)),
            guessed=self._last.hits_of_hints / self._last.hinted if self._last.hinted else 0.0,
        )

    def _keep_times(self) -> None:
        """What passes took, for the next plan; a run of a few passes tells too little."""
        if self._late.answers < LEAST_ALIKE:
            return
        if times := self._compute.times(self._late, self._rate, self._found.get(False, 0.0)):
            learn(self._part.key, self.cache.held_bytes / self._part.records.packed_bytes, times)

    def hit_shares(self) -> HitShares | None:
        """How well experts were kept lately; None: too little was chosen yet."""
        return judge(self._part.records, self.cache.counts_of_kinds, self.cache.trace)

    def close(self) -> None:
        """Give everything back, and keep what was learnt of the disk."""
        if self._part.learns:
            self._keep_times()
        if self._part.learns and self._last.bytes > LEAST_LEARNT:
            with suppress(OSError):  # a file that is gone
                remember(max(self.cache.files, key=os.path.getsize), self._part.disk.way, self._rate)
        self._kv.guard_growth(None)  # or they keep each other, and all keys and values with them
        self.cache.close()
