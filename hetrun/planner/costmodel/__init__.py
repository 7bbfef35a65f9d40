"""What was measured on this machine, and what follows from it.

Every run of some work (ops of one form, on one backend, with one number of threads) goes into a
`TimingBin`: runs of about as many tokens at about the same depth. `Fit` draws lines through the bins, so
times of other sizes follow. Depth is what a token sees on average (`Pass.depth`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from math import exp, log2
from pathlib import Path

from hetrun.planner.costmodel import store
from hetrun.planner.costmodel.fit import Fit
from hetrun.planner.costmodel.key import OpWork as OpWork
from hetrun.planner.costmodel.store import path_of_machine as path_of_machine
from hetrun.planner.costmodel.timing_bin import Size, TimingBin as TimingBin, size_of

log = logging.getLogger(__name__)

NEAR = 3.0  # doublings of tokens, over which a rough time says less and less of another
FACT_RATE = 0.3  # how much a newly measured fact counts


class WorkCells:
    """The cells of one work."""

    __slots__ = ("_fit", "_fitted", "cells")

    def __init__(self, cells: dict[Size, TimingBin] | None = None) -> None:
        self.cells: dict[Size, TimingBin] = cells or {}
        self._fit = Fit({})
        self._fitted = 0  # runs that the fit was made from

    @property
    def runs(self) -> int:
        """Runs in all."""
        return sum([c.runs for c in self.cells.values()])

    def cell(self, tokens: int, depth: float) -> TimingBin:
        """Where runs of about that size are kept; always the same object."""
        size = size_of(tokens, depth)
        found = self.cells.get(size)
        if found is None:
            found = self.cells[size] = TimingBin()
        return found

    def add(self, tokens: int, depth: float, seconds: float) -> None:
        """One more run, into its cell."""
        self.cell(tokens, depth).add(tokens, depth, seconds)

    def fit(self) -> Fit:
        """What the runs so far say."""
        if (runs := self.runs) != self._fitted:
            self._fit, self._fitted = Fit(self.cells), runs
        return self._fit

    def rescale(self, factor: float, tokens: int = 0) -> None:
        """As if every run had taken `factor` times as long; other sizes less so: each was off by itself."""
        for cell in self.cells.values():
            near = exp(-abs(log2(cell.tokens / tokens)) / NEAR) if tokens and cell.runs else 1.0
            cell.rescale(factor**near)
        self._fitted = -1


class WorkTimes:
    """Times of work on this machine. Written and asked by the engine thread only."""

    def __init__(self) -> None:
        self._measured: dict[OpWork, WorkCells] = {}
        self._facts: store.Facts = {}
        self._known: dict[OpWork, int] = {}  # runs that came from a file
        self._unkept = ""  # why nothing could be saved, as it was said

    def measured(self, work: OpWork) -> WorkCells:
        """Where runs of a work are kept; always the same object."""
        found = self._measured.get(work)
        if found is None:
            found = self._measured[work] = WorkCells()
        return found

    def cell(self, work: OpWork, tokens: int, depth: float) -> TimingBin:
        """Where runs of about that size are kept; always the same object."""
        return self.measured(work).cell(tokens, depth)

    def learn(self, work: OpWork, tokens: int, depth: float, seconds: float, rough: float = 0.0) -> None:
        """One more run; a rough one was measured beside other programs."""
        if rough:
            self.cell(work, tokens, depth).add_rough(tokens, depth, seconds, rough)
        else:
            self.measured(work).add(tokens, depth, seconds)

    def rough(self, work: OpWork) -> float:
        """How far off, relative, all that is known of a work may be."""
        cells = [c.rough for c in self.measured(work).cells.values() if c.runs]
        return min(cells, default=0.0)

    def seconds(self, work: OpWork, tokens: int, depth: float) -> float | None:
        """What a run takes; None if nothing is known of the work."""
        own, other = self._fit(work), self._fit(work.other)
        if not own:
            return other.seconds(tokens, depth) if other else None
        seconds = own.seconds(tokens, depth)
        if not other:
            return seconds
        # Outside of what was measured, runs of one sequence and of several grow alike.
        fewest, most = own.span(depth)
        edge = min(max(tokens, fewest), most)
        there = other.seconds(edge, depth)
        if edge == tokens or not there:
            return seconds
        return own.seconds(edge, depth) * other.seconds(tokens, depth) / there

    def knows(self, work: OpWork) -> bool:
        """Whether some run of exactly this work was measured."""
        return bool(self._fit(work))

    def rescale(self, work: OpWork, factor: float, tokens: int = 0, rough: float | None = None) -> None:
        """The work has become slower or faster by this, as runs of `tokens` tokens show: so have, as far as
        is known, runs of every size."""
        self.measured(work).rescale(factor, tokens)
        if rough is not None:
            for cell in self.measured(work).cells.values():
                cell.rough = min(cell.rough, rough) if rough else 0.0

    def forget_rough(self, backends: Collection[str]) -> None:
        """What was measured beside other programs has been measured again, or is not worth it."""
        for work, measured in self._measured.items():
            if work.backend in backends:
                measured.cells = {
                    size: c for size, c in measured.cells.items() if not c.rough
                } or measured.cells
                for cell in measured.cells.values():
                    cell.rough = 0.0

    def works(self) -> Iterator[OpWork]:
        """All works of which something is known."""
        return iter([work for work, measured in self._measured.items() if measured.runs])

    def fact(self, name: str, backend: str) -> float | None:
        """Something about a backend that is no run of ops, as "start_s"; None if it was never measured."""
        key = name, backend
        if key in self._facts:
            self._facts[key] = self._facts.pop(key)  # the last ones asked for are kept when a file is full
        return self._facts.get(key)

    def learn_fact(self, name: str, backend: str, value: float) -> None:
        """A fact, measured once more: smoothed, but a change shows soon."""
        before = self.fact(name, backend)
        self._facts[name, backend] = value if before is None else before + FACT_RATE * (value - before)

    @classmethod
    def load(cls, path: Path) -> WorkTimes:
        """What was saved. A file that is damaged or not hetrun's is ignored; the log says so."""
        forecast = cls()
        works, forecast._facts = store.read(path)
        forecast._measured = {work: WorkCells(cells) for work, cells in works.items()}
        forecast._known = {work: measured.runs for work, measured in forecast._measured.items()}
        return forecast

    def save(self, path: Path) -> None:
        """Keep what is known. What another process saved meanwhile of other works stays.

        A disk that takes nothing costs only the next start, and is said once.
        """
        theirs, facts = store.read(path, logging.DEBUG)  # what is wrong with it was said when it was loaded
        mine = {w: m.cells for w, m in self._measured.items() if m.runs != self._known.get(w, 0) and m.runs}
        rest = {w: m.cells for w, m in self._measured.items() if w not in mine and m.runs}
        rest.update((w, cells) for w, cells in theirs.items() if w not in mine)
        # What this process used comes first: the file has a limit.
        others = {key: value for key, value in facts.items() if key not in self._facts}
        problem = store.write(path, [*mine.items(), *rest.items()], others | self._facts)
        if problem and problem != self._unkept:
            log.warning(
                "measurements could not be saved in %s, so the next start measures again "
                "(--planner static never does): %s",
                path,
                problem,
            )
        self._unkept = problem

    def _fit(self, work: OpWork) -> Fit | None:
        measured = self._measured.get(work)
        return measured.fit() or None if measured else None
