"""The tables in docs/conformance.md: `python -m tests.tools.conformance_docs` writes what is found here.

It takes some minutes: CUDA's kernels are tried on the emulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hetrun.backend import Available, Descriptor, registry
from hetrun.backend.conformance.formatting import blocks
from hetrun.backend.conformance.report import ConformanceReport, conformance, standing
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.kernels import has_compiler

PAGE = Path(__file__).parents[2] / "docs/conformance.md"
BEGIN, END = "<!-- written by: python -m tests.tools.conformance_docs -->\n", "<!-- end -->\n"
EMULATED = Descriptor("cuda (emulated)", lambda: Available("kernels on a CPU"), emulated)

Marks = Mapping[tuple[str, str], str]  # by line and backend


def here() -> Sequence[Descriptor]:
    """hetrun's own backends that can be tried on this machine, the reference at the end."""
    known = registry.backends().items()
    return [d for n, d in known if not registry.stranger(n) and standing(d).standing in ("tried", "oracle")]


def to_markdown(report: ConformanceReport) -> Iterator[str]:
    """The tables as they stand in the page."""
    for block in blocks(report):
        yield ""
        for name, marks in ((block.what, [c.backend for c in block.columns]), *block.lines):
            yield f"| {' | '.join((name, *marks))} |"
            if name == block.what:
                yield "|" + "---|" * (1 + len(marks))
    yield ""


def written() -> Sequence[Marks]:
    """The marks that stand in the page, table by table."""
    tables: list[dict[tuple[str, str], str]] = []
    names: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if first in ("op", "weights"):
            tables.append({})
            names = cells
        elif cells and set(first) != {"-"}:
            tables[-1] |= {(first, name): mark for name, mark in zip(names, cells, strict=True)}
    return tables


def marks(report: ConformanceReport) -> Sequence[Marks]:
    """The same of a report."""
    return [
        {(name, c.backend): mark for name, all_ in b.lines for c, mark in zip(b.columns, all_, strict=True)}
        for b in blocks(report)
    ]


def main() -> None:
    """Write the tables anew."""
    *others, reference = here()
    report = conformance([*others, *[EMULATED] * has_compiler(), reference])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text = "\n".join(to_markdown(report))
    PAGE.write_text(f"{before}{BEGIN}{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
