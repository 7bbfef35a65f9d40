"""A name once in the project (ADR 67): the numbers here may fall, and never rise."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

FOLDERS = ("hetrun", "backends", "models", "tui", "plugins")

# `Wanted`: what the command line chose, for plugins that bring workers; and a message of the sidebar, which
# Textual calls by the name of its widget.
SHARED_NAMES = frozenset({"Wanted"})
PAST_TENSE = frozenset({"saw"})


@cache
def classes() -> list[tuple[Path, ast.ClassDef]]:
    found = []
    linked = {ROOT / "hetrun" / folder for folder in FOLDERS}  # links to these folders, for imports
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if linked & {path, *path.parents}:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found.append((path, node))
    return found


def test_a_class_name_belongs_to_one_module() -> None:
    found: dict[str, set[Path]] = defaultdict(set)
    for path, node in classes():
        found[node.name].add(path)
    assert len(found) > 1000
    assert {name for name, paths in found.items() if len(paths) > 1} == SHARED_NAMES


def test_methods_are_told_what_to_do_and_not_what_happened() -> None:
    named = [
        f"{path.relative_to(ROOT)}: {node.name}.{each.name}"
        for path, node in classes()
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name in PAST_TENSE
    ]
    assert named == []
