"""`hetrun bench --ram 1GiB,2GiB,50%`: answers in one budget after the other.

Each budget has processes of its own. Ours runs in a group of twice the budget, so that nothing but itself
keeps it inside; the peer maps the model and runs in a group of just the budget, which its page cache shares.
What the disk gives is measured right before and right behind each of our samples.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from hetrun.api.model_path import model_path
from hetrun.config import Settings
from hetrun.errors import HetrunError, UserError
from hetrun.loader.open_model import open_model
from hetrun.loader.tensor_list import entries
from hetrun.system.memory_info import available_memory
from hetrun.tools.bench import interleave
from hetrun.tools.bench.disk_bandwidth import ModelDisk
from hetrun.tools.bench.hetrun_side import spec_of
from hetrun.tools.bench.io_counters import disk_bytes
from hetrun.tools.bench.memory_bandwidth import load_average
from hetrun.tools.bench.peer import MappedPeer, Peer, check_peer
from hetrun.tools.bench.process import BenchProcess, BenchProcessDied
from hetrun.tools.bench.sweep import worker
from hetrun.tools.bench.sweep.budgets import BESIDE, SweepBudget, SweepOptions
from hetrun.tools.bench.sweep.cgroup_sandbox import SandboxGroup, confined, why_not
from hetrun.tools.bench.sweep.results import BudgetPoint, PeerPoint, SampleTurn, Sweep
from hetrun.tools.bench.sweep.worker import NAME, SweepSample, WorkerState
from hetrun.tools.bench.texts import BenchText, open_text, passage_of

SAMPLE_S = 10.0  # a sample has as many tokens as come in about that time
LEAST = 4  # tokens of a sample
TWICE = 2  # the group that ours runs in, in budgets
SPARE = 1 << 30  # bytes that must be left where the whole model is to be in memory
MORE = 1.25  # so much more than its weights a model takes in memory
KILLED = "killed for memory"
# How llama.cpp has its weights.
MAPPED, COPIED = "mmap", "none"

Tell = Callable[[int, int, str], None]
T = TypeVar("T")


@dataclass(slots=True)
class _Side:
    """One side in its budget, until it fails: how it ends is a result."""

    group: SandboxGroup | None
    failed: str | None = None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """What it gives; None once it has failed."""
        if self.failed is not None:
            return None
        try:
            return work()
        except BenchProcessDied as error:
            by_kernel = self.group is not None and error.code == -signal.SIGKILL and self.group.killed
            self.failed = KILLED if by_kernel else str(error)
        except HetrunError as error:
            self.failed = str(error)
        return None


@dataclass(slots=True)
class _Progress:
    tell: Tell | None
    total: int
    done: int = 0
    where: str = ""

    def say(self, what: str, over: bool = False) -> None:
        self.done += over
        if self.tell:
            self.tell(self.done, self.total, f"{self.where}: {what}")


@dataclass(frozen=True, slots=True)
class _Bench:
    """What is the same for every budget."""

    path: Path
    settings: Settings
    options: SweepOptions
    disk: ModelDisk
    weights: int
    groups: bool  # whether ours runs in one
    text: BenchText | None
    progress: _Progress = field(compare=False)

    def opened(self, ram: int | None) -> worker.OpenModel:
        """The order that loads the model in so much memory."""
        settings = self.settings
        given = {n: getattr(settings, n) for n in settings.origins if n not in ("model", "ram")}
        given["spec"] = spec_of(settings)
        return worker.OpenModel(str(self.path), given | ({} if ram is None else {"ram": ram}), self.weights)

    def steps(self, rate: float) -> int:
        """Tokens of a sample where `rate` steps fit into a second."""
        return max(min(LEAST, self.options.generate), min(self.options.generate, round(SAMPLE_S * rate)))


def run(settings: Settings, options: SweepOptions, tell: Tell | None = None) -> Sweep:
    """Measure everything that was asked for. A budget that is refused is a result, as is a side that is
    killed."""
    path, load = model_path(settings), load_average()
    source = open_model(path)
    files = {Path(e.path) for e in entries(source)}
    refusal = why_not()
    if options.vs is not None:
        check_peer(options.vs, path)
        if refusal:
            raise UserError(f"--vs in a sweep needs the peer to have the budget and no more: {refusal}")
    text = open_text(settings, options.text)
    if text:
        text.check(options.case)
    weights = sum(e.nbytes for e in entries(source))
    each = options.rounds * (1 if options.vs is None else 2)
    progress = _Progress(tell, each * (len(options.budgets) + 1))
    bench = _Bench(
        path=path,
        settings=settings,
        options=options,
        disk=ModelDisk(sorted(files)),
        weights=weights,
        groups=refusal is None,
        text=text,
        progress=progress,
    )
    room = options.control and available_memory() > MORE * weights + SPARE
    points = [_resident(bench)] if room else []
    for budget in options.budgets:
        progress.done = each * (1 + options.budgets.index(budget))
        points.append(_point(bench, budget, budget.of(source.nbytes)))
    return Sweep(
        model=path.stem,
        model_bytes=source.nbytes,
        case=options.case,
        points=tuple(points),
        load=(load, load_average()),
        kv_type=settings.kv_type,
        groupless=refusal,
        text=text.about if text else None,
    )


def _resident(bench: _Bench) -> BudgetPoint:
    """All weights in memory: what computing takes."""
    bench.progress.where = "all in memory"
    with ExitStack() as stack:
        ours = _Ours(bench, stack, None, None)
        rate = ours.prepare()
        turns = [ours.sample(rate, n + 1) for n in range(bench.options.rounds)] if rate else []
        return ours.point(None, None, turns)


def _point(bench: _Bench, budget: SweepBudget, nbytes: int) -> BudgetPoint:
    """Both sides in turn."""
    bench.progress.where = budget.name
    bench.disk.forget()
    with ExitStack() as stack:
        group = stack.enter_context(confined(TWICE * nbytes)) if bench.groups else None
        ours = _Ours(bench, stack, group, nbytes)
        theirs = _Theirs(bench, stack, nbytes) if bench.options.vs else None
        rate = ours.prepare()
        their_rate = theirs.prepare() if theirs else None
        turns: list[SampleTurn | None] = []
        pairs: list[float] = []
        for n in range(bench.options.rounds):
            # A B B A, so that a machine that gets slower or faster favours neither.
            for side in ("ours", "theirs") if n % 2 == 0 else ("theirs", "ours"):
                time.sleep(interleave.PAUSE_S)
                if side == "ours" and rate:
                    if theirs:
                        theirs.rest()
                    turns.append(ours.sample(rate, n + 1))
                elif side == "theirs" and theirs and their_rate:
                    theirs.sample(their_rate, n + 1)
        found = [t for t in turns if t]
        point = ours.point(budget, nbytes, found)
        if theirs is None:
            return point
        peer = theirs.result()
        pairs = [t.sample.tok_s / s for t, s in zip(found, peer.samples, strict=False)]
        return replace(point, peer=peer, ratio=median(pairs) if pairs else None)


class _Ours:
    """hetrun in its budget."""

    def __init__(
        self, bench: _Bench, stack: ExitStack, group: SandboxGroup | None, nbytes: int | None
    ) -> None:
        self._bench, self._side, self._group = bench, _Side(group), group
        bench.progress.say(f"{NAME} loads")
        self._process: BenchProcess = worker.start(group.prefix if group else ())
        stack.callback(self._process.close)
        order = bench.opened(nbytes)
        self._opened = self._side.attempt(lambda: self._process.ask(order, worker.ModelOpened))

    def prepare(self) -> float | None:
        """Steps per second."""
        self._bench.progress.say(f"{NAME} is warming up")
        case = self._bench.options.case
        order = worker.PrepareCase(case, passage_of(self._bench.text, case, 0))
        return self._side.attempt(lambda: self._process.ask(order, float))

    def sample(self, rate: float, seed: int) -> SampleTurn | None:
        """One, with the disk's ceiling beside it."""
        self._bench.progress.say(NAME)
        case = replace(self._bench.options.case, tokens=self._bench.steps(rate))
        self._bench.disk.forget()
        before = self._bench.disk.ceiling()
        order = worker.RunCase(case, seed, passage_of(self._bench.text, case, seed))
        sample = self._side.attempt(lambda: self._process.ask(order, SweepSample))
        after = self._bench.disk.ceiling()
        self._bench.progress.say(NAME, over=True)
        if sample is None:
            return None
        return SampleTurn(sample, tuple(c for c in (before, after) if c))

    def point(
        self, budget: SweepBudget | None, nbytes: int | None, turns: Sequence[SampleTurn | None]
    ) -> BudgetPoint:
        """What it all came to."""
        order = worker.ReportState(self._bench.options.case)
        state = self._side.attempt(lambda: self._process.ask(order, WorkerState))
        return BudgetPoint(
            budget=budget,
            nbytes=nbytes,
            batch=self._bench.options.batch,
            context=self._opened.context if self._opened else 0,
            turns=tuple(t for t in turns if t),
            state=state,
            group_peak=self._group.peak if self._group else None,
            failed=self._side.failed,
        )


class _Theirs:
    """The peer in its budget."""

    def __init__(self, bench: _Bench, stack: ExitStack, nbytes: int) -> None:
        self._bench = bench
        self._group = stack.enter_context(confined(nbytes))
        self._side = _Side(self._group)
        self._threads = 0
        self._samples: list[float] = []
        self._per_step: list[float] = []
        self._peer: Peer | None = None
        self._load = MAPPED
        self._fits = nbytes >= bench.weights + BESIDE
        stack.callback(self._close)

    def prepare(self) -> float | None:
        """Steps per second, with the weights mapped, or in memory where all of them have room and that is
        faster: it shall not lose by a setting."""
        copied = self._try(COPIED) if self._fits else None
        mapped = self._try(MAPPED)
        return self._try(COPIED) if (copied or 0.0) > (mapped or 0.0) else mapped

    def _close(self) -> None:
        if self._peer:
            self._peer.close()
        self._peer = None

    def _try(self, load: str) -> float | None:
        """Steps per second of one that loads in that way; the one before is gone, and how it ended too."""
        self._close()
        self._side, self._load = _Side(self._group), load
        bench, case = self._bench, self._bench.options.case
        bench.progress.say("llama.cpp loads")
        how = MappedPeer(self._group.prefix, bench.settings.kv_type, load)
        peer = self._side.attempt(lambda: Peer(bench.path, bench.options.vs_threads, how, bench.text))
        self._peer = peer
        if peer is None:
            return None
        self._bench.progress.say(f"{peer.name} is warming up")
        self._side.attempt(lambda: peer.prepare(case))
        self._threads = self._side.attempt(lambda: peer.threads(case)) or 0
        rate = self._side.attempt(lambda: peer.sample(case, 0, worker.TRIAL))
        return rate and rate / case.batch

    def rest(self) -> None:
        """What it has read shall not be found in memory again."""
        self._group.empty()

    def sample(self, rate: float, seed: int) -> None:
        """One, after a token that has its memory fill up again; of a text the prompt does that, which is
        another one each time, and no token of the answer is seen before it counts."""
        peer, steps = self._peer, self._bench.steps(rate)
        if peer is None:
            return
        self._bench.progress.say(peer.name)
        first = 0 if self._bench.text else 1
        self._side.attempt(lambda: peer.sample(self._bench.options.case, seed, first))
        before = disk_bytes(peer.pid)
        found = self._side.attempt(lambda: peer.sample(self._bench.options.case, seed, steps))
        if found:
            self._samples.append(found)
            self._per_step.append((disk_bytes(peer.pid) - before) / steps)
        self._bench.progress.say(peer.name, over=True)

    def result(self) -> PeerPoint:
        """What it all came to."""
        peer, failed, peak = self._peer, self._side.failed, self._group.peak
        if peer is None:
            return PeerPoint("llama.cpp", peak=peak, failed=failed)
        return PeerPoint(
            name=peer.name,
            version=peer.version,
            threads=self._threads,
            samples=tuple(self._samples),
            per_step=median(self._per_step) if self._per_step else 0.0,
            peak=peak,
            failed=failed,
            load=self._load,
        )
