"""The pilot: keeps the plan good while the model runs.

Before the first step it measures what nobody knows of this machine yet. Between steps it looks whether times
have drifted, tries now and then what is not in use, and puts a better plan into force when there is one.
Everything here happens on the engine's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from os import cpu_count
from time import perf_counter

from hetrun.backend import Backend
from hetrun.errors import BudgetError, Cancelled, HetrunError, PluginError
from hetrun.executor.autotune.active_plan import InForce
from hetrun.executor.autotune.core_choice import take_seats
from hetrun.executor.autotune.cpu_contention import Others, others_running
from hetrun.executor.autotune.drift import Watcher
from hetrun.executor.autotune.explorer import Explorer
from hetrun.executor.autotune.prober import Prober, price_of_a_turn
from hetrun.executor.autotune.setup import Setup, home_of, planner_for
from hetrun.executor.autotune.state import LEAST_WAITING, Change, State
from hetrun.executor.autotune.thread_count import Crew
from hetrun.executor.autotune.weight_migration import Weights
from hetrun.executor.autotune.yielding import Aside
from hetrun.executor.executor import Between, Executor
from hetrun.executor.loading.device_memory import within
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Graph
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.costmodel import Forecast
from hetrun.planner.expert_stats import Choices, path_of
from hetrun.planner.online import Now
from hetrun.planner.segment_cost import CALL
from hetrun.planner.switch_cost import SIZES, turn
from hetrun.planner.trials import Trial, trials_of
from hetrun.system.progress import Progress, stretch

log = logging.getLogger(__name__)

PROBE_S = 8.0  # that a first use may take to measure
PROBE_BUSY_S = 2.0  # while others compute: it will be done again, so a rough idea must do
LOOK_S = 0.5  # between two looks at what has drifted
SHARE = 0.01  # of the time goes into trying what is not in use
PLANNING = 0.02  # of the time goes into planning anew
UNKNOWN_START_S = 2.0  # for loading a backend that was never loaded here: a longer prompt is worth a try
MOST_CHANGES = 100  # that are remembered
AGAIN_S = 5.0  # until it is seen whether others still compute, where they disturbed the probe
BUSY = 0.5  # threads of others: times would say more about them


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
        self._keep, self._again_at = True, 0.0
        self.aside = Aside(executor)
        others = Others()
        crew = Crew(setup.threads[-1], others.look, others.count)
        self._weights = Weights(
            *(graph, backends, store, self.planner, forecast, self._state, self.aside, setup.own, setup.room)
        )
        self._in_force = InForce(self.planner, executor, crew, alters=len(setup.threads) > 1)
        self._watcher = Watcher(self.planner, forecast)
        self._explorer = Explorer(self.planner, executor, self.prober, store, backends, setup.context)

    @property
    def changes(self) -> Sequence[Change]:
        """Every change of plan, with its reason."""
        return self._state.changes

    # --- before the first step

    def begin(self, progress: Progress | None = None) -> None:
        """Measure what is not known, and make the first plan from it."""
        names = [n for n in self._setup.candidates if n in self._state.started]
        if self._setup.eager:
            others = [n for n in self._setup.candidates if n not in names]
            names += filter(self._weights.may_start, others)
        todo = {name: self._unknown(name) for name in names}
        wanted = [name for name in names if todo[name]]
        take_seats(self.prober, self.planner, self.forecast, self._setup)
        busy = bool(wanted) and self._disturbed()
        left = PROBE_BUSY_S if busy else PROBE_S
        for at, name in enumerate(wanted):
            tell = stretch(progress, at / len(wanted), (at + 1) / len(wanted))
            left -= self._probe(name, todo[name], left / (len(wanted) - at), tell)
        if wanted:
            self._executor.forget_threads()
            if busy:
                log.warning(
                    "other programs keep this machine busy, so what was measured now will be measured again "
                    "at the next start"
                )
            self._keep = not busy
            self.save()
        if progress:
            progress(1.0)
        self.replan("the first plan", eager=self._setup.eager)

    def _disturbed(self) -> bool:
        """Whether others compute, and not only on cores that nobody uses here."""
        return others_running() >= (cpu_count() or 1) - self._setup.threads[-1] + BUSY

    def _measure_again(self) -> None:
        """What was measured while others computed, if they do not any more: the most telling of it."""
        if self._disturbed():
            return
        names = [n for n in self._candidates() if n in self._state.started]
        for name in names:
            self._probe(name, self._trials(name), PROBE_S / 4 / len(names), self.aside)
        self._executor.forget_threads()
        self._again_at = float("inf")
        self.replan("measured again without other programs", eager=self._setup.eager)

    def _unknown(self, name: str) -> list[Trial]:
        """What should be measured of a backend: nothing, if it was."""
        trials = self._trials(name)
        return [] if all(self._known(t) for t in trials) else trials

    def _trials(self, name: str) -> list[Trial]:
        """What can be measured of a backend."""
        s = self._setup
        home = name in s.home.values()
        trials = trials_of(
            self._graph,
            self.planner.units,
            name,
            home,
            s.threads,
            s.context,
            self._executor.plans.ubatch,
            s.wide,
        )
        able = self.planner.costs.able
        forms = {u.form for i, u in enumerate(self.planner.units) if name in able[i]}
        whole = all(name in some for some in able)
        mine = [t for t in trials if t.form in forms or (t.name == "whole" and whole)]
        return mine + self.planner.more_trials(name, s.context, self._executor.plans.ubatch)

    def _known(self, trial: Trial) -> bool:
        """Whether something was measured, or was to be and took too long."""
        return self.forecast.knows(trial.work) or self.forecast.fact(_asked(trial), trial.backend) is not None

    def _probe(self, name: str, trials: Sequence[Trial], seconds: float, tell: Progress) -> float:
        """Measure for so long, behind whatever it takes to start; how long that was."""
        start = perf_counter()
        try:
            self._weights.start(name)
            start = perf_counter()
            if self.forecast.fact(CALL, name) is None:
                self.prober.call(name, self._setup.threads[-1])
            if self.prober.run(trials, start + seconds, tell):
                self._learn_turns(name)
                for trial in trials:
                    self.forecast.learn_fact(_asked(trial), name, 1.0)
        except Cancelled:
            raise
        except Exception as e:  # a plugin may fail in any way, and the others go on
            if name in self._setup.home.values():
                raise
            self._refuse(name, e)
        finally:
            if self._backends[name].asynchronous:
                self.prober.give_back(name)  # a device's memory is for what plans need
        return perf_counter() - start

    def _learn_turns(self, name: str) -> None:
        """What it costs that this backend and the one that holds most of the model take turns."""
        home, _ = Counter(self._setup.home.values()).most_common(1)[0]
        if name == home or self._backends[name].asynchronous:
            return
        able, threads = self.planner.costs.able, self._setup.threads[-1]
        for tokens in SIZES:
            price = price_of_a_turn(self.prober, self.planner.units, able, home, name, threads, tokens)
            if price is not None:
                self.forecast.learn_fact(turn(tokens), name, price)

    # --- between steps

    def expect(self, waiting: int, between: Between | None = None) -> None:
        """So many tokens of prompts wait: another backend may be worth bringing in for them."""
        with self.aside.for_the_sake_of(between):
            self._expect(waiting)

    def _expect(self, waiting: int) -> None:
        state = self._state
        if waiting <= state.asked:
            return  # it was not worth it for as many
        crowded = self._in_force.crew.crowded
        for name in [n for n in self._candidates() if n not in state.started]:
            trying = not crowded and self._weights.may_start(name) and self._worth_a_try(waiting)
            if trying and (trials := self._unknown(name)):
                self._probe(name, trials, PROBE_S / 4, self.aside)
                self._executor.forget_threads()
        changed = self.replan(f"{waiting} tokens wait", waiting=waiting)
        state.asked = LEAST_WAITING if changed else waiting

    def _worth_a_try(self, waiting: int) -> bool:
        """Whether a prompt takes so long that a backend that nobody has measured may be tried on it."""
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
        if idle and not self._keep and now >= self._again_at:
            self._again_at = now + AGAIN_S
            self._measure_again()
        if cause := self._in_force.look(now):
            self._note(Change(now, cause))
        if now < state.next_look or self._in_force.crew.crowded:
            return  # what is tried in a crowd says more about others
        state.next_look = now + LOOK_S
        if now >= state.next_trial:
            self._try_another()
            state.next_trial = now + max(LOOK_S, (perf_counter() - now) / SHARE)
        if now < self._watcher.ready_at:
            return
        cause = self._watcher.drifted() or self._watcher.moved(self._now())
        if cause := cause or self.planner.surprised(self._in_force.planned):
            state.cause = cause
            start = perf_counter()
            self.replan(cause)
            end = perf_counter()
            self._watcher.rest(end, (end - start) / PLANNING)

    def _try_another(self) -> None:
        allowed = [n for n in self._candidates() if n in self._state.started]
        chosen = self._explorer.choose(self._now(), allowed) if len(allowed) > 1 else None
        if chosen is None:
            return
        try:
            self._explorer.run(chosen)
        except Cancelled:
            raise
        except Exception as e:  # a plugin may fail in any way, and the answer goes on
            self._refuse(chosen.backend, e)
            self.replan(f"{chosen.backend} failed")  # which it would do in somebody's answer, too
        self._executor.forget_threads()

    def goes_on_without(self, name: str, error: Exception) -> bool:
        """A backend failed in the middle of a step: whether the others can take the same step."""
        if (
            isinstance(error, Cancelled)
            or name not in self._candidates()
            or name in self._setup.home.values()
        ):
            return False
        self._refuse(name, error)
        self.replan(f"{name} failed")
        self._executor.forget_threads()
        return name not in self._in_force.planned.backends

    def _refuse(self, name: str, error: Exception) -> None:
        if not isinstance(error, PluginError):  # of which everybody has heard already
            log.warning(
                "the backend %s is left out: %s", name, error, exc_info=not isinstance(error, HetrunError)
            )
        self._state.refused.add(name)

    # --- plans

    def _candidates(self) -> list[str]:
        return [n for n in self._setup.candidates if n not in self._state.refused]

    def _now(self, waiting: int = 0, eager: bool = False) -> Now:
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
        )

    def replan(self, cause: str, waiting: int = 0, eager: bool = False) -> bool:
        """Ask the planner; whether another plan is in force now."""
        now = self._now(waiting, eager)
        self.planner.candidates = tuple(self._candidates())
        plans = within(self._in_force.planned, self._weights.own)
        proposal = self.planner.propose(plans, now)
        if proposal is None:
            self._in_force.adopt(self.planner.annotate(plans, now))
            self._watcher.watch(self._in_force.planned, now, self._candidates())
            return False
        try:
            self._weights.bring(proposal.bring)
            self._weights.bring_parts(proposal.parts)
        except Cancelled:
            raise
        except Exception as e:  # a plugin may fail in any way, and the plan stays as it is
            if isinstance(e, BudgetError) and not proposal.bring:  # what is free may lie in pieces
                log.info("there is no room for what would be better (%s): %s", proposal.reason, e)
                return False
            for name in {b for _, b in proposal.bring} | {b for b, _ in proposal.parts - now.parts}:
                if name not in self._setup.home.values():
                    self._refuse(name, e)
            return False
        self._in_force.adopt(proposal.plans)
        self._weights.drop(proposal.drop)
        self._weights.drop_parts(proposal.spare)
        self._state.parts = proposal.parts
        change = Change(perf_counter(), f"{cause}: {proposal.reason}")
        self._note(change)
        self._watcher.changed(proposal.plans, change.at)
        self._watcher.watch(proposal.plans, now, self._candidates())
        return True

    def _note(self, change: Change) -> None:
        self._state.changes.append(change)
        del self._state.changes[:-MOST_CHANGES]
        log.info("planned anew: %s", change.reason)

    # --- what follows

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Seconds of a step: so many tokens of each sequence, each behind so many others; None: unknown."""
        return self._in_force.predict(chunks)

    def save(self) -> None:
        """Keep what was measured for the next start."""
        if self._setup.memory is None or not self._keep:
            return
        try:
            self.forecast.save(self._setup.memory)
            if self._choices_at:
                self.choices.save(self._choices_at)
        except OSError as e:
            log.debug("times are not kept: %s", e)


def _asked(trial: Trial) -> str:
    """The fact that a probe had its chance to measure something."""
    return f"asked {trial.form} {trial.threads} {trial.sequences > 1}"
