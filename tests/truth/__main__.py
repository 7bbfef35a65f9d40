"""Each architecture in each placement: python -m tests.truth [ARCHITECTURE...] [--placement P...] [--json]

A row is a tiny random model, saved by transformers; a column is where and how hetrun runs it. Rows are called
by architectures (qwen3moe), model types of Hugging Face (qwen3_moe) or as tests call them (qwen3_moe-plain);
SmolLM2-135M is the real model, by its divergence from float32.

    =       the same tokens, and where they are compared the same bits
    =1e-05  the same tokens as transformers or the model in memory; logits are so far apart at most
    ~1e-04  close: the mean KL divergence, under the placement's bar
    -       does not apply; --json says why
    FAILS   anything else, and exit status 1
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from time import perf_counter

import tests.conftest  # noqa: F401 - a home of its own, and one thread
from tests.truth import real
from tests.truth.placements import Placement, columns
from tests.truth.subjects import Subject, named
from tests.truth.table import Line, as_text, downwards


def main() -> int:
    given = parse()
    chosen = [c for c in columns() if not given.placement or c.name in given.placement]
    asked = [name for name in given.architecture if name != real.NAME]
    rows = [] if given.architecture and not asked else list(named(asked))
    lines, start = [], perf_counter()
    for line in run(rows, chosen):
        lines.append(line)
        if given.json:
            print(json.dumps(line.as_json()), flush=True)
    if not given.json and lines:
        print(as_text(lines, chosen))
    if real.NAME in given.architecture or not (given.architecture or given.placement):
        lines += with_the_real_model(given.json)
    if not lines:
        print("there is no such row", file=sys.stderr)
        return 2
    faults = [fault for line in lines for fault in line.faults]
    print(
        "\n".join(faults), f"{len(lines)} models, {perf_counter() - start:.0f} s", sep="\n", file=sys.stderr
    )
    return 1 if faults else 0


def with_the_real_model(as_json: bool) -> list[Line]:
    """Its line; none where it is not here."""
    if reason := real.absent():
        print(f"{real.NAME}: {reason}", file=sys.stderr)
        return []
    line = Line(real.NAME, tuple(real.cells()))
    print(json.dumps(line.as_json()) if as_json else f"\n{downwards(line)}", flush=True)
    return [line]


def parse() -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.truth",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [column.name for column in columns()]
    parser.add_argument("architecture", nargs="*", help="rows; all without")
    parser.add_argument("--placement", nargs="+", choices=names, metavar="P", help=", ".join(names))
    parser.add_argument("--json", action="store_true", help="a line of JSON for each model")
    return parser.parse_args()


def run(rows: Sequence[Subject], chosen: Sequence[Placement]) -> Iterator[Line]:
    """Row by row; what is done is said meanwhile."""
    for i, subject in enumerate(rows, 1):
        start = perf_counter()
        line = Line(str(subject), tuple(column.cell(subject) for column in chosen))
        failed = f", {len(line.faults)} faults" if line.faults else ""
        print(
            f"{i}/{len(rows)} {subject}: {perf_counter() - start:.1f} s{failed}", file=sys.stderr, flush=True
        )
        yield line


if __name__ == "__main__":
    sys.exit(main())
