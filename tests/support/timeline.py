"""What two devices did when: activities on lanes, what each waited for, and a clock that no other program
disturbs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hetrun.backend import Floats, Pass
from hetrun.backend.interpreter import InterpretingBackend, OpFunction
from hetrun.backends.reference.ops import TABLE
from hetrun.graph import Op
from hetrun.graph.signature import form_of
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.two_device.balance import HostLink

HOST, DEVICE, LINK, BESIDE = "host", "device", "link", "beside"


@dataclass(eq=False, slots=True)
class Activity:
    """Something that took time on a lane: what it was, and what it could not begin before."""

    lane: str
    what: str
    after: tuple[Activity, ...]
    nbytes: int = 0
    start: float = 0.0
    end: float = 0.0

    @property
    def seconds(self) -> float:
        """What it took."""
        return self.end - self.start


class Timeline:
    """All activities in the order in which they began; each lane does one thing at a time."""

    def __init__(self) -> None:
        self.activities: list[Activity] = []
        self.marks: list[tuple[Activity, ...]] = []
        self.seen: tuple[Activity, ...] = ()  # what the engine's thread knows to be over
        self._lock = threading.Lock()

    def begin(self, lane: str, what: str, after: Sequence[Activity] = (), nbytes: int = 0) -> Activity:
        """Something begins now."""
        made = Activity(lane, what, tuple(after), nbytes, time.perf_counter())
        with self._lock:
            self.activities.append(made)
        return made

    def end(self, activity: Activity) -> None:
        """It is over now."""
        activity.end = time.perf_counter()

    def last(self, activity: Activity, seconds: float) -> None:
        """It takes so long, and is over then."""
        while (left := activity.start + seconds - time.perf_counter()) > 0:
            time.sleep(left)
        self.end(activity)

    def mark(self) -> None:
        """A pass is over, as the engine's thread sees it."""
        self.marks.append(self.seen)

    def lane(self, name: str) -> list[Activity]:
        """What one lane did."""
        return [a for a in self.activities if a.lane == name]

    def overlap(self, one: str, other: str, seconds: Callable[[Activity], float] | None = None) -> float:
        """Seconds in which both lanes were busy: as it was, or by the clock of those seconds."""
        if seconds:
            ends = self.clock(seconds)
            times = {a: (ends[a] - seconds(a), ends[a]) for a in ends}
        else:
            times = {a: (a.start, a.end) for a in self.activities}
        pairs = [(times[a], times[b]) for a in self.lane(one) for b in self.lane(other)]
        return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)

    def clock(self, seconds: Callable[[Activity], float]) -> dict[Activity, float]:
        """When each activity would have ended if every one had taken what it is said to take.

        The order on each lane and what waits for what are those of the real run.
        """
        ends: dict[Activity, float] = {}
        lanes: dict[str, float] = {}
        for a in list(self.activities):
            # What another timeline has seen was over before this one began.
            start = max([lanes.get(a.lane, 0.0), *(ends.get(b, 0.0) for b in a.after)])
            ends[a] = lanes[a.lane] = start + seconds(a)
        return ends

    def pass_seconds(self, seconds: Callable[[Activity], float]) -> float:
        """What a pass takes by that clock, between the first mark and the last."""
        ends = self.clock(seconds)
        first, last = (max(ends[a] for a in mark) for mark in (self.marks[0], self.marks[-1]))
        return (last - first) / (len(self.marks) - 1)


TICK_S = 1e-9


class Simulated(Timeline):
    """Nothing takes real time: an activity takes what it is said to take, and begins when its lane is free
    and what it waits for is over. A lane is one thread's, so that it is the same in every run, whatever
    else the machine does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._free: dict[str, float] = {}  # when a lane is
        self._takes: dict[str, float] = {}  # what a lane's activity takes

    def takes(self, lane: str, seconds: float) -> None:
        """The activity that is going on there takes so long."""
        self._takes[lane] = seconds

    def now(self) -> float:
        """The clock of the engine's thread: two looks at it differ."""
        seen = max((a.end for a in self.seen), default=0.0)
        self._now = max(self._now, seen, self._free.get(HOST, 0.0)) + TICK_S
        return self._now

    def begin(self, lane: str, what: str, after: Sequence[Activity] = (), nbytes: int = 0) -> Activity:
        made = super().begin(lane, what, after, nbytes)
        made.start = max([self._free.get(lane, 0.0), *(a.end for a in after)])
        return made

    def end(self, activity: Activity) -> None:
        self.last(activity, self._takes.pop(activity.lane, 0.0))

    def last(self, activity: Activity, seconds: float) -> None:
        self._free[activity.lane] = activity.end = activity.start + seconds


def least_seconds(timelines: Sequence[Timeline], link: HostLink) -> Callable[[Activity], float]:
    """What activities take: copies by the link's clock; computing what it took at its least."""
    least: dict[tuple[str, str], float] = {}
    for a in (a for timeline in timelines for a in timeline.activities):
        least[a.lane, a.what] = min(a.seconds, least.get((a.lane, a.what), float("inf")))

    def seconds(a: Activity) -> float:
        return link.seconds(a.nbytes) if a.lane in (LINK, BESIDE) else least[a.lane, a.what]

    return seconds


def named(op: Op, work: Pass) -> str:
    """The same for equal work."""
    return f"{op.kind} {form_of((op,))} {work.rows(op.out)}"


# --- the engine's thread beside it


class Host(InterpretingBackend):
    """A backend of functions on the engine's thread whose ops are on the timeline."""

    def __init__(
        self, timeline: Timeline, table: Mapping[str, OpFunction] = TABLE, name: str = "host"
    ) -> None:
        super().__init__(name, {kind: self._timed(function) for kind, function in table.items()})
        self.timeline = timeline

    def _timed(self, function: OpFunction) -> OpFunction:
        def run(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
            activity = self.timeline.begin(HOST, named(op, work), self.timeline.seen)
            out = function(op, x, w, work, kv)
            self.timeline.end(activity)
            self.timeline.seen = (activity,)
            return out

        return run


# --- the link


@dataclass(eq=False, slots=True)
class Copy:
    """Bytes on their way."""

    what: str
    nbytes: int
    move: Callable[[], object]
    cause: tuple[Activity, ...]
    arrived: threading.Event = field(default_factory=threading.Event)
    activity: Activity | None = None


class Wire:
    """A thread that does one copy after the other, each for as long as the link takes."""

    def __init__(self, link: HostLink, timeline: Callable[[], Timeline], name: str) -> None:
        self.link = link
        self._timeline = timeline
        self._copies: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def ask(self, copy: Copy) -> Copy:
        """Behind everything that was asked for before."""
        self._copies.put(copy)
        return copy

    def beside(self, what: str, nbytes: int, cause: Sequence[Activity]) -> Activity:
        """Few bytes, by the thread that wants them, while the queue goes on."""
        timeline = self._timeline()
        activity = timeline.begin(BESIDE, what, cause, nbytes)
        timeline.last(activity, self.link.seconds(nbytes))
        return activity

    def _main(self) -> None:
        while copy := self._copies.get():
            timeline = self._timeline()
            activity = timeline.begin(LINK, copy.what, copy.cause, copy.nbytes)
            copy.move()
            # The bytes are not there before; that the link is busy till then is what makes it a link.
            timeline.last(activity, self.link.seconds(copy.nbytes))
            copy.activity = activity
            copy.arrived.set()

    def close(self) -> None:
        self._copies.put(None)
        self._thread.join()
