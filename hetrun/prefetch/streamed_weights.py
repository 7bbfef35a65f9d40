"""A model whose weights are not all in memory, while it runs: how much of them there is room for, and which
pieces those are.

Memory that nothing else needs holds weights. So the room for them is what the books have left, and those are
looked at between passes: when keys and values grow, or a graph was compiled, pieces are given up, which takes
no time; when there is more room again, they are read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from time import perf_counter

from hetrun.backend import Backend
from hetrun.backend.weight_streaming import Cut, Piece
from hetrun.client.events import Streaming
from hetrun.errors import BudgetError, ModelFileError
from hetrun.memory import breakdown
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.ledger import Books, MemoryGrant
from hetrun.planner.plan import PlanSet
from hetrun.prefetch.disk_probe import Disk, DiskRate, remember
from hetrun.prefetch.pass_times import FEW, MOST_OFF, PassTimes, learn
from hetrun.prefetch.residency_policy import POLICIES, PinnedPieces, Policy, choose, resize, switch
from hetrun.prefetch.streamer import Streamer
from hetrun.system.ema import smoothed
from hetrun.system.estimate import TrackedEstimate
from hetrun.system.units import format_minimum

log = logging.getLogger(__name__)

GROWTH = 8 << 20  # room is made in steps of so much
WORTH = 2 * GROWTH  # so much must be free before pieces are read again
LOOK_S = 0.25  # between looks at what the kernel counts
SMOOTHING = 0.2
LEAST_ALIKE = 4  # passes of answers that are worth keeping as what they take

Progress = Callable[[float], None]


def policy_of(streaming: str) -> Policy:
    """What stays, by what the user calls the way it is done; the other ways are about reading."""
    return next((policy for policy in POLICIES if policy == streaming), "balanced")


@dataclass(slots=True)
class PassDelays:
    """Recent passes: those of answers, or of prompts before there are any."""

    passes: int = 0
    alike: int = 0  # how many of them in a row were all of answers, or all of prompts
    answering: bool = False
    seconds: float = 0.0
    waited: float = 0.0
    bytes_read: float = 0.0
    tokens: float = 0.0
    answers: int = 0  # passes of answers in all, and what they took in all, with what came between them
    answers_s: float = 0.0
    answers_bytes: int = 0

    def add(
        self, seconds: float, waited: float, nbytes: int, tokens: int, answering: bool, gap: float = 0.0
    ) -> None:
        """One more, which began `gap` seconds after the end of the last one of the same answer."""
        self.passes += 1
        if answering:
            self.answers += 1
            self.answers_s += seconds + gap
            self.answers_bytes += nbytes
        if self.answering and not answering:
            return
        self.alike = self.alike + 1 if answering == self.answering else 1
        share, self.answering = max(SMOOTHING, 1 / self.alike), answering
        self.seconds = smoothed(self.seconds, seconds, share)
        self.waited = smoothed(self.waited, waited, share)
        self.bytes_read = smoothed(self.bytes_read, nbytes, share)
        self.tokens = smoothed(self.tokens, tokens, share)


class Compute:
    """What passes take where the disk does not make them wait: so much, and so much for each token."""

    def __init__(self) -> None:
        self._least, self._each = TrackedEstimate(), TrackedEstimate()

    def observe(self, tokens: int, seconds: float) -> None:
        """One more pass: one of a few tokens tells what weights take, one of many what each token adds."""
        if tokens <= FEW:
            self._least.observe(seconds)
        else:
            self._each.observe(max(0.0, seconds - self._least.value) / tokens)

    def predict(self, tokens: int, nbytes: float, rate: float) -> float | None:
        """Seconds of a pass of `tokens` tokens that reads `nbytes` meanwhile; None: nothing was seen yet."""
        least, each = self._least.value, self._each.value
        if not least and not each:
            return None
        return PassTimes(least, each, off=1.0).seconds(tokens, nbytes, rate)

    def times(self, late: PassDelays, rate: float, found: float = 0.0) -> PassTimes | None:
        """What is worth keeping of the passes of answers; None: there were none."""
        least, n = self._least.value, late.answers
        if not least or not n:
            return None
        reckoned = n * max(least, late.answers_bytes / n / rate)
        return PassTimes(least, self._each.value, min(MOST_OFF, late.answers_s / reckoned), found, rate)


@dataclass(frozen=True, slots=True)
class StreamingPlan:
    """What was decided about a model whose weights are not all in memory."""

    backend: str
    cut: Cut
    granted: MemoryGrant
    whole: int  # bytes of weights that are there as a whole
    fixed: int  # bytes that are held whatever stays of the others
    work: int  # that passes work in
    disk: Disk
    window: int  # bytes that are read ahead
    streaming: str  # what the user calls the way it is done
    learns: bool  # what the disk gives is kept for the next start
    within: Callable[[MemoryGrant], PlanSet]  # the plan in a budget, with what it takes and why
    short: int  # bytes of keys and values that weights leave room for from the beginning
    key: str  # by which times of passes are kept


def spare(books: Books, kv: KvCache, kv_bytes: int, planned: Callable[[int], int]) -> int:
    """The less of what the books have left and what the plan leaves, once keys and values take `kv_bytes`."""
    wanted = max(kv.promised_bytes, kv_bytes)
    return min(books.free - (wanted - kv.promised_bytes), planned(wanted))


class FromDisk:
    """Between a backend that computes with pieces, the streamer that brings them, and the budget.

    All of it belongs to the engine's thread.
    """

    def __init__(self, streamed: StreamingPlan, backend: Backend, kv: KvCache, books: Books) -> None:
        partial, cut = backend.partial(), streamed.cut
        assert partial is not None
        self._streamed, self._backend = streamed, backend
        self._partial, self._cut = partial, cut
        self._books, self._kv = books, kv
        # One sequence of full length has room whatever the budget is.
        self.least = min(streamed.granted.nbytes, streamed.fixed + kv.least_bytes)
        self._policy = policy_of(streamed.streaming)
        way = streamed.disk.way
        synchronous = streamed.streaming == "synchronous"
        self._streamer = books.take(
            breakdown.WINDOW,
            "anonymous",
            streamed.window,
            lambda: Streamer(cut, streamed.window, way.readers, way.direct, synchronous=synchronous),
        )
        self._kept = choose(cut, 0, self._policy)
        self._late = PassDelays()
        self._compute = Compute()
        self._rate = DiskRate(streamed.disk.rate)
        self._looked = 0.0
        partial.prepare(cut, self._streamer, self._streamer.places, self._streamer.files)
        self._follow()

    @property
    def kept(self) -> PinnedPieces:
        """What stays."""
        return self._kept

    @property
    def granted(self) -> MemoryGrant:
        """The budget."""
        return self._books.granted

    def open(self, progress: Progress) -> None:
        """Read what stays, once everything else is in memory that is there from the beginning."""
        self._hold(choose(self._cut, self._room(), self._policy), progress)
        # What one sequence of full length does not push out is going to stay.
        least = resize(self._kept, self._kept.locked_bytes - self._kv.least_bytes)
        self._partial.settle([self._cut.pieces[number] for number in sorted(least.numbers)])
        self._kv.guard_growth(self._make_room)

    def _make_room(self, kv_bytes: int) -> None:
        """Keys and values may take so much from now on."""
        missing = -self._slack(kv_bytes)
        if missing > 0:
            self._hold(resize(self._kept, self._kept.locked_bytes - missing))
        self._books.grows(breakdown.KV, "shared", self._kv.held_bytes, kv_bytes)

    def tend(self) -> None:
        """Between two passes: give up what is too much, bring in what there is room for again."""
        if perf_counter() - self._looked < LOOK_S:
            return
        self._looked = perf_counter()
        if self._kv.held_bytes > self._kv.used_bytes + WORTH:
            self._kv.trim()
        slack = self._slack()
        if slack < 0 or (slack > WORTH and self._kept.streamed):
            try:
                self._hold(resize(self._kept, self._kept.locked_bytes + slack - GROWTH))
            except ModelFileError as e:
                # No request asked for this. If it concerns the next pass, that pass reports it.
                log.warning("weights that would fit into memory could not be read: %s", e)

    def set_limit(self, granted: MemoryGrant) -> None:
        """Another budget from now on."""
        if granted.nbytes < (least := self.least):
            raise BudgetError(f"{granted.words} is too little: at least {format_minimum(least)} are needed")
        before, self._books.granted = self.granted, granted
        try:
            if (room := self._room()) < 0:
                mend = f"Try again when fewer answers are running, or restart with {granted.as_option}"
                raise granted.below_use(granted.nbytes - room, mend)
            self._hold(choose(self._cut, room - GROWTH, self._policy))
        except BaseException:
            self._books.granted = before
            raise
        # Keys and values may take what weights can do without, and push them out as they grow.
        self._kv.limit_bytes = granted.nbytes - self._streamed.fixed

    def look(self) -> None:
        """Bring the books in line with what there is."""
        self._books.grows(breakdown.KV, "shared", self._kv.held_bytes, self._kv.promised_bytes)
        # What passes do not yet work in.
        self._books.promise(breakdown.WORK, max(0, self._streamed.work - self._backend.overhead_bytes))
        self._books.reconcile()

    def _slack(self, kv_bytes: int = 0) -> int:
        """Memory that may still be taken, once keys and values take so much: by the books, and by the plan,
        which they keep to where a process takes less than it might."""
        self.look()
        return spare(self._books, self._kv, kv_bytes, self._planned)

    def _planned(self, kv_bytes: int) -> int:
        """What the plan leaves beside weights, keys and values."""
        streamed = self._streamed
        others = streamed.fixed + max(kv_bytes, streamed.short)
        return self.granted.nbytes - others - self._kept.locked_bytes

    def _room(self) -> int:
        """What pieces may take."""
        return self._kept.locked_bytes + self._slack()

    def _hold(self, kept: PinnedPieces, progress: Progress | None = None) -> None:
        """Give up what is not to stay any more, then bring in what is missing."""
        drop, bring = switch(self._kept, kept)
        for piece in drop:
            self._partial.drop(piece)
        try:
            self._book(kept.locked_bytes)
            self._bring(bring, progress)
        except BaseException:
            # What was given up is gone, and must not be taken for resident: so nothing stays, for now.
            stayed = [self._cut.pieces[number] for number in self._kept.numbers] if drop else []
            for piece in (*bring, *stayed):
                self._partial.drop(piece)
            self._kept = resize(kept, 0) if drop else self._kept
            self._book(self._kept.locked_bytes)
            self._follow()
            raise
        self._kept = kept
        self._follow()

    def _book(self, locked: int) -> None:
        """So much of the pieces is to be in memory; BudgetError where that is more than there is room for."""
        self._books.keep_at(breakdown.WEIGHTS, "anonymous", self._streamed.whole + locked)

    def _bring(self, bring: Sequence[Piece], progress: Progress | None) -> None:
        total, done = sum(piece.nbytes for piece in bring) or 1, 0
        with closing(self._streamer.each(bring)) as pieces:
            for piece, stored in pieces:
                self._partial.keep(piece, stored)
                done += piece.nbytes
                if progress:
                    progress(done / total)

    def _follow(self) -> None:
        self._streamer.follow(self._kept.streamed)
        self._partial.follow(self._kept.streamed)

    def observe(self, seconds: float, tokens: int, given: int, answering: bool, gap: float) -> None:
        """A pass has ended and gave `given` tokens; `answering`: all but one of each sequence were guesses.
        It began `gap` seconds after the last one of the same answer."""
        stats = self._streamer.stats
        self._late.add(seconds, stats.pass_waited, stats.pass_bytes, given, answering, gap)
        self._rate.observe(stats.pass_bytes, seconds, stats.pass_waited)
        self._compute.observe(tokens, seconds - stats.pass_waited)

    def predict(self, tokens: int) -> float | None:
        """Seconds of a pass of `tokens` tokens; None before the first."""
        return self._compute.predict(tokens, self._kept.streamed_bytes, self._rate.rate)

    def seconds(self, tokens: int) -> float:
        """The same; before the first, what reading alone takes."""
        return self.predict(tokens) or self._kept.streamed_bytes / self._rate.rate

    @property
    def rate(self) -> float:
        """Bytes a second that the disk gives."""
        return self._rate.rate

    def _keep_times(self) -> None:
        """What passes took, for the next plan; a run of a few passes tells too little."""
        kept = self._kept
        whole = kept.locked_bytes + kept.streamed_bytes
        if self._late.answers >= LEAST_ALIKE and (times := self._compute.times(self._late, self._rate.rate)):
            learn(self._streamed.key, kept.locked_bytes / whole, times)

    def report(self) -> Streaming:
        """What passes are like."""
        late = self._late
        return Streaming(
            passes=late.passes,
            bytes_read=self._streamer.stats.bytes_read,
            disk_bytes_s=self._rate.rate,
            waiting=late.waited / late.seconds if late.seconds else 0.0,
            bytes_per_token=late.bytes_read / late.tokens if late.tokens else 0.0,
            locked_bytes=self._kept.locked_bytes,
            streamed_bytes=self._kept.streamed_bytes,
            budget=self.granted.nbytes,
            least=self.least,
        )

    def close(self) -> None:
        """Give everything back, and keep what was learnt of the disk."""
        if self._late.passes and self._streamed.learns:
            self._keep_times()
            with suppress(OSError):  # a file that is gone
                remember(
                    max(self._streamer.files, key=os.path.getsize), self._streamed.disk.way, self._rate.rate
                )
        self._kv.guard_growth(None)  # or they keep each other, and all keys and values with them
        self._streamer.close()
