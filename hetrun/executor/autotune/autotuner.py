"""The pilot: keeps the plan good while the model runs.

Before the first step it measures what is not known of this machine yet. Between steps it looks whether times
have drifted, tries now and then what is not in use, and puts a better plan into force when there is one.
Everything here happens on the engine's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isinf
from time import perf_counter

from hetrun.backend import Backend
from hetrun.errors import BudgetError, Cancelled, HetrunError, PluginError
from hetrun.executor.autotune.active_plan import FEW, InForce
from hetrun.executor.autotune.cpu_contention import Others
from hetrun.executor.autotune.drift import Watcher
from hetrun.executor.autotune.explorer import CHANGED, Explorer
from hetrun.executor.autotune.measuring import PROBE_S, Measuring
from hetrun.executor.autotune.prober import Prober
from hetrun.executor.autotune.setup import Setup, home_of, planner_for
from hetrun.executor.autotune.state import LEAST_WAITING, Became, Change, State
from hetrun.executor.autotune.weight_migration import Weights
from hetrun.executor.autotune.yielding import Aside
from hetrun.executor.executor import Executor
from hetrun.executor.loading.device_memory import less_room, whose_memory, within
from hetrun.executor.steps import Between
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Graph
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.costmodel import Forecast
from hetrun.planner.expert_stats import Choices, path_of
from hetrun.planner.online import WORTH, Now
from hetrun.planner.plan import PlanSet
from hetrun.planner.residency import Copy
from hetrun.system.progress import Progress
from hetrun.system.units import format_bytes

log = logging.getLogger(__name__)

LOOK_S = 0.5  # between two looks at what has drifted
SHARE = 0.01  # of the time goes into trying what is not in use
PLANNING = 0.02  # of the time goes into planning anew
UNKNOWN_START_S = 2.0  # for loading a backend that was never loaded here: a longer prompt is worth a try...
UNKNOWN_LONG_S = 2 * UNKNOWN_START_S  # ...and prompts of the last minutes that took so long in all
MOST_CHANGES = 100  # that are remembered
AGAIN_S = 5.0  # until it is seen whether others still compute...
REFINED_S = 300.0  # ...and once everything was measured again
IDLE_SLICE_S = 0.1  # for comparisons, at each look while the engine is idle
SPENT_S = 1.0  # in passes, until it is seen once more what would have paid for them
UNUSED_S = 60.0  # for which copies of weights stay that do not pay now
SOON_S = 15.0  # since the engine was idle: comparisons wait for the next such moment, which may come soon
LOGGED: Mapping[Became, str] = {  # how a line of the log begins
    "proposed": "plan on trial",
    "in force": "plan in force",
    "taken back": "plan withdrawn",
    "given back": "weights dropped",
}
FREED = 1 / 8  # of a device's weights go where keys and values need their room, or one unit
EXPLORING_S = 0.1  # that must be left for trying before a comparison begins


class Pilot:
    """Steers one model."""

    def __init__(
        self,
        graph: Graph,
        backends: Mapping[str, Backend],
        store: WeightStore,
        kv: KvCache,
        executor: Executor,
        forecast: Forecast,
        setup: Setup,
    ) -> None:
        self._graph, self._backends = graph, backends
        self._executor, self.forecast, self._kv = executor, forecast, kv
        self._setup = setup
        self.prober = Prober(graph, backends, store, kv, forecast, setup.context)
        self.planner = planner_for(graph, backends, forecast, setup)
        self.choices = Choices(graph)
        self._choices_at = path_of(graph) if setup.memory else None
        if self._choices_at:
            self.choices.load(self._choices_at)
        self.planner.listen(self.choices.likely)
        executor.ask = self.choices.ask
        self._home = home_of(self.planner, setup)
        held = set(self._home)
        started = {name for name, backend in backends.items() if backend.started}
        self._state = State(held, started)
        self.aside = Aside(executor)
        others = Others()
        self._weights = Weights(
            graph=graph,
            backends=backends,
            store=store,
            planner=self.planner,
            forecast=forecast,
            state=self._state,
            aside=self.aside,
            own=setup.own,
            room=setup.room,
        )
        self._in_force = InForce(
            graph, self.planner, executor, forecast, setup.threads, others.look, others.count
        )
        self._measuring = Measuring(
            graph=graph,
            backends=backends,
            planner=self.planner,
            prober=self.prober,
            forecast=forecast,
            weights=self._weights,
            executor=executor,
            setup=setup,
            state=self._state,
            refuse=self._refuse,
        )
        self._watcher = Watcher(self.planner, forecast)
        self._explorer = Explorer(
            planner=self.planner,
            executor=executor,
            prober=self.prober,
            forecast=forecast,
            store=store,
            backends=backends,
            context=setup.context,
            room=setup.room,
        )

    @property
    def changes(self) -> Sequence[Change]:
        """Every change of plan, with its reason."""
        return self._state.changes

    @property
    def planned(self) -> PlanSet:
        """The plans in force, without those on trial."""
        return self._in_force.planned

    # --- before the first step

    def begin(self, progress: Progress | None = None) -> None:
        """Measure what is not known, and make the first plan from it."""
        names = [n for n in self._setup.candidates if n in self._state.started]
        if self._setup.eager:
            others = [n for n in self._setup.candidates if n not in names]
            names += filter(self._weights.may_start, others)
        if tried := self._measuring.begin(names, progress):
            self._take_threads(tried)
        self.save()
        if progress:
            progress(1.0)
        self.replan("the first plan", eager=self._setup.eager, first=True)

    def _take_threads(self, tried: Mapping[int, float]) -> None:
        if why := self._in_force.tried(tried):
            self._note(Change(perf_counter(), why))

    def _settle_threads(self, idle: bool = False) -> None:
        """See with how many threads work is fastest now, before a request waits for a pass."""
        start = perf_counter()
        if tried := self._measuring.threads(self._in_force.crowded):
            self._take_threads(tried)
        if not idle:
            self._in_force.budget.book(perf_counter(), perf_counter() - start)

    # --- between steps

    def expect(self, waiting: int, between: Between | None = None) -> None:
        """`waiting` tokens of prompts wait: another backend may be worth bringing in for them."""
        with self.aside.for_the_sake_of(between):
            self._expect(waiting)

    def _expect(self, waiting: int) -> None:
        state = self._state
        for change in self._in_force.look(perf_counter(), rested=True):
            self._note(change)
        if self._in_force.unsettled and waiting >= LEAST_WAITING:
            self._settle_threads()
        if waiting <= state.asked:
            return  # it was not worth it for as many
        crowded = self._in_force.crowded
        for name in [n for n in self._candidates() if n not in state.started]:
            trying = not crowded and self._weights.may_start(name) and self._worth_a_try(waiting)
            if trying:
                self._try_unknown(name)
        changed = self.replan(f"{waiting} tokens wait", waiting=waiting)
        state.asked = LEAST_WAITING if changed else waiting

    def _worth_a_try(self, waiting: int) -> bool:
        """Whether a prompt takes so long that a backend that was never measured may be tried on it."""
        ubatch = self._in_force.planned.ubatch
        seconds = self._in_force.predict_pass(min(waiting, ubatch), waiting / 2)
        return seconds is not None and seconds * waiting / ubatch > UNKNOWN_START_S

    def tend(self, idle: bool = False, between: Between | None = None) -> None:
        """Look after the plan; costs next to nothing between two looks.

        What has to be brought in for a better one waits for an `idle` moment, as it takes seconds.
        """
        with self.aside.for_the_sake_of(between):
            self._tend(idle)

    def _tend(self, idle: bool) -> None:
        now, state = perf_counter(), self._state
        if idle and state.cause and self._setup.eager:
            cause, state.cause = state.cause, ""
            self.replan(cause, eager=True)
        if idle and now >= state.next_refining:
            self._refine(now)
        if idle and not self._setup.eager and self._in_force.usage.seconds >= state.next_bringing:
            self._bring_what_has_paid(now)
        for change in self._in_force.look(now, rested=idle):
            self._note(change)
        if self._in_force.unsettled and (idle or self._in_force.budget.left(now) > EXPLORING_S):
            self._settle_threads(idle)
        if now >= state.next_trial:
            self._explore(now, idle)
        if now < state.next_look:
            return
        state.next_look = now + LOOK_S
        if now < self._watcher.ready_at:
            return
        cause = state.news or self._watcher.drifted() or self._watcher.moved(self._now())
        state.news = ""
        if cause := cause or self.planner.surprised() or self._in_force.surprised():
            state.cause = cause
            start = perf_counter()
            self.replan(cause)
            end = perf_counter()
            self._watcher.rest(end, (end - start) / PLANNING)

    def _refine(self, now: float) -> None:
        """Measure again, in quiet, what was measured beside others; give back what is not used."""
        self._state.next_refining = now + AGAIN_S
        names = [n for n in self._candidates() if n in self._state.started]
        if self._measuring.due(names):
            self._end_comparison()
            self._measuring.refine(names, self.aside)
            self._state.next_refining = now + REFINED_S
            why = "measured again without other programs"
            self._note(Change(now, why))
            self.replan(why, eager=self._setup.eager, first=True)
        self._give_back()

    def _bring_what_has_paid(self, now: float) -> None:
        """Copies of weights without which passes of the last minutes have lost more than they cost."""
        state, usage = self._state, self._in_force.usage
        tokens = {b: n / state.hesitation for b, n in usage.tokens(now).items() if b not in FEW}
        for name in [n for n in self._candidates() if n not in state.started]:
            trying = self._in_force.quiet and self._weights.may_start(name)
            if trying and self._seconds_of(tokens) > UNKNOWN_LONG_S:
                self._try_unknown(name)
        if tokens:
            self.replan("prompts have taken longer without it", ran=tokens)
        took = perf_counter() - now
        state.next_bringing = usage.seconds + max(SPENT_S, took / PLANNING)

    def _seconds_of(self, tokens: Mapping[str, float]) -> float:
        """What passes of these tokens take now."""
        found, ubatch, now = 0.0, self._in_force.planned.ubatch, self._now()
        for bucket, n in tokens.items():
            size, depth = self.planner.point(bucket, ubatch, now)
            found += (self._in_force.predict_pass(size, depth) or 0.0) * n / size
        return found

    def _try_unknown(self, name: str) -> None:
        """Measure a backend of which nothing is known yet."""
        if trials := self._measuring.unknown(name):
            self._end_comparison()
            self._measuring.probe(name, trials, PROBE_S / 4, self.aside)
            self._executor.forget_threads()

    def _explore(self, now: float, idle: bool) -> None:
        """Some of a comparison, if trying has not cost too much in the last minute."""
        state, budget = self._state, self._in_force.budget
        if idle:
            state.idle_at = now
        elif now - state.idle_at < SOON_S:
            return
        least = 0.0 if self._explorer.trying else EXPLORING_S
        if not idle and budget.left(now) <= least:
            state.next_trial = now + LOOK_S
            return
        news = self._try_another(idle)
        while idle and news is None and perf_counter() < now + IDLE_SLICE_S:
            news = self._try_another(idle)
        took = perf_counter() - now
        budget.book(now, 0.0 if idle else took)
        state.trying_s += took
        if news is None:
            return
        quiet_s = min(2 * state.rest, max(LOOK_S, state.trying_s / SHARE))
        state.rest, state.trying_s = (LOOK_S if abs(news) > CHANGED else quiet_s), 0.0
        state.next_trial = now + state.rest
        if isinf(news):
            self.replan("something was measured for the first time")
        elif abs(news) > CHANGED:
            self._in_force.refresh()
            state.news = "a comparison with backends that are not in use"

    def _end_comparison(self) -> None:
        """Before weights come or go: it may have been lent some of them."""
        self._explorer.close()

    def _try_another(self, idle: bool) -> float | None:
        """Compare something that is in use with something that is not, a slice of time; in the end, how far
        off an estimate was."""
        allowed = [n for n in self._candidates() if n in self._state.started]
        if len(allowed) < 2:
            return 0.0
        try:
            return self._explorer.step(self._now(), allowed, not self._in_force.quiet, idle)
        except Cancelled:
            self._explorer.close()
            raise
        except BudgetError:  # keys and values need the room
            self._explorer.close()
            return 0.0
        except Exception as e:  # a plugin may fail in any way, and the answer goes on
            name = self._explorer.trying
            self._explorer.close()
            if not name or name in self._setup.home.values():
                raise
            self._refuse(name, e)
            self.replan(f"{name} failed")  # which it would do in an answer, too
            return 0.0
        finally:
            self._executor.forget_threads()

    def goes_on_without(self, name: str, error: Exception) -> bool:
        """A backend failed in the middle of a step: whether the others can take the same step."""
        if isinstance(error, Cancelled) or name not in self._candidates():
            return False
        if isinstance(error, BudgetError):
            device = whose_memory(name, self._weights.own)
            if copies := self._last_copies(device):
                return self._goes_on_with_less(device, copies)
        if name in self._setup.home.values():
            return False
        self._refuse(name, error)
        self.replan(f"{name} failed")
        self._executor.forget_threads()
        return name not in self._in_force.planned.backends

    def _last_copies(self, name: str) -> frozenset[Copy]:
        """The last layers of what a device was brought besides its home: a part of that, in whose place more
        keys and values have room."""
        mine = sorted(c for c in self._state.held - self._home if c[1] == name)
        least, found = FREED * self.planner.sizes.own_total(mine, name), set[Copy]()
        while mine and self.planner.sizes.own_total(found, name) <= least:
            found.add(mine.pop())
        return frozenset(found)

    def _goes_on_with_less(self, name: str, copies: frozenset[Copy]) -> bool:
        """A text is longer than a device has room for beside its weights: some of these go for good."""
        self._end_comparison()
        weights, mine = self._weights, {part for part in self._state.parts if part[0] == name}
        freed = self.planner.sizes.claimed(copies, name)
        weights.own = {**weights.own, name: less_room(weights.own[name], freed)}
        self._state.held -= copies
        self._state.parts -= mine
        self.replan(f"{name} needs room for keys and values")  # the plan in force cannot stay
        self._in_force.remove(lambda plan: bool(self.planner.copies_of(plan) & copies))
        if gone := mine - self._state.parts:  # a new plan may need some of them again
            self._in_force.remove(self.planner.needs_parts)
        weights.drop(copies)
        weights.drop_parts(frozenset(gone))
        self._executor.forget_threads()
        size = format_bytes(freed)
        self._note(Change(perf_counter(), f"{size} of weights left {name} for keys and values", "given back"))
        plans = self._in_force.planned.plans.values()
        return not any(self.planner.copies_of(plan) & copies for plan in plans)

    def _refuse(self, name: str, error: Exception) -> None:
        if not isinstance(error, PluginError):  # of which everybody has heard already
            log.warning(
                "the backend %s is left out: %s", name, error, exc_info=not isinstance(error, HetrunError)
            )
        self._state.refused.add(name)
        self._in_force.remove(lambda plan: any(backend == name for _, backend in plan.places))
        self._note(
            Change(perf_counter(), f"the backend {name} failed, so no plan uses it any more", "taken back")
        )

    # --- plans

    def _candidates(self) -> list[str]:
        return [n for n in self._setup.candidates if n not in self._state.refused]

    def _now(self, waiting: int = 0, eager: bool = False, ran: Mapping[str, float] | None = None) -> Now:
        state, recent = self._state, self._executor.recent
        return Now(
            self._setup.room,
            self._home,
            frozenset(state.held),
            frozenset(state.started),
            {b: r.depth for b, r in recent.items() if r.passes},
            {b: r.passes for b, r in recent.items() if r.passes},
            waiting,
            eager,
            state.parts,
            self._kv.used_bytes,
            {name: own.room for name, own in self._weights.own.items()},
            ran or {},
        )

    def replan(
        self,
        cause: str,
        waiting: int = 0,
        eager: bool = False,
        first: bool = False,
        ran: Mapping[str, float] | None = None,
    ) -> bool:
        """Ask the planner; whether another plan is in force or on trial now. The `first` is in force at once,
        unless it rests on rough times. `ran`: tokens for which copies may be brought in that would have
        paid."""
        self._in_force.tell_planner()
        now = self._now(waiting, eager, ran)
        self.planner.candidates = tuple(self._candidates())
        plans = within(self._in_force.planned, self._weights.own)
        proposal = self.planner.propose(plans, now)
        if proposal is None:
            self._in_force.adopt(self.planner.annotate(plans, now))
            self._in_force.offer_alone(self._whole())
            self._watcher.watch(self._in_force.planned, now, self._candidates())
            return False
        try:
            if proposal.bring or proposal.parts - now.parts:
                self._end_comparison()
            self._weights.bring(proposal.bring)
            self._weights.bring_parts(proposal.parts)
        except Cancelled:
            raise
        except Exception as e:  # a plugin may fail in any way, and the plan stays as it is
            if isinstance(e, BudgetError) and not proposal.bring:  # what is free may lie in pieces
                log.info("a better plan does not fit into memory (%s): %s", proposal.reason, e)
                return False
            for name in {b for _, b in proposal.bring} | {b for b, _ in proposal.parts - now.parts}:
                if name not in self._setup.home.values():
                    self._refuse(name, e)
            return False
        rough = any(map(self._in_force.rough, proposal.plans.plans.values()))
        # Parts of weights come and go with the plans that share them out: no two such are there at once.
        shared = bool(proposal.parts or proposal.spare)
        direct = proposal.must or (first and not rough)
        if shared:
            self._in_force.remove(self.planner.needs_parts)
        new = self._in_force.adopt(proposal.plans, direct, proposal.also)
        self._drop(proposal.drop)
        self._weights.drop_parts(proposal.spare)
        self._state.parts = proposal.parts
        self._in_force.offer_alone(self._whole())
        if new:
            became: Became = "in force" if direct else "proposed"
            change = Change(perf_counter(), f"{cause}: {proposal.reason}", became)
            self._note(change)
            self._watcher.changed(proposal.plans, change.at)
        self._watcher.watch(proposal.plans, now, self._candidates())
        return new

    def _drop(self, copies: frozenset[Copy]) -> None:
        """Give the memory of copies back, and forget the plans that need them."""
        if copies:
            self._end_comparison()
            self._weights.drop(copies)
            self._in_force.remove(lambda plan: bool(self.planner.copies_of(plan) & copies))

    def _give_back(self) -> None:
        """Copies that no plan in force has used for a while, or that have gained next to nothing: to bring
        them back would take longer than a burst that makes their plan look bad."""
        copies, now = frozenset(self._state.held) - self._home, perf_counter()
        used = copies & self._in_force.used()
        if used and self._in_force.gain(self._home, self._now()) < WORTH:
            used = frozenset()
        since = {c: self._state.unused.get(c, now) for c in copies - used}
        self._state.unused = since
        old = frozenset(c for c in since if now - since[c] >= UNUSED_S)
        if old and not used:
            self._in_force.prefer(self._home | (copies - old))
        idle = old - self._in_force.wanted()
        if idle:
            names = ", ".join(sorted({name for _, name in idle}))
            size = format_bytes(self.planner.sizes.moved(idle))
            self._drop(idle)
            self._in_force.usage.clear()
            self._state.hesitation *= 2
            why = f"{size} of weights copied for {names} were unused, or saved almost no time"
            self._note(Change(perf_counter(), why, "given back"))

    def _whole(self) -> list[str]:
        """The backends that hold all of the model."""
        n, counts = len(self.planner.units), Counter(b for _, b in self._state.held)
        return [b for b in self._candidates() if counts[b] == n]

    def _note(self, change: Change) -> None:
        self._state.changes.append(change)
        del self._state.changes[:-MOST_CHANGES]
        log.info("%s: %s", LOGGED[change.became], change.reason)

    # --- what follows

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Seconds of a step: for each sequence its tokens, and how many come before them; None: unknown."""
        return self._in_force.predict(chunks)

    def close(self) -> None:
        """Give back what a comparison holds, and keep what was measured."""
        self._explorer.close()
        self.save()

    def save(self) -> None:
        """Keep what was measured for the next start."""
        if self._setup.memory is None:
            return
        try:
            self.forecast.save(self._setup.memory)
            if self._choices_at:
                self.choices.save(self._choices_at)
        except OSError as e:
            log.debug("times were not saved: %s", e)
