"""Results as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from hetrun.prefetch.expert_trace import HitShares
from hetrun.system.terminal_text import align_columns
from hetrun.tools.bench.breakdown import Anatomy, advice, verdict
from hetrun.tools.bench.hetrun_side import SegmentTime
from hetrun.tools.bench.memory_bandwidth import BUSY, threads
from hetrun.tools.bench.roofline import Limit
from hetrun.tools.bench.texts import TextOrigin

WITHOUT_REPACKING = "without repacking: its AMX code does not work here (hetrun devices says why)"
ABOVE = (
    "of limit: more than 100 % means that the machine was slower while the limit was measured than while the "
    "model ran; measure again when nothing else runs"
)
BAR = 30  # letters for the whole time
Chosen = Literal["best", "asked", "default"]
CHOSEN: Mapping[Chosen, str] = {
    "best": "its best number of threads",
    "asked": "the number of threads that was asked for",
    "default": "the number of threads that is its default",
}
MANY = 8  # segments; if there are more, those of the same kind are told together


@dataclass(frozen=True, slots=True)
class PeerResult:
    """The other side's numbers."""

    name: str
    version: str
    threads: int
    samples: tuple[float, ...]
    repacking: bool = True  # whether weights were in the layouts that are fastest
    limit: Limit | None = None  # of any program with as many threads
    chosen: Chosen = "best"  # how its number of threads was

    @property
    def tok_s(self) -> float:
        """The median."""
        return median(self.samples)

    @property
    def of_limit(self) -> float | None:
        """How much of the limit it reached."""
        return self.limit.reached(self.tok_s) if self.limit else None

    def to_json(self) -> dict[str, Any]:
        """For `bench -o json`."""
        return {
            "name": self.name,
            "version": self.version,
            "threads": self.threads,
            "tok_s": self.tok_s,
            "samples": list(self.samples),
            "repacking": self.repacking,
            "threads_chosen": self.chosen,
            "limit_tok_s": self.limit.tok_s if self.limit else None,
            "of_limit": self.of_limit,
        }


@dataclass(frozen=True, slots=True)
class BenchRow:
    """The result of one case."""

    model: str
    test: str
    batch: int
    threads: int
    samples: tuple[float, ...]
    limit: Limit
    plan: str
    peer: PeerResult | None = None
    ratio: float | None = None
    load: tuple[float, float] = (0.0, 0.0)  # average at the start and at the end
    segments: tuple[SegmentTime, ...] = ()
    python_share: float | None = None
    anatomy: Anatomy | None = None
    bucket: str = ""  # of its typical passes
    beside: int = 0  # other programs that kept a core busy each
    precision: str = ""  # fast or exact
    text: TextOrigin | None = None  # that was read and written; None: random tokens were read
    experts: HitShares | None = None  # how well those were kept that do not all fit

    @property
    def of_limit(self) -> float | None:
        """How much of the limit was reached."""
        return self.limit.reached(self.tok_s)

    @property
    def tok_s(self) -> float:
        """The median."""
        return median(self.samples)

    def to_json(self, explain: bool) -> dict[str, Any]:
        """For `bench -o json`."""
        row: dict[str, Any] = {
            "model": self.model,
            "test": self.test,
            "batch": self.batch,
            "threads": self.threads,
            "tok_s": self.tok_s,
            "samples": list(self.samples),
            "limit_tok_s": self.limit.tok_s,
            "plan": self.plan,
            "peer": self.peer.to_json() if self.peer else None,
            "ratio": self.ratio,
            "load_average": {"start": self.load[0], "end": self.load[1]},
            "of_limit": self.of_limit,
            "memory": self.limit.memory.to_json() if self.limit.memory else None,
            "beside": self.beside,
            "precision": self.precision,
            "text": self.text.to_json() if self.text else None,
        }
        if explain:
            row["explain"] = self._explanation()
        return row

    def _explanation(self) -> dict[str, Any]:
        limit, peak, demand = self.limit, self.limit.peak, self.limit.demand
        return {
            "bucket": self.bucket,
            "limit": limit.why,
            "of_limit": self.of_limit,
            "bound": limit.bound,
            "bytes_per_step": limit.bytes_per_step,
            "bandwidth": limit.bandwidth,
            "bytes": demand.nbytes if demand else None,
            "flops": {"products": demand.products, "attention": demand.attention} if demand else None,
            "peak": {"name": peak.name, "threads": peak.threads, "flops": peak.rate} if peak else None,
            "experts": asdict(self.experts) if self.experts else None,
            "time": self.anatomy.to_json() if self.anatomy else None,
            "verdict": verdict(self.anatomy, limit) if self.anatomy else None,
            "advice": asdict(found) if self.anatomy and (found := advice(self.anatomy, limit)) else None,
            "python_share": self.python_share,
            "segments": [
                {
                    "segment": s.segment,
                    "backend": s.backend,
                    "threads": s.threads,
                    "runs": s.runs,
                    "seconds": s.seconds,
                }
                for s in self.segments
            ],
        }


def to_json(rows: Sequence[BenchRow], explain: bool) -> str:
    """A list of rows."""
    return json.dumps([row.to_json(explain) for row in rows], indent=2)


COLUMNS = (
    *("model", "test", "batch", "threads", "tok_s", "samples", "limit_tok_s", "plan"),
    *("peer", "peer_version", "peer_threads", "peer_tok_s", "peer_samples", "ratio"),
    *(
        "load_start",
        "load_end",
        "of_limit",
        "peer_limit_tok_s",
        "peer_of_limit",
        "peer_threads_chosen",
        "beside",
        "precision",
    ),
)


def to_csv(rows: Sequence[BenchRow]) -> str:
    """A line for each row; samples are separated by blanks."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for r in rows:
        mine: list[object] = [r.model, r.test, r.batch, r.threads, r.tok_s, _spaced(r.samples)]
        peer: list[object] = [None] * 5
        share: list[object] = [None] * 3
        if p := r.peer:
            peer = [p.name, p.version, p.threads, p.tok_s, _spaced(p.samples)]
            share = [p.limit.tok_s if p.limit else None, p.of_limit, p.chosen]
        writer.writerow(
            [*mine, r.limit.tok_s, r.plan, *peer, r.ratio, *r.load, r.of_limit, *share, r.beside, r.precision]
        )
    return text.getvalue().rstrip("\n")


def _spaced(samples: Sequence[float]) -> str:
    return " ".join(f"{s:.6g}" for s in samples)


def to_table(rows: Sequence[BenchRow], explain: bool) -> str:
    """For people."""
    heads = ["model", "test", "precision", "batch", "threads", "tokens/s", "of limit", "plan"]
    peers = [r.peer for r in rows if r.peer]
    if peers:
        heads += [peers[0].name, "of limit", f"threads ({peers[0].chosen})", "ratio"]
    lines = [heads] + [cells + [""] * (len(heads) - len(cells)) for cells in map(_cells, rows)]
    if any(r.beside for r in rows):
        lines = [[*line[:3], cell, *line[3:]] for line, cell in zip(lines, _beside(rows), strict=True)]
    text = "\n".join(align_columns(lines, left={0, 1, 2, lines[0].index("plan")}))
    if explain:
        text += "\n\n" + "\n\n".join(_explained(r) for r in rows)
    return "\n".join([text, "", *_footer(rows, peers), *(_summary(rows) if explain else [])])


def _cells(r: BenchRow) -> list[str]:
    cells = [
        r.model,
        r.test,
        r.precision,
        str(r.batch),
        str(r.threads),
        with_spread(r.samples),
        _part(r.of_limit),
        r.plan,
    ]
    if r.peer and r.ratio is not None:
        theirs = [with_spread(r.peer.samples), _part(r.peer.of_limit), str(r.peer.threads)]
        cells += [*theirs, f"{r.ratio:.3f}"]
    return cells


def _beside(rows: Sequence[BenchRow]) -> list[str]:
    """A column that is there only if it says something."""
    return ["beside", *(str(r.beside) for r in rows)]


def _part(of_limit: float | None) -> str:
    return "-" if of_limit is None else f"{of_limit:.0%}"


def with_spread(samples: Sequence[float], digits: int = 1) -> str:
    """The median, and half of what lies between the best and the worst; one sample has no spread."""
    said = f"{median(samples):.{digits}f}"
    return said if len(samples) < 2 else f"{said} ± {(max(samples) - min(samples)) / 2:.{digits}f}"


def _footer(rows: Sequence[BenchRow], peers: Sequence[PeerResult]) -> list[str]:
    lines = [f"load average: {rows[0].load[0]:.2f} at the start, {rows[-1].load[1]:.2f} at the end"]
    lines += _limits(rows)
    lines += dict.fromkeys(r.text.told for r in rows if r.text)
    if beside := max(r.beside for r in rows):
        lines.append(
            f"beside {beside}: this many other programs each kept a core busy, also in each side's first "
            "run, which does not count; limits are those of a machine that does nothing else"
        )
    if peers:
        repacking = "repacking" if peers[0].repacking else WITHOUT_REPACKING
        lines.append(
            f"{peers[0].name}: {peers[0].version}, flash attention, {repacking}, {CHOSEN[peers[0].chosen]}, "
            "nothing sampled; hetrun: from the request to the token, greedy sampling included"
        )
        lines.append("both in turn, A B B A; numbers: median ± half the range; ratio: median over the pairs")
    return lines


def _limits(rows: Sequence[BenchRow]) -> list[str]:
    """What the shares are of."""
    limits = [limit for r in rows for limit in (r.limit, r.peer.limit if r.peer else None) if limit]
    known = [limit for limit in limits if limit.tok_s]
    by_memory = [limit.memory.text for limit in known if limit.bound == "memory" and limit.memory]
    lines = [f"of limit: {text}" for text in dict.fromkeys(by_memory)]
    by_products = [limit.peak for limit in known if limit.bound == "products" and limit.peak]
    lines += [
        f"of limit: {p.name} multiplies at {p.rate / 1e9:.0f} GFLOP/s with {threads(p.threads)}"
        for p in dict.fromkeys(by_products)
    ]
    if any(limit.estimated for limit in limits):
        lines.append(
            "of limit: estimated, as if the tokens of a step chose their experts independently of each other"
        )
    shares = [part for r in rows for part in (r.of_limit, r.peer.of_limit if r.peer else None)]
    if any(part is not None and part > 1 for part in shares):
        lines.append(ABOVE)
    return lines


def _summary(rows: Sequence[BenchRow]) -> list[str]:
    """In a sentence for each row: what limits it, and what would be faster."""
    found = [(r.test, advice(r.anatomy, r.limit)) for r in rows if r.anatomy]
    lines = [f"{test}: {one.text}" for test, one in found if one]
    load = max((r.load[0] for r in rows), default=0.0)
    if lines and load > BUSY:
        lines.append(
            f"other programs ran as well (load average {load:.2f}): without them it may be otherwise"
        )
    return ["", *lines]


def _explained(r: BenchRow) -> str:
    """Where the time went, the limit, the segments, and what it all comes to."""
    reached = "" if r.of_limit is None else f"; {r.of_limit:.0%} of it was reached"
    lines = [f"{r.test}, batch {r.batch}, bucket {r.bucket}: {r.limit.why}{reached}"]
    if r.anatomy:
        lines += _bars(r.anatomy, 1 if r.anatomy.unit == "step" else r.batch)
    elif r.python_share is not None:
        lines.append(f"Python's share of a step: {r.python_share:.2%}")
    lines += [f"experts: {r.experts.text}"] if r.experts else []
    lines += _segment_lines(_together(r.segments))
    if r.anatomy:
        lines.append(verdict(r.anatomy, r.limit))
    return "\n  ".join(lines)


def _segment_lines(segments: Sequence[SegmentTime]) -> list[str]:
    """What one run of each took, and how much of the time of all of them it was: plans may have changed."""
    cells = [["segment", "backend", "threads", "runs", "ms", "share"]]
    total = sum(s.runs * s.seconds for s in segments)
    for s in segments:
        share = f"{s.runs * s.seconds / total:.0%}" if total else "-"
        ms = f"{1000 * s.seconds:.3f}"
        cells.append([s.segment, s.backend, str(s.threads), str(s.runs), ms, share])
    return align_columns(cells, left={0, 1})


def _bars(anatomy: Anatomy, together: int) -> list[str]:
    """A line for each part of the time: milliseconds, share, and a bar as long as that."""
    unit = f"one {anatomy.unit}" if together == 1 else f"{together} {anatomy.unit}s"
    cells = [[unit, f"{1000 * anatomy.seconds:.3f} ms", "100%", ""]]
    for p in anatomy.parts:
        share = anatomy.share(p.name)
        cells.append([p.name, f"{1000 * p.seconds:.3f} ms", f"{share:.0%}", "█" * round(BAR * share)])
    return align_columns(cells, left={0, 3})


def _together(segments: Sequence[SegmentTime]) -> list[SegmentTime]:
    """Segments that differ by the numbers in their names only, as one, where there are many of them."""
    if len(segments) <= MANY:
        return list(segments)
    found: dict[tuple[str, str, int], list[SegmentTime]] = {}
    for s in segments:
        found.setdefault((re.sub(r"\d+", "N", s.segment), s.backend, s.threads), []).append(s)
    return [
        members[0]
        if len(members) == 1
        else SegmentTime(
            f"{name} ({len(members)} of them)",
            backend,
            threads,
            max(m.runs for m in members),
            sum(m.seconds for m in members),
        )
        for (name, backend, threads), members in found.items()
    ]
