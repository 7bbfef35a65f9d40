"""Move modules by a table, with every import, dotted name and path that names them.

    python scripts/move_modules.py docs/adr/moved.md hetrun/system    # the rows that lead into these folders
    python scripts/move_modules.py TABLE --names                      # definitions that were moved by hand

A module's row is `| old path | new path |`; a definition's is `| name, name | old path | new path |`. The
text of a file is changed in one pass, so that a new name may be another module's old one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

LINKED = ("backends", "models", "tui")  # hetrun/backends is a link to backends/
ROOTS = ("hetrun", "tests")
FACADES = ("hetrun.graph", "hetrun.backend")  # packages that hand on what one of their modules defines
TEXTS = (".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".cfg", ".c", ".h", ".cu", ".cuh", ".in", ".txt", "")
SAID = re.compile(
    r"(?<![\w./-])from ((?:hetrun|tests)(?:\.\w+)*) import (\w+(?:, \w+)*)"
    r"|(?<![\w./-])(?:hetrun|tests)(?:\.[A-Za-z_]\w*)+"
)
PATH = re.compile(r"(?<![\w.-])(?:[\w-]+/)+[\w-]+\.(?:py|c|h)\b")
CELL = re.compile(r"`([^`]+)`")


@dataclass
class Moves:
    """What goes where."""

    files: dict[str, str] = field(default_factory=dict)  # by path
    modules: dict[str, str] = field(default_factory=dict)  # by dotted name
    names: dict[tuple[str, str], str] = field(default_factory=dict)  # (module, name) to module
    known: frozenset[str] = frozenset()  # every module there is


def dotted(path: str) -> str:
    """The name under which a file is imported."""
    first = path.split("/")[0]
    name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return f"hetrun.{name}" if first in LINKED else name


def tracked() -> list[str]:
    """The files of this checkout that are not links."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return [f for f in listed if f and not Path(f).is_symlink() and Path(f).is_file()]


def read(table: Path, folders: list[str]) -> Moves:
    """The rows that are wanted."""
    files = tracked()
    moves = Moves(known=frozenset(dotted(f) for f in files if f.endswith(".py")))
    for line in table.read_text().splitlines():
        cells = [CELL.findall(cell) for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 2 and all(len(c) == 1 for c in cells):
            old, new = cells[0][0], cells[1][0]
            if any(new.startswith(f"{folder}/") or new == folder for folder in folders):
                for file in files:
                    if file == old or (old.endswith("/") and file.startswith(old)):
                        moves.files[file] = new + file[len(old) :] if old.endswith("/") else new
        elif line.startswith("|") and len(cells) == 3 and not folders and all(cells):
            for name in cells[0]:
                moves.names[dotted(cells[1][0]), name] = dotted(cells[2][0])
    moves.files = {old: new for old, new in moves.files.items() if old != new}
    moves.modules = {dotted(a): dotted(b) for a, b in moves.files.items() if a.endswith(".py")}
    return moves


def _spans(text: str) -> list[int]:
    """Where each line begins, in bytes."""
    found = [0]
    for line in text.encode().splitlines(keepends=True):
        found.append(found[-1] + len(line))
    return found


class Rewriter:
    """One Python file."""

    def __init__(self, moves: Moves, me: str, text: str) -> None:
        self._moves, self._me, self._text = moves, me, text
        self._tree = ast.parse(text)
        self._begin = _spans(text)
        self._edits: list[tuple[int, int, str]] = []
        self.notes: list[str] = []

    def run(self) -> str:
        """The file's new text."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ROOTS:
                self._imports(node)
        source, at, found = self._text.encode(), 0, []
        for start, end, new in sorted(set(self._edits)):
            found += [replaced(self._moves, source[at:start].decode()), new]
            at = end
        return "".join([*found, replaced(self._moves, source[at:].decode())])

    def _place(self, line: int, col: int) -> int:
        return self._begin[line - 1] + col

    def _imports(self, node: ast.ImportFrom) -> None:
        module, groups = node.module or "", dict[str, list[str]]()
        start = self._place(node.lineno, node.col_offset)
        end = self._place(node.end_lineno or 0, node.end_col_offset or 0)
        for a in node.names:
            full = f"{module}.{a.name}"
            if full in self._moves.known:
                parent, _, leaf = self._module(full).rpartition(".")
                said = self._renamed(a.name, leaf) if a.asname is None else f"{leaf} as {a.asname}"
                said = leaf if said == f"{leaf} as {leaf}" else said
                groups.setdefault(parent, []).append(said)
            else:
                to = self._moves.names.get((module, a.name)) or self._module(module)
                groups.setdefault(to, []).append(f"{a.name} as {a.asname}" if a.asname else a.name)
        same = list(groups) == [module] and groups[module] == [
            f"{a.name} as {a.asname}" if a.asname else a.name for a in node.names
        ]
        old = self._text.encode()[start:end].decode()
        if same or groups == {}:
            self._edits.append((start, end, old))
            return
        if "#" in old:
            self.notes.append(f"line {node.lineno}: a comment inside an import is lost")
        statements = [
            f"from {to} import ({', '.join(names)})"
            if sum(map(len, names)) > 60
            else f"from {to} import {', '.join(names)}"
            for to, names in groups.items()
        ]
        # What follows on the line (a noqa, a reason) stays with the first name.
        self._edits.append((start, end, ("\n" + " " * node.col_offset).join(reversed(statements))))

    def _module(self, name: str) -> str:
        if name in FACADES and not self._me.startswith(f"{name}."):
            return name
        return self._moves.modules.get(name, name)

    def _renamed(self, old: str, new: str) -> str:
        """An imported module under its new name; under its old one where the new one is taken."""
        if old == new:
            return new
        bound = [n for n in ast.walk(self._tree) if binds(n, old)]
        taken = any(binds(n, new) or (isinstance(n, ast.Name) and n.id == new) for n in ast.walk(self._tree))
        taken |= any(
            isinstance(n, ast.ImportFrom | ast.Import) and any((a.asname or a.name) == new for a in n.names)
            for n in ast.walk(self._tree)
        )
        if bound or taken:
            self.notes.append(f"{old} stays: {'bound again' if bound else f'{new} is taken'}")
            return f"{new} as {old}"
        for n in ast.walk(self._tree):
            if isinstance(n, ast.Name) and n.id == old:
                at = self._place(n.lineno, n.col_offset)
                self._edits.append((at, at + len(old.encode()), new))
        return new


def binds(node: ast.AST, name: str) -> bool:
    """Whether a part of the tree gives something else this name."""
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.arg):
        return node.arg == name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    return False


def replaced(moves: Moves, text: str) -> str:
    """A text with dotted names, imports in quotes and paths of what moved."""

    def name(old: str) -> str:
        parts = old.split(".")
        for n in range(len(parts), 1, -1):
            module = ".".join(parts[:n])
            if n < len(parts) and (new := moves.names.get((module, parts[n]))):
                return ".".join([new, *parts[n:]])
            if module in moves.modules and module not in FACADES:
                return ".".join([moves.modules[module], *parts[n:]])
        return old

    def statement(module: str, names: str) -> str:
        groups = dict[str, list[str]]()
        for said in names.split(", "):
            full = f"{module}.{said}"
            if full in moves.known:
                parent, _, leaf = name(full).rpartition(".")
                groups.setdefault(parent, []).append(said if leaf == said else f"{leaf} as {said}")
            else:
                groups.setdefault(moves.names.get((module, said)) or name(module), []).append(said)
        return "; ".join(f"from {to} import {', '.join(some)}" for to, some in groups.items())

    def path(found: re.Match[str]) -> str:
        for prefix in ("", "hetrun/"):
            if (new := moves.files.get(prefix + found[0])) is not None:
                return new.removeprefix(prefix)
        linked = found[0].removeprefix("hetrun/")
        return f"hetrun/{moves.files[linked]}" if linked in moves.files else found[0]

    text = SAID.sub(lambda found: statement(found[1], found[2]) if found[1] else name(found[0]), text)
    return PATH.sub(path, text)


def main() -> None:
    table, *folders = sys.argv[1:]
    moves = read(Path(table), [] if folders == ["--names"] else folders)
    keep = {table, "scripts/move_modules.py", "CHANGELOG.md"}
    texts: dict[str, str] = {}
    for file in tracked():
        if file in keep or Path(file).suffix not in TEXTS or "docs/adr/moved" in file:
            continue
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if file.endswith(".py"):
            rewriter = Rewriter(moves, moves.modules.get(dotted(file), dotted(file)), text)
            new = rewriter.run()
            for note in rewriter.notes:
                print(f"{file}: {note}", file=sys.stderr)
        else:
            new = replaced(moves, text)
        if new != text:
            texts[file] = new
    for file, text in texts.items():
        Path(file).write_text(text, encoding="utf-8")
    # By way of names of their own: a new path may be another one's old path.
    for old in moves.files:
        Path(old).rename(f"{old}.moving")
    for old, new in moves.files.items():
        Path(new).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{old}.moving").rename(new)
    subprocess.run(["git", "add", "-A", "."], check=True)
    print(f"{len(moves.files)} files moved, {len(texts)} changed")


if __name__ == "__main__":
    main()
