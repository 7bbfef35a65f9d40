"""`hetrun bench`: how fast this machine reads and writes, next to what it could, and next to llama.cpp.

Both sides are measured as their users have them. In process: ours from the request to the token through the
engine, sampling (greedy) and detokenising included; llama.cpp through its C interface as llama-bench does.
As servers: `hetrun serve` and llama.cpp's, with the same clients (`serving`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial

from hetrun.bench.cases import BenchOptions as BenchOptions
from hetrun.bench.cases import Case
from hetrun.bench.cases import numbers as numbers
from hetrun.bench.demand import demands
from hetrun.bench.limits import Limit, limit_of
from hetrun.bench.machine import BUSY, dram_bandwidth, load_average
from hetrun.bench.ours import Ours, open_llm
from hetrun.bench.peer import Peer, check_peer
from hetrun.bench.report import PeerResult, Row, to_csv, to_json, to_table
from hetrun.bench.rounds import Duel, measure
from hetrun.bench.serving_cases import ServingOptions
from hetrun.config import Settings
from hetrun.llm import model_path
from hetrun.visible import visible

# What a caller learns of the progress: samples done, samples in all, what runs.
Tell = Callable[[int, int, str], None]


def main(settings: Settings, options: BenchOptions) -> None:
    """Measure and print; results go to stdout, everything else to stderr."""
    _warn_if_busy()
    with _progress() as tell:
        rows = run(settings, options, tell)
    if options.output == "json":
        print(to_json(rows, options.explain))
    elif options.output == "csv":
        print(to_csv(rows))
    else:
        print(visible(to_table(rows, options.explain)))


def serve(settings: Settings, options: ServingOptions) -> None:
    """The same for a server in processes of its own, with its clients in this one."""
    from hetrun.bench import serving, serving_report  # on use: nothing else here speaks to servers

    _warn_if_busy()
    with _progress() as tell:
        report = serving.run(settings, options, tell)
    if options.output == "json":
        print(serving_report.to_json(report))
    elif options.output == "csv":
        print(serving_report.to_csv(report))
    else:
        print(visible(serving_report.to_table(report)))


def _warn_if_busy() -> None:
    if load_average() > BUSY:
        print(
            f"the load average is {load_average():.2f}: something else is running, "
            "and these numbers will say little",
            file=sys.stderr,
        )


def run(settings: Settings, options: BenchOptions, tell: Tell | None = None) -> list[Row]:
    """Measure everything that was asked for."""
    cases, start = options.cases(), load_average()
    path = model_path(settings)
    if options.vs is not None:
        check_peer(options.vs, path)
    model = demands(path, settings.kv_type)
    with ExitStack() as stack:
        ours = Ours(stack.enter_context(open_llm(settings, spec="off", eager=True)), look=options.explain)
        for case in cases:
            ours.check(case)
        # Memory is measured now: while the sides take turns, nothing else may run.
        for case in cases:
            _bandwidth(ours.threads(case))
        peer = stack.enter_context(Peer(path)) if options.vs is not None else None
        ticks = _ticks(tell, cases, options.rounds * (1 if peer is None else 2))
        rows = []
        for case, tick in zip(cases, ticks, strict=True):
            duel = measure(case, options.rounds, ours, peer, tick)
            # Only now it is certain who makes the products: a plan may have changed by what was measured.
            threads = ours.threads(case)
            limit = limit_of(case, model.of(case), threads, _bandwidth(threads), ours.peak(case))
            row = _row(path.stem, case, duel, limit, ours, peer, (start, load_average()))
            rows.append(replace(row, anatomy=ours.anatomy(case)) if options.explain else row)
    return rows


def _row(
    model: str, case: Case, duel: Duel, limit: Limit, ours: Ours, peer: Peer | None, load: tuple[float, float]
) -> Row:
    theirs = None
    if peer is not None:
        threads = peer.threads(case)
        theirs = PeerResult(peer.name, peer.version, threads, duel.theirs, repacking=peer.repacks)
    return Row(
        model=model,
        test=case.name,
        batch=case.batch,
        threads=ours.threads(case),
        samples=duel.ours,
        limit=limit,
        plan=ours.plan(case),
        peer=theirs,
        ratio=duel.ratio,
        load=load,
        segments=tuple(ours.segments(case)),
        python_share=ours.python_share,
        bucket=ours.bucket(case),
    )


@cache
def _bandwidth(threads: int) -> float:
    return dram_bandwidth(threads)


def _ticks(tell: Tell | None, cases: Sequence[Case], each: int) -> Iterator[Callable[[], None]]:
    """For each case what is to be called after each of its samples."""
    done = 0

    def tick(case: Case) -> None:
        nonlocal done
        done += 1
        if tell:
            tell(done, len(cases) * each, case.name)

    return (partial(tick, case) for case in cases)


@contextmanager
def _progress() -> Iterator[Tell | None]:
    """A bar on stderr if that is a terminal. It is drawn between samples only: a thread that draws takes time
    from whoever is measured."""
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
