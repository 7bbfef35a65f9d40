"""A process in which calls fail: one operation, again and again, and what became of it as lines of JSON."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetrun.errors import EngineStopped, HetrunError
from tests.faults.injector import CALLS, Count, Injector
from tests.faults.numbers import chosen
from tests.faults.operations import MAKERS, Operation, Place

LIMIT_S = 30.0  # of one run: longer means that something waits for what never comes
SETTLE_S = 5.0  # until threads have ended
GROWTH = 2048  # bytes in one run that are looked at again
USUAL = 4  # runs that say how memory grows without failures
AGAIN = 8  # times the same failure is repeated where memory grew
BROKEN = 3  # the exit code of a process in which nothing can be tried any more
MAPPED = 1 << 20  # bytes of address space, which grows in steps


class _Heap(ctypes.Structure):
    """struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Heap


@dataclass(frozen=True, slots=True)
class Held:
    """What a process has of what may leak."""

    files: tuple[str, ...]
    threads: int
    heap: int
    mapped: int


def held() -> Held:
    """Now; PYTHONMALLOC=malloc has Python's objects on the same heap."""
    gc.collect()
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            files.append(os.readlink(f"/proc/self/fd/{fd}").split("[")[0])  # a socket has a number of its own
    heap = _libc.mallinfo2()
    with open("/proc/self/status", encoding="ascii") as lines:
        size = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
    threads = len(os.listdir("/proc/self/task"))
    return Held(tuple(sorted(files)), threads, heap.uordblks + heap.hblkhd, size)


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


class Trial:
    """One operation and one kind of call."""

    def __init__(self, operation: Operation, call: str, injector: Injector, lasting: bool) -> None:
        self._operation, self._call, self._injector, self._lasting = operation, call, injector, lasting
        self._right = self._plain()
        if self._plain() != self._right:
            raise AssertionError(
                f"the operation gives another result each time: {self._right} {self._plain()}"
            )
        gc.collect()
        gc.freeze()
        self._usual = self._growth()

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
        if not row["broken"]:
            row["faults"] += self._leaks(nth, before)
        return row

    def _once(self, nth: int) -> dict[str, Any]:
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
        except EngineStopped:
            outcome = "ended"
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
        after = self._settled(before)
        said = []
        if after.files != before.files:
            said.append(f"open files: {sorted({*after.files} - {*before.files}) or after.files}")
        if after.threads > before.threads:
            said.append(f"{after.threads - before.threads} threads more: {_names()}")
        grown = list[tuple[int, int]]()
        while self._grown(before, after) and len(grown) < AGAIN:
            before = after
            self._once(nth)
            after = held()
            grown.append((after.heap - before.heap, after.mapped - before.mapped))
        if len(grown) == AGAIN and self._grown(before, after):
            said.append(f"memory grows each time (heap, mapped): {grown}")
        return said

    def _grown(self, before: Held, after: Held) -> bool:
        """By more than three runs without failures do."""
        return after.heap - before.heap > GROWTH + 3 * self._usual or after.mapped - before.mapped > MAPPED

    def _settled(self, before: Held) -> Held:
        """Once threads that were told to end have ended."""
        end = time.monotonic() + SETTLE_S
        while (after := held()).threads > before.threads or after.files != before.files:
            if time.monotonic() > end:
                break
            time.sleep(0.005)
        return after


def _place(error: BaseException) -> str:
    """Where in our code it came from."""
    trace, place = error.__traceback__, ""
    while trace:
        code = trace.tb_frame.f_code
        place += f" < {Path(code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _names() -> list[str]:
    found = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            found.append(Path("/proc/self/task", task, "comm").read_text().strip())
    return found


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


def work(operation: Operation, call: str, injector: Injector, given: argparse.Namespace) -> None:
    """All numbers of one kind of call that were asked for."""
    with _watched():
        trial = Trial(operation, call, injector, given.lasting)
        count = max(trial.count() for _ in range(2))
    say(call=call, count=count)
    for nth in chosen(count, given.most):
        if nth <= given.after and call == given.calls[0]:
            continue
        say(call=call, begin=nth)
        with _watched():
            row = trial.fail(nth)
        say(call=call, **row)
        if row["broken"]:
            sys.exit(BROKEN)  # what follows would only say so again


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("operation", choices=MAKERS)
    parser.add_argument("calls", nargs="+", choices=CALLS)
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument(
        "--after", type=int, default=0, help="of the first kind of calls, leave out those up to it"
    )
    parser.add_argument("--lasting", action="store_true")
    given = parser.parse_args(argv)
    faulthandler.enable()
    log = logging.getLogger()
    log.handlers[:] = [Remarks()]
    room = Path(tempfile.mkdtemp(prefix="faults-"))
    injector = Injector()
    try:
        with MAKERS[given.operation](Place(given.models, room, injector)) as operation:
            for call in given.calls:
                work(operation, call, injector, given)
            say(done=True)
    finally:
        shutil.rmtree(room, ignore_errors=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
