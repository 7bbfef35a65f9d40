"""A stretch of time on the engine's thread, and what was counted in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetrun.backend import Backend
from hetrun.backend.op_profile import ActivityTimes
from hetrun.executor.stats import Stats


@dataclass(frozen=True, slots=True)
class WindowSeconds:
    """Seconds of the engine's thread, of one prompt or one step."""

    total: float  # from end to end
    inside: Mapping[str, float]  # in segments, by backend
    waited: float = 0.0  # for devices that work by themselves
    idle: float = 0.0  # until the engine began


@dataclass(frozen=True, slots=True)
class BackendSeconds:
    """What a stretch showed of the inside of backends, by their names."""

    inside: Mapping[str, float]  # seconds in segments
    spent: Mapping[str, ActivityTimes]


@dataclass(slots=True)
class WindowCounts:
    """What was counted at a moment."""

    inside: Mapping[str, float] = field(default_factory=dict)
    waited: float = 0.0


class TimedWindow:
    """From `begin` to `end`, both called on the engine's thread."""

    def __init__(self, stats: Stats, backends: Mapping[str, Backend], look: bool = False) -> None:
        """With `look` every backend books meanwhile what its ops take."""
        self._stats = stats
        # Who works by itself does so beside this thread, which only waits.
        self._beside = {name for name, b in backends.items() if b.asynchronous}
        self._backends = {name: b for name, b in backends.items() if look and not b.asynchronous}
        self._spent = {name: ActivityTimes() for name in self._backends}
        self._first, self._last = WindowCounts(), WindowCounts()

    def begin(self) -> None:
        """From now on."""
        for name, backend in self._backends.items():
            backend.watch(self._spent[name])
        self._first = self._now()

    def end(self) -> None:
        """Until now."""
        self._last = self._now()
        self.stop()

    def stop(self) -> None:
        """Look no more, however it ended."""
        for backend in self._backends.values():
            backend.watch(None)

    def _now(self) -> WindowCounts:
        inside: dict[str, float] = {}
        for key, record in self._stats:
            if key.backend not in self._beside:
                inside[key.backend] = inside.get(key.backend, 0.0) + record.seconds
        return WindowCounts(inside, self._stats.wait_seconds)

    @property
    def waited(self) -> float:
        """How much of it the engine's thread waited for devices."""
        return self._last.waited - self._first.waited

    @property
    def inside(self) -> Mapping[str, float]:
        """How much of it each backend had."""
        return {name: s - self._first.inside.get(name, 0.0) for name, s in self._last.inside.items()}

    @property
    def looked(self) -> BackendSeconds:
        """What there was to see."""
        return BackendSeconds(self.inside, self._spent)
