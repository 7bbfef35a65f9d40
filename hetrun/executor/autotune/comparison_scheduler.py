"""When what is not in use is compared with what is, so that answers lose next to no time to it."""

from __future__ import annotations

from math import isinf
from time import perf_counter

from hetrun.errors import BudgetError, Cancelled
from hetrun.executor.autotune.explorer import CHANGED
from hetrun.executor.autotune.replanner import Replanner
from hetrun.executor.autotune.tuning_parts import TuningParts

SHARE = 0.01  # of the time goes into trying what is not in use
LEAST_REST_S = 0.5  # between two comparisons
LEAST_LEFT_S = 0.1  # that must be left for trying before a comparison begins
IDLE_SLICE_S = 0.1  # for comparisons, at each look while the engine is idle
SOON_S = 15.0  # since the engine was idle: comparisons wait for the next such moment, which may come soon


class ComparisonScheduler:
    """Begins comparisons and goes on with them, a slice of time after the other."""

    def __init__(self, parts: TuningParts, replanner: Replanner) -> None:
        self.next_at = 0.0  # nothing is tried before
        self._executor, self._pool = parts.model.executor, parts.pool
        self._active_plan, self._crowd = parts.active_plan, parts.crowd
        self._explorer, self._replanner = parts.explorer, replanner
        self._news = ""  # that makes another plan likely
        self._spent_s = 0.0  # for the comparison that goes on
        self._rest_s = 0.5  # between two comparisons: longer and longer while nothing is new
        self._idle_at = -1e9  # when the engine was idle the last time

    def take_news(self) -> str:
        """What comparisons have shown since this was asked last, if it makes another plan likely."""
        news, self._news = self._news, ""
        return news

    def has_time(self, now: float) -> bool:
        """Whether trying has cost so little in the last minute that something else may begin."""
        return self._active_plan.budget.remaining_s(now) > LEAST_LEFT_S

    def advance(self, now: float, idle: bool) -> None:
        """Some of a comparison, if trying has not cost too much in the last minute."""
        if now < self.next_at:
            return
        budget = self._active_plan.budget
        if idle:
            self._idle_at = now
        elif now - self._idle_at < SOON_S:
            return
        least = 0.0 if self._explorer.trying else LEAST_LEFT_S
        if not idle and budget.remaining_s(now) <= least:
            self.next_at = now + LEAST_REST_S
            return
        off = self._compare(idle)
        while idle and off is None and perf_counter() < now + IDLE_SLICE_S:
            off = self._compare(idle)
        took = perf_counter() - now
        budget.book(now, 0.0 if idle else took)
        self._spent_s += took
        if off is not None:
            self._conclude(now, off)

    def _conclude(self, now: float, off: float) -> None:
        """A comparison has ended; `off`: by how much an estimate was, as a logarithm."""
        quiet_s = min(2 * self._rest_s, max(LEAST_REST_S, self._spent_s / SHARE))
        self._rest_s, self._spent_s = (LEAST_REST_S if abs(off) > CHANGED else quiet_s), 0.0
        self.next_at = now + self._rest_s
        if isinf(off):
            self._replanner.replan("something was measured for the first time")
        elif abs(off) > CHANGED:
            self._active_plan.refresh()
            self._news = "a comparison with backends that are not in use"

    def _compare(self, idle: bool) -> float | None:
        """Compare something that is in use with something that is not, a slice of time; in the end, how far
        off an estimate was."""
        allowed = self._pool.started()
        if len(allowed) < 2:
            return 0.0
        try:
            return self._explorer.step(self._replanner.now(), allowed, not self._crowd.quiet, idle)
        except Cancelled:
            self._explorer.close()
            raise
        except BudgetError:  # keys and values need the room
            self._explorer.close()
            return 0.0
        except Exception as e:  # a plugin may fail in any way, and the answer goes on
            name = self._explorer.trying
            self._explorer.close()
            if not name or self._pool.is_home(name):
                raise
            self._pool.exclude(name, e)
            self._replanner.replan(f"{name} failed")  # which it would do in an answer, too
            return 0.0
        finally:
            self._executor.forget_threads()
