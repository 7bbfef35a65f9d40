"""Small faults planted in the code, one at a time, to see whether the tests that run the line notice.

    python -m tests.tools.mutants pick --seed 1 --count 60 -o mutants.json
    python -m tests.tools.mutants probe mutants.json       in a clone: marks the places in its sources
    PROBE_HITS=/tmp/hits.tsv .venv/bin/pytest              in that clone: notes which tests pass there
    python -m tests.tools.mutants try mutants.json --hits hits.tsv --results results.jsonl
    python -m tests.tools.mutants report mutants.json --results results.jsonl

`try` changes the sources of the checkout it runs in and puts them back, so it also wants a clone of its own,
with an environment of its own. The first failure ends a mutant. What was tried is not tried again: after
Ctrl-C or a crash the same command goes on. `--marks ''` takes in what only `make test-all` runs.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("hetrun", "backends", "models")
PROBE = ROOT / "hetrun" / "_probe.py"
PROBE_SOURCE = '''"""Written by tests/tools/mutants.py: notes which test reaches a place."""
import os

_PATH, _OWNER, _SEEN = os.environ.get("PROBE_HITS"), os.environ.get("PROBE_OWNER"), set()
if _PATH and not _OWNER:
    os.environ["PROBE_OWNER"] = str(os.getpid())


def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
    if _PATH and test and (number, test) not in _SEEN:
        _SEEN.add((number, test))
        child = _OWNER is not None  # a child process keeps the name of the test that started it
        with open(_PATH, "a") as out:
            out.write(f"{number}\\t{int(child)}\\t{test}\\n")
'''
# A test module with more than this many reaching tests is named as a whole: the command line stays short.
MOST_TESTS = 4000
LIMIT_S = 1500

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "+",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: these bytes of a file replaced by others."""

    number: int
    path: str
    line: int
    start: int
    end: int
    before: str
    after: str


class Sites(ast.NodeVisitor):
    """The expressions in functions that can be made wrong, with what they would become."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[tuple[ast.expr, str]] = []
        self.depth = 0

    def of(self, node: ast.expr) -> str:
        return ast.get_source_segment(self.text, node) or ""

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.depth += 1
        for statement in node.body:  # no annotations, defaults or decorators
            self.visit(statement)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def nothing(self, node: ast.AST) -> None:
        """Texts for people, and what cannot be rewritten in place."""

    visit_JoinedStr = visit_Raise = visit_Assert = visit_MatchValue = visit_MatchMapping = nothing

    def add(self, node: ast.expr, after: str) -> None:
        if self.depth and after:
            self.found.append((node, after))

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            operator = COMPARISONS[type(node.ops[0])]
            self.add(node, f"({self.of(node.left)}) {operator} ({self.of(node.comparators[0])})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        joint = " or " if isinstance(node.op, ast.And) else " and "
        self.add(node, joint.join(f"({self.of(value)})" for value in node.values))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = isinstance(node.left, (ast.Constant, ast.JoinedStr)) and not isinstance(
            getattr(node.left, "value", ""), (int, float)
        )
        if (operator := ARITHMETIC.get(type(node.op))) and not texts:
            self.add(node, f"({self.of(node.left)}) {operator} ({self.of(node.right)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(node, f"bool({self.of(node.operand)})")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self.add(node.test, f"not ({self.of(node.test)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, str(node.value + 1))


def sites(path: Path) -> Iterator[tuple[int, int, int, str, str]]:
    """Line, first and last byte, what is there, and what it becomes."""
    text = path.read_text(encoding="utf-8")
    lines = [0]
    for line in text.encode().split(b"\n"):
        lines.append(lines[-1] + len(line) + 1)
    visitor = Sites(text)
    visitor.visit(ast.parse(text))
    for node, after in visitor.found:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[node.end_lineno - 1] + node.end_col_offset
        yield node.lineno, start, end, visitor.of(node), after


def pick(seed: int, count: int) -> list[Mutant]:
    """Places drawn from all there are, each of them as likely as any other."""
    paths = sorted(p for f in FOLDERS for p in (ROOT / f).rglob("*.py") if not p.is_symlink())
    # Through the links in hetrun/ the same files are seen again.
    real = [p for p in paths if p.resolve() == p]
    everything = [(p.relative_to(ROOT).as_posix(), *site) for p in real for site in sites(p)]
    chosen = random.Random(seed).sample(everything, min(count, len(everything)))
    print(f"{len(chosen)} of {len(everything)} places in {len(real)} files", file=sys.stderr)
    return [Mutant(i, *place) for i, place in enumerate(chosen)]


def read(path: Path) -> list[Mutant]:
    return [Mutant(**row) for row in json.loads(path.read_text())]


def replaced(text: bytes, mutant: Mutant, by: str) -> bytes:
    if text[mutant.start : mutant.end].decode() != mutant.before:
        raise SystemExit(f"{mutant.path}:{mutant.line} is not what it was when the places were picked")
    return text[: mutant.start] + by.encode() + text[mutant.end :]


def probe(mutants: list[Mutant]) -> None:
    """Mark the places in this checkout. Places within places are marked from the last to the first."""
    PROBE.write_text(PROBE_SOURCE)
    by_file: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_file[mutant.path].append(mutant)
    for name, of_file in by_file.items():
        text = (ROOT / name).read_bytes()
        marks = [
            (at, i)
            for m in of_file
            for at, i in (
                (
                    m.start,
                    f"(__import__('hetrun._probe', fromlist=['hit']).hit({m.number}) or (".encode(),
                ),
                (m.end, b"))"),
            )
        ]
        for at, insert in sorted(marks, reverse=True):
            text = text[:at] + insert + text[at:]
        ast.parse(text)
        (ROOT / name).write_bytes(text)


def reaching(hits: Path) -> dict[int, list[str]]:
    """The tests that pass each place. One that only a child process passed is joined by its whole module,
    because a child that a module shares has the name of the first test."""
    tests: dict[int, set[str]] = defaultdict(set)
    for line in hits.read_text().splitlines():
        number, child, test = line.split("\t", 2)
        tests[int(number)].add(test.split("::")[0] if child == "1" else test)
    return {
        number: sorted(t for t in of_it if "::" not in t or t.split("::")[0] not in of_it)
        for number, of_it in tests.items()
    }


def end_what_is_left(mark: str) -> None:
    """Programs that a fault keeps from ending would compute beside the next one: all with this in their
    environment."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it has ended meanwhile, or is another user's
            continue


def attempt(mutant: Mutant, tests: list[str], marks: str) -> tuple[str, float]:
    """What the tests say of a fault: the test that found it, or nothing."""
    path = ROOT / mutant.path
    before = path.read_bytes()
    began = time.monotonic()
    name, value = "MUTANT", f"{os.getpid()}-{mutant.number}"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(tests[:MOST_TESTS]))
        listed.flush()
        select = ["-m", marks] if marks else []
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *select]
        try:
            path.write_bytes(replaced(before, mutant, mutant.after))
            done = subprocess.run(
                [*command, f"@{listed.name}"],
                cwd=ROOT,
                env={**os.environ, name: value},
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return f"still running after {LIMIT_S} s", time.monotonic() - began
        finally:
            path.write_bytes(before)
            end_what_is_left(f"{name}={value}")
    took = time.monotonic() - began
    if done.returncode in (0, 5):  # 5: none of them is chosen by the marks
        return "", took
    if done.returncode == 4:
        raise SystemExit(f"pytest could not begin; are these the hits of this commit?\n{done.stderr[-500:]}")
    named = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return (named or [f"exit {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"])[0][:200], took


def attempt_all(mutants: list[Mutant], hits: Path, results: Path, most: int, marks: str) -> None:
    tried = {row["number"] for row in rows(results)}
    tests = reaching(hits)
    wanted = [m for m in mutants if m.number in tests][:most]
    for mutant in wanted:
        if mutant.number in tried:
            continue
        killed, took = attempt(mutant, tests[mutant.number], marks)
        row = {
            "number": mutant.number,
            "killed_by": killed,
            "tests": len(tests[mutant.number]),
            "s": round(took, 1),
        }
        with results.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(f"{mutant.number:3} {mutant.path}:{mutant.line} {killed or 'LIVES'}", flush=True)


def rows(results: Path) -> list[dict[str, object]]:
    text = results.read_text() if results.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def report(mutants: list[Mutant], results: Path) -> None:
    """A line for each mutant that was tried."""
    by_number = {m.number: m for m in mutants}
    tried = rows(results)
    for row in tried:
        m = by_number[int(str(row["number"]))]
        change = f"{' '.join(m.before.split())[:50]} -> {' '.join(m.after.split())[:50]}"
        print(f"{m.number:3} {m.path}:{m.line}  {change}  {row['killed_by'] or 'LIVES'}")
    print(f"{sum(bool(row['killed_by']) for row in tried)} of {len(tried)} were noticed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant faults and see whether tests notice.")
    commands = parser.add_subparsers(dest="command", required=True)
    picking = commands.add_parser("pick", help="draw places in the code")
    picking.add_argument("--seed", type=int, default=1)
    picking.add_argument("--count", type=int, default=60)
    picking.add_argument("-o", "--output", type=Path, required=True)
    for name, what in (
        ("probe", "mark the places in this checkout"),
        ("try", "plant one fault after the other"),
        ("report", "what became of them"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("mutants", type=Path)
        if name != "probe":
            command.add_argument("--results", type=Path, required=True)
        if name == "try":
            command.add_argument("--hits", type=Path, required=True)
            command.add_argument("--most", type=int, default=40)
            command.add_argument("--marks", default="", help="as pytest's -m")
    options = parser.parse_args()
    match options.command:
        case "pick":
            chosen = [asdict(m) for m in pick(options.seed, options.count)]
            options.output.write_text(json.dumps(chosen, indent=1))
        case "probe":
            probe(read(options.mutants))
        case "try":
            attempt_all(read(options.mutants), options.hits, options.results, options.most, options.marks)
        case "report":
            report(read(options.mutants), options.results)


if __name__ == "__main__":
    main()
