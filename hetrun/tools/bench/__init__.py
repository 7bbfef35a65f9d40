"""`hetrun bench`: how fast this machine reads and writes, next to what it could, and next to llama.cpp.

Both sides are measured as their users have them. In process: ours from the request to the token through the
engine, sampling (greedy) and detokenising included; llama.cpp through its C interface as llama-bench does.
As servers: `hetrun serve` and llama.cpp's, with the same clients (`serving`). In several budgets of memory,
each in processes of its own (`sweep`).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from hetrun.api.model_path import model_path
from hetrun.config import Settings
from hetrun.planner.precision import precision_of
from hetrun.system.terminal_text import visible
from hetrun.tools.bench.cases import BenchCase, BenchOptions as BenchOptions, numbers as numbers
from hetrun.tools.bench.cpu_load import others
from hetrun.tools.bench.hetrun_side import HetrunSide, open_llm, spec_of
from hetrun.tools.bench.interleave import Duel, Tick, UndisturbedSide, measure
from hetrun.tools.bench.memory_bandwidth import BUSY, load_average, memory
from hetrun.tools.bench.peer import Peer, check_peer, default_threads
from hetrun.tools.bench.report import BenchRow, Chosen, PeerResult, to_csv, to_json, to_table
from hetrun.tools.bench.roofline import Demands, Limit, demands, limit_of
from hetrun.tools.bench.serving.cases import ServingOptions
from hetrun.tools.bench.sweep.budgets import SweepOptions as SweepOptions
from hetrun.tools.bench.texts import BenchText, open_text

UNKNOWN = Limit(None, "not measured yet")
# What a caller learns of the progress: samples done, samples in all, what runs.
Tell = Callable[[int, int, str], None]


def main(settings: Settings, options: BenchOptions) -> None:
    """Measure and print; results go to stdout, everything else to stderr."""
    _warn_if_busy()
    with _progress() as tell:
        rows = run(settings, options, tell)
        # One sample, or where the time goes, is a look at what is in force, not at what the other precision
        # costs or brings.
        both = options.rounds > 1 and not options.explain
        if settings.precision is None and rows[0].precision and both:
            rows += run(settings, replace(options, vs=None, vs_threads=None), tell, _other(rows[0].precision))
    if options.output == "json":
        print(to_json(rows, options.explain))
    elif options.output == "csv":
        print(to_csv(rows))
    else:
        print(visible(to_table(rows, options.explain)))


def serve(settings: Settings, options: ServingOptions) -> None:
    """The same for a server in processes of its own, with its clients in this one."""
    from hetrun.tools.bench.serving import (
        benchmark,  # on use: nothing else here speaks to servers
        report as serving_report,
    )

    _warn_if_busy()
    with _progress() as tell:
        report = benchmark.run(settings, options, tell)
    if options.output == "json":
        print(serving_report.to_json(report))
    elif options.output == "csv":
        print(serving_report.to_csv(report))
    else:
        print(visible(serving_report.to_table(report)))


def in_budgets(settings: Settings, options: SweepOptions) -> None:
    """The same for answers in several budgets, each in processes of its own."""
    from hetrun.tools.bench import svg  # on use: nothing else here sweeps
    from hetrun.tools.bench.sweep import report as sweep_report, sweep

    _warn_if_busy()
    with _progress() as tell:
        found = sweep.run(settings, options, tell)
    if options.picture is not None:
        options.picture.write_text(svg.drawn(sweep_report.series(found), found.title), encoding="utf-8")
    if options.output == "json":
        print(sweep_report.to_json(found))
    elif options.output == "csv":
        print(sweep_report.to_csv(found))
    else:
        print(visible(sweep_report.to_table(found, shutil.get_terminal_size().columns)))


def _warn_if_busy() -> None:
    if load_average() > BUSY:
        print(
            f"the load average is {load_average():.2f}: something else is running, "
            "and these numbers will say little",
            file=sys.stderr,
        )


def _other(precision: str) -> str:
    return "fast" if precision == "exact" else "exact"


def run(
    settings: Settings, options: BenchOptions, tell: Tell | None = None, precision: str | None = None
) -> list[BenchRow]:
    """Measure everything that was asked for; in this precision, whatever the settings say."""
    precision = precision or precision_of(settings.precision)
    cases, start = options.cases(), load_average()
    path = model_path(settings)
    if options.vs is not None:
        check_peer(options.vs, path)
    text = _text_of(settings, options)
    model = demands(path, settings.kv_type)
    total = len(cases) * options.rounds * (1 if options.vs is None else 2)
    if tell:
        tell(0, total, "loading, and measuring what is not known yet")
    with ExitStack() as stack:
        ours = HetrunSide(
            stack.enter_context(open_llm(settings, spec=spec_of(settings), eager=True, precision=precision)),
            look=options.explain,
            text=text,
        )
        for case in cases:
            ours.check(case)
        # Memory is measured now and behind each case: while the sides take turns, nothing else may run. Where
        # one sample of each will do, so does one measurement of what they are held against.
        again = options.rounds > 1
        for case in cases:
            if tell:
                tell(0, total, "what memory and products give here")
            _limit(case, model, ours, ours.threads(case), again=False)
        chosen = _threads_of_peer(options)
        peer = stack.enter_context(Peer(path, chosen.n, text=text)) if options.vs is not None else None
        theirs = None if peer is None else UndisturbedSide(peer, ours.alone)
        ticks = _ticks(tell, cases, total // len(cases))
        rows = []
        for case, tick in zip(cases, ticks, strict=True):
            with others(options.beside):
                duel = measure(case, options.rounds, ours, theirs, tick)
                # Only now it is certain who makes the products: plans change by what is measured.
                row = _row(path.stem, case, duel, ours)
            row = replace(row, limit=_limit(case, model, ours, row.threads, again))
            if peer is not None:
                limit = _limit(case, model, ours, peer.threads(case), again)
                row = replace(row, peer=_theirs(peer, case, duel, limit, chosen), ratio=duel.ratio)
            row = replace(
                row,
                load=(start, load_average()),
                beside=options.beside,
                precision=precision if ours.precision else "",
            )
            row = replace(row, text=text.about if text else None)
            if options.explain:
                row = replace(row, anatomy=ours.anatomy(case), experts=ours.experts_kept())
            rows.append(row)
    return rows


def _text_of(settings: Settings, options: BenchOptions) -> BenchText | None:
    """What was asked for, long enough for each case."""
    text = open_text(settings, options.text)
    if text is not None:
        for case in options.cases():
            text.check(case)
    return text


@dataclass(frozen=True, slots=True)
class PeersThreads:
    """How many, and who says so; None: for each case the number that suits it best."""

    n: int | None
    chosen: Chosen


def _threads_of_peer(options: BenchOptions) -> PeersThreads:
    """Beside other programs it has what its users have: they do not look for the best number every time."""
    if options.vs_threads is not None:
        return PeersThreads(options.vs_threads, "asked")
    return PeersThreads(default_threads(), "default") if options.beside else PeersThreads(None, "best")


def _row(model: str, case: BenchCase, duel: Duel, ours: HetrunSide) -> BenchRow:
    return BenchRow(
        model=model,
        test=case.name,
        batch=case.batch,
        threads=ours.threads(case),
        samples=duel.ours,
        limit=UNKNOWN,
        plan=ours.plan(case),
        segments=tuple(ours.segments(case)),
        python_share=ours.python_share,
        bucket=ours.bucket(case),
    )


def _theirs(peer: Peer, case: BenchCase, duel: Duel, limit: Limit, chosen: PeersThreads) -> PeerResult:
    return PeerResult(
        peer.name, peer.version, peer.threads(case), duel.theirs, peer.repacks, limit, chosen.chosen
    )


def _limit(case: BenchCase, model: Demands, ours: HetrunSide, threads: int, again: bool) -> Limit:
    """What no program could exceed here with `threads` threads while nothing else runs."""
    demand = model.of(case)
    given = ours.alone(lambda: memory(threads, demand.block, again))
    return limit_of(case, demand, given, ours.peak(case, threads))


def _ticks(tell: Tell | None, cases: Sequence[BenchCase], each: int) -> Iterator[Tick]:
    """For each case what is to be called before and after each of its samples."""
    done = 0

    def tick(case: BenchCase, what: str, over: bool) -> None:
        nonlocal done
        done += over
        if tell:
            tell(done, len(cases) * each, f"{case.name}: {what}")

    return (partial(tick, case) for case in cases)


@contextmanager
def _progress() -> Iterator[Tell | None]:
    """A bar on stderr if that is a terminal. It is drawn between samples only: a thread that draws takes time
    from the program that is measured."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("loading and measuring", total=None)
        bar.refresh()

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)
            bar.refresh()

        yield tell
