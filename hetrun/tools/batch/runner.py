"""Requests from lines, several at a time, and their results to a file: each once, and none lost."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TypeVar

from hetrun.errors import EngineStopped, OptionError, UserError, system_faults
from hetrun.tools.batch.line_reader import Line, LineReader
from hetrun.tools.batch.output_file import LineOutput, NoRoom
from hetrun.tools.batch.pictures import has_pictures, with_pictures
from hetrun.tools.batch.prefix_order import by_beginnings
from hetrun.tools.batch.reorder_buffer import LineHeap
from hetrun.tools.batch.request_lines import Ask, RequestReader
from hetrun.tools.batch.result_lines import ResultLine, refused, result
from hetrun.tools.batch.resume import FinishedRequests
from hetrun.tools.batch.worker import Away, Place

T = TypeVar("T")

BLOCK = 512  # lines that are put in order together
FIRST, GROWTH = 1, 8  # requests at a time before there is a result, and how many more each result brings
# Results that wait for earlier ones: with this many, or this many bytes, nothing new is read.
MOST_HELD, MOST_HELD_BYTES = 8192, 64 << 20
MOST_TRIES = 3  # of a request over which places broke off
PATIENCE_S = 120.0  # without any place that answers
REST_S, MOST_REST_S = 0.5, 15.0  # of a place that does not answer
FULL_S, LOOK_S = 60.0, 1.0  # how long a full disk is waited for, and how often looked at


class StaysFull(UserError):
    """No room was made for the results that are left."""


@dataclass
class BatchTally:
    """What has become of a batch so far."""

    read: int = 0  # requests
    before: int = 0  # of these answered by an earlier run
    answered: int = 0
    running: int = 0
    failed: int = 0
    written: int = 0
    answer_tokens: int = 0
    prompt_tokens: int = 0
    complete: bool = False  # all lines are read
    first_failure: str = ""  # of those in the file
    first_failed_line: int = 0
    waits_for: str = ""  # what is in the way


@dataclass(frozen=True, slots=True)
class BatchChannels:
    """Where requests come from, and where results go."""

    lines: LineReader
    output: LineOutput
    done: FinishedRequests
    held: LineHeap
    tally: BatchTally = field(default_factory=BatchTally)


@dataclass
class _PlaceState:
    """Of a place."""

    failing_since: float | None = None
    rest_s: float = REST_S
    back_at: float = 0.0


class BatchRun:
    """One run over a file."""

    def __init__(
        self,
        ends: BatchChannels,
        reader: RequestReader,
        places: Sequence[Place],
        *,
        in_order: bool = True,
        same: bool = False,
        folder: Path | None = None,
    ) -> None:
        """`same`: nothing is written that differs from run to run. `folder`: of pictures that lines name."""
        self.tally = ends.tally
        self._lines, self._output, self._done, self._held = ends.lines, ends.output, ends.done, ends.held
        self._reader = reader
        self._places = {place: _PlaceState() for place in places}
        self._in_order, self._same, self._folder = in_order, same, folder
        self._todo: deque[Ask] = deque()
        self._most_todo = sum(place.lanes for place in places)
        self._tries: Counter[int] = Counter()
        self._came = 0  # results, of this run and of those before
        self._next_index = 0
        self._pulse = asyncio.Event()

    async def run(self) -> BatchTally:
        """Until every request has its result."""
        with system_faults("the batch ended early, and --resume continues it"):
            return await self._run()

    async def _run(self) -> BatchTally:
        for index, line in self._held.take(self._done):
            self._hold(index, line, keep=False)
        for index, line in self._done.take_after_damage():
            self._hold(index, line, keep=True)
        lanes = [self._lane(p, n) for p in self._places for n in range(p.lanes)]
        tasks = [asyncio.ensure_future(work) for work in (self._feed(), self._write(), *lanes)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._output.sync()
        self._done.check_all_met()
        return self.tally

    # --- from lines to requests

    async def _feed(self) -> None:
        while block := await in_thread(lambda: self._lines.some(BLOCK)):
            await self._feed_block(block)
            # Only between blocks: what earlier results wait for is on its way then.
            await self._until(lambda: len(self._held) < MOST_HELD and self._held.nbytes < MOST_HELD_BYTES)
        self.tally.complete = True
        self._changed()

    async def _feed_block(self, block: Sequence[Line]) -> None:
        asks = [ask for line in block if (ask := self._reader.read(line)) is not None]
        fresh = [ask for ask in asks if not self._done.has(ask)]
        self.tally.read += len(asks)
        self.tally.before += len(asks) - len(fresh)
        self._changed()
        for number in by_beginnings([ask.text for ask in fresh]):
            ask = fresh[number]
            if ask.fault:
                self._ended(ask, refused(ask, ask.fault))
                continue
            await self._until(lambda: len(self._todo) < self._most_todo)
            self._todo.append(ask)
            self._changed()

    # --- from requests to results

    async def _lane(self, place: Place, number: int) -> None:
        """Answers one request after the other."""
        # At first one: its result comes soon, and tells whether all is well.
        await self._until(lambda: number < FIRST + GROWTH * self.tally.answered or self._over)
        state = self._places[place]
        while (ask := await self._next(state)) is not None:
            try:
                found = await self._result(place, ask)
            except Away as away:
                self._put_back(ask, away, state)
                continue
            finally:
                self.tally.running -= 1
            state.failing_since, state.rest_s = None, REST_S
            self._ended(ask, found)

    async def _result(self, place: Place, ask: Ask) -> ResultLine:
        sent, folder = ask, self._folder
        if folder is not None and has_pictures(ask.body):
            try:
                sent = await in_thread(lambda: with_pictures(ask, folder))
            except OptionError as error:
                return refused(ask, str(error))
        return result(ask, await place.answer(sent), self._same)

    async def _next(self, state: _PlaceState) -> Ask | None:
        """The next request; None: there will be none."""
        while True:
            if (rest := state.back_at - monotonic()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await self._until(lambda: self._over)
            await self._until(lambda: bool(self._todo) or self._over)
            if not self._todo:
                return None
            if state.back_at <= monotonic():
                self.tally.running += 1
                return self._todo.popleft()

    @property
    def _over(self) -> bool:
        return self.tally.complete and not self._todo and not self.tally.running

    def _put_back(self, ask: Ask, away: Away, state: _PlaceState) -> None:
        """A place did not answer: another one may, or this one later."""
        now = monotonic()
        state.failing_since = state.failing_since or now
        state.back_at = now + (state.rest_s if away.after_s is None else away.after_s)
        state.rest_s = min(MOST_REST_S, 2 * state.rest_s)
        self._tries[ask.index] += not away.blameless
        if self._tries[ask.index] >= MOST_TRIES:
            self._ended(
                ask, refused(ask, f"it was sent {MOST_TRIES} times without an answer; the last error: {away}")
            )
            return
        if all(s.failing_since and now - s.failing_since > PATIENCE_S for s in self._places.values()):
            raise EngineStopped(
                f"there was no answer for {PATIENCE_S:g} s: {away}. Results written so far are kept; "
                "continue with --resume"
            )
        self._todo.appendleft(ask)
        self._changed()

    def _ended(self, ask: Ask, found: ResultLine) -> None:
        tally = self.tally
        tally.answered += 1
        tally.failed += found.failed
        tally.answer_tokens += found.answer_tokens
        tally.prompt_tokens += found.prompt_tokens
        if found.failed and not 0 < tally.first_failed_line < ask.line:
            tally.first_failed_line, tally.first_failure = ask.line, found.said
        self._tries.pop(ask.index, None)
        self._hold(ask.index, found.line, keep=self._in_order and ask.index != self._next_index)
        self._changed()

    def _hold(self, index: int, line: bytes, keep: bool) -> None:
        """A result waits for its turn: that of its request, or of the order in which results came."""
        self._came += 1
        self._held.push(index if self._in_order else self._came, line, keep)

    # --- from results to the file

    async def _write(self) -> None:
        while True:
            await self._until(lambda: self._is_due() or (self._over and not self._held))
            if not self._is_due():
                return
            self._next_index = 1 + (self._held.next or 0)
            line = self._held.pop()
            await self._written(line)
            self._held.wrote(line)
            self.tally.written += 1
            self._changed()

    def _is_due(self) -> bool:
        if not self._in_order:
            return len(self._held) > 0
        while self._done.is_written(self._next_index):
            self._next_index += 1
        return self._held.next == self._next_index

    async def _written(self, line: bytes) -> None:
        """Have it in the file. If the disk is full, wait: the user may make room."""
        since = monotonic()
        while True:
            try:
                await in_thread(lambda: self._put(line))
                self.tally.waits_for = ""
                return
            except NoRoom as full:
                self.tally.waits_for = str(full)
                if monotonic() - since > FULL_S:
                    raise StaysFull(
                        f"{full}. The results before that are complete: free some space, and continue with "
                        "--resume"
                    ) from None
            await asyncio.sleep(LOOK_S)

    def _put(self, line: bytes) -> None:
        self._output.write(line)
        if self._output.size == len(line):  # by its first line a file is known, whatever a power cut leaves
            self._output.sync()

    # --- waiting

    def _changed(self) -> None:
        self._pulse.set()
        self._pulse = asyncio.Event()

    async def _until(self, so: Callable[[], bool]) -> None:
        while not so():
            await self._pulse.wait()


async def in_thread(work: Callable[[], T]) -> T:
    """The result of a function that may block without end. Its thread does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(put: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended: nothing waits any more
            loop.call_soon_threadsafe(lambda: None if done.done() else put())

    def run() -> None:
        try:
            found = work()
        except Exception as error:
            deliver(partial(done.set_exception, error))
        else:
            deliver(partial(done.set_result, found))

    threading.Thread(target=run, name="hetrun batch", daemon=True).start()
    return await done
