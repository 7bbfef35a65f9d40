"""A process in which calls fail: one operation, again and again, and what became of it as lines of JSON.

It loads all that the operation needs, and its children do it: where a failure ends one of them, the next is
there at once.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import mmap
import os
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetrun.errors import EngineStopped, HetrunError
from tests.faults.catalog import ALL_CALLS, MAKERS
from tests.faults.count import Count
from tests.faults.injector import Injector
from tests.faults.leaks import Held, held, settled, thread_names
from tests.faults.numbers import chosen
from tests.faults.operations import Operation, Place

LIMIT_S = float(
    os.environ.get("FAULTS_LIMIT_S", "60")
)  # of one run: longer means that something waits for what never comes
GROWTH = 2048  # bytes in one run that are looked at again
USUAL = 4  # runs that say how memory grows without failures
AGAIN = 8  # times the same failure is repeated where memory grew
WARM = 60  # runs after which memory is looked at once more
BROKEN = 3  # the exit code of a process in which nothing can be tried any more
MAPPED = 1 << 20  # bytes of address space, which grows in steps


class Remarks(logging.Handler):
    """Keeps what was logged since it was last asked."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):
            self.said.append(record.getMessage())

    def take(self) -> list[str]:
        said, self.said = self.said, []
        return said


@dataclass(frozen=True, slots=True)
class Usual:
    """What one run makes where nothing fails: calls of a kind, and bytes by which the heap grows."""

    calls: int
    growth: int


class Trial:
    """One operation and one kind of call."""

    def __init__(
        self, operation: Operation, call: str, injector: Injector, lasting: bool, known: Usual | None = None
    ) -> None:
        """`known`: what an earlier trial of the same has found."""
        self._operation, self._call, self._injector, self._lasting = operation, call, injector, lasting
        self._right = self._plain()
        gc.collect()
        gc.freeze()
        self.usual = known or self._look()

    def _look(self) -> Usual:
        if (again := self._plain()) != self._right:
            raise AssertionError(f"the operation gives another result each time: {self._right} {again}")
        growth = self._growth()
        return Usual(max(self.count() for _ in range(2)), growth)

    def _growth(self) -> int:
        """Bytes by which the heap grows where nothing fails: by an entry of a cache, or nothing."""
        before = held().heap
        for _ in range(USUAL):
            self._plain()
        return max(0, held().heap - before) // USUAL

    def _plain(self) -> object:
        result = self._operation.run(), self._operation.look()
        self._operation.again()
        return result

    def count(self) -> int:
        """Calls of one run."""
        with self._injector.armed(self._call) as count:
            self._operation.run()
        self._operation.again()
        return count.calls

    def fail(self, nth: int) -> dict[str, Any]:
        """What becomes of the operation where its Nth call fails; `faults` are what must not be."""
        before = held()
        row = self._once(nth)
        leaks = [] if row["broken"] else self._leaks(nth, before)
        return {**row, "faults": row["faults"] + leaks, "leaks": leaks}

    def _once(self, nth: int) -> dict[str, Any]:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # anew for each repetition
        outcome, said, faults, count = "right", "", list[str](), Count()
        began = time.perf_counter()
        try:
            with self._injector.armed(self._call, nth, self._lasting) as count:
                result = self._operation.run()
            if (found := (result, self._operation.look())) != self._right:
                faults.append(f"another result: {str(found)[:200]}")
        except HetrunError as error:
            outcome, said = "refused", f"{type(error).__name__}: {error}"
        except MemoryError as error:
            outcome, said = "memory", repr(error)
        except Exception as error:
            outcome, said = "raised", repr(error)
            faults.append(f"no error of ours: {error!r} {_place(error)}")
        if not said and count.site:
            outcome = "survived"
        if outcome in ("refused", "raised", "memory"):
            faults += self._operation.faults()
        with suppress(FileNotFoundError):
            self._operation.again()
        try:
            if (then := self._plain()) != self._right:
                faults.append(f"another result the next time: {str(then)[:200]}")
        except EngineStopped as error:
            outcome = "ended"
            if self._operation.recovers:
                faults.append(f"no new engine has come: {error}")
        except Exception as error:
            faults.append(f"failed the next time: {error!r} {_place(error)}")
        ms = round(1000 * (time.perf_counter() - began), 1)
        broken = outcome == "ended" or any("next time" in fault for fault in faults)
        return {
            "broken": broken,
            "nth": nth,
            "outcome": outcome,
            "said": said,
            "site": count.site,
            "faults": faults,
            "ms": ms,
            "reached": bool(count.site),
        }

    def _leaks(self, nth: int, before: Held) -> list[str]:
        """What is held afterwards that was not before; memory only if it grows with every repetition."""
        after = settled(before)
        said = []
        if more := Counter(after.files) - Counter(before.files):  # fewer: some had not been closed before
            said.append(f"open files: {sorted(more.elements())}")
        if after.threads > before.threads:
            said.append(f"{after.threads - before.threads} threads more: {thread_names()}")
        if self._grown(before, after) and self._keeps_growing(nth):
            for _ in range(WARM):  # histories and caches fill for some dozen runs
                self._once(nth)
            if grown := self._keeps_growing(nth):
                said.append(f"memory grows each time (heap, mapped): {grown}")
        return said

    def _keeps_growing(self, nth: int) -> list[tuple[int, int]]:
        """By how much with each repetition; nothing where one of them takes no more."""
        grown, after = list[tuple[int, int]](), held()
        while len(grown) < AGAIN:
            before = after
            self._once(nth)
            after = held()
            if not self._grown(before, after):
                return []
            grown.append((after.heap - before.heap, after.mapped - before.mapped))
        return grown

    def _grown(self, before: Held, after: Held) -> bool:
        """By more than three runs without failures do."""
        return (
            after.heap - before.heap > GROWTH + 3 * self.usual.growth or after.mapped - before.mapped > MAPPED
        )


def _place(error: BaseException) -> str:
    """Where in our code it came from."""
    trace, place = error.__traceback__, ""
    while trace:
        code = trace.tb_frame.f_code
        place += f" < {Path(code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


@contextmanager
def _watched() -> Iterator[None]:
    """A run that does not end ends the process, with the stacks of all threads."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def say(**facts: object) -> None:
    """A line to the parent."""
    os.write(1, (json.dumps(facts) + "\n").encode())


class Position:
    """The call that fails now, and what its kind is usually like, in memory that a process and its children
    share: it outlives each of them."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)
        self._now, self._usual = struct.Struct("=ii"), struct.Struct("=iqq")
        self.set(0, 0)

    def learn(self, kind: int, usual: Usual) -> None:
        """Keep it for the children to come."""
        self._usual.pack_into(self._shared, self._now.size, kind + 1, usual.calls, usual.growth)

    def usual(self, kind: int) -> Usual | None:
        """What was learned of this kind of calls, if that was the last."""
        of, calls, growth = self._usual.unpack_from(self._shared, self._now.size)
        return Usual(calls, growth) if of == kind + 1 else None

    def set(self, kind: int, nth: int) -> None:
        """Number `nth` of the calls of this kind, counted from 0."""
        self._now.pack_into(self._shared, 0, kind, nth)

    def get(self) -> tuple[int, int]:
        """What was set last."""
        kind, nth = self._now.unpack_from(self._shared)
        return kind, nth


class Campaign:
    """All calls that were asked for, in children of this process: where one has ended, the next goes on."""

    def __init__(self, given: argparse.Namespace, injector: Injector, room: Path) -> None:
        self._given, self._injector, self._room = given, injector, room
        self._make = MAKERS[given.operation]
        self._position = Position()

    def run(self) -> None:
        """Until each was tried."""
        self._warm()
        while True:
            before = self._position.get()
            with tempfile.TemporaryFile() as log:
                status = self._child(log.fileno())
                log.seek(0)
                said = log.read().decode(errors="replace")
            if status == 0:
                return say(done=True)
            if self._position.get() == before:
                raise RuntimeError(f"{self._given.operation} did not begin: {said[-2000:]}")
            if status != BROKEN:
                say(died=status, log=said[-2000:])

    def _warm(self) -> None:
        """Once without failures: what it imports is there in each child. No thread may be left of it."""
        with _watched(), self._place("warm") as place, self._make(place) as operation:
            operation.run()
        end = time.monotonic() + LIMIT_S
        while held().threads > 1:
            if time.monotonic() > end:
                raise RuntimeError(f"threads are left: {thread_names()}")
            time.sleep(0.01)
        gc.freeze()

    @contextmanager
    def _place(self, name: str) -> Iterator[Place]:
        room = Path(tempfile.mkdtemp(prefix=name, dir=self._room))
        try:
            yield Place(self._given.models, room, self._injector)
        finally:
            shutil.rmtree(room, ignore_errors=True)

    def _child(self, log: int) -> int:
        """One child; its exit code, as subprocess has it."""
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        code = 1
        try:
            os.dup2(log, 2)
            code = self._go_on()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _go_on(self) -> int:
        """From where the child before has ended; the exit code."""
        first, after = self._position.get()
        with self._place("one") as place, self._make(place) as operation:
            for kind in range(len(self._given.calls)):
                if kind >= first and not self._kind(operation, kind, after if kind == first else 0):
                    return BROKEN
        return 0

    def _kind(self, operation: Operation, kind: int, after: int) -> bool:
        """All numbers of one kind of call that are to fail; whether something can be tried still."""
        call = self._given.calls[kind]
        with _watched():
            known = self._position.usual(kind)
            trial = Trial(operation, call, self._injector, self._given.lasting, known)
        if not known:
            self._position.learn(kind, trial.usual)
            say(call=call, count=trial.usual.calls)
        for nth in self._given.nth or chosen(trial.usual.calls, self._given.most):
            if nth <= after:
                continue
            self._position.set(kind, nth)
            say(call=call, begin=nth)
            with _watched():
                row = trial.fail(nth)
            say(call=call, **row)
            if row["broken"]:
                return False  # what follows would only say so again
        return True


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("operation", choices=MAKERS)
    parser.add_argument("calls", nargs="+", choices=ALL_CALLS)
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument("--nth", type=int, action="append")
    parser.add_argument("--lasting", action="store_true")
    given = parser.parse_args(argv)
    faulthandler.enable()
    log = logging.getLogger()
    log.handlers[:] = [Remarks()]
    room = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        Campaign(given, Injector(), room).run()
    finally:
        shutil.rmtree(room, ignore_errors=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
