"""The import contracts of pyproject.toml: one judge for `lint-imports` and for tests/project."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Import:
    """One module importing another; names are dotted and absolute."""

    importer: str
    imported: str

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}"


def unit(pattern: str, module: str) -> str | None:
    """What `pattern` binds together with `module`: "a.b" is a.b and all within, "a.*" each child of a."""
    depth = pattern.count(".") + 1
    head = ".".join(module.split(".")[:depth])
    if pattern.endswith(".*"):
        return head if head.count(".") == depth - 1 and head.startswith(pattern[:-1]) else None
    return head if head == pattern else None


def covers(patterns: Iterable[str], module: str) -> bool:
    # The bare root stands for hetrun/__init__.py alone: as a pattern it must not cover everything below.
    return any(module == p if "." not in p else unit(p, module) for p in patterns)


@dataclass(frozen=True)
class Rule:
    """One contract: whom it binds, and what those may import."""

    name: str
    modules: tuple[str, ...]
    only: tuple[str, ...] | None = None
    never: tuple[str, ...] = ()
    packages: tuple[str, ...] | None = None
    exceptions: tuple[str, ...] = ()

    def breaks(self, found: Import) -> bool:
        """Whether this import is against the rule, exceptions left aside."""
        own = next((own for p in self.modules if (own := unit(p, found.importer))), None)
        if own is None or covers([own], found.imported):
            return False
        package = found.imported.split(".")[0]
        if package == "hetrun":
            forbidden = covers(self.never, found.imported)
            return forbidden or (self.only is not None and not covers(self.only, found.imported))
        return self.packages is not None and package not in {*self.packages, *sys.stdlib_module_names}

    def excuse(self, found: Import) -> str | None:
        """The exception that allows this import, if there is one."""
        for line in self.exceptions:
            importer, imported = line.split(" -> ")
            if covers([importer], found.importer) and covers([imported], found.imported):
                return line
        return None

    def objections(self, imports: Iterable[Import]) -> list[str]:
        """One sentence per broken import, and one per exception that nothing needs."""
        broken = sorted({found for found in imports if self.breaks(found)}, key=str)
        used = {self.excuse(found) for found in broken}
        said = [f"{found} is against: {self.name}" for found in broken if self.excuse(found) is None]
        return said + [f"exception not needed: {line}" for line in self.exceptions if line not in used]


def rules() -> list[Rule]:
    """The contracts as pyproject.toml states them."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [_rule(c["name"], c) for c in config["tool"]["importlinter"]["contracts"]]


def _rule(name: str, options: dict[str, Any]) -> Rule:
    lists = {key: tuple(value) for key, value in options.items() if isinstance(value, (list, tuple))}
    return Rule(name, **lists)


class ImportsContract(Contract):
    """The contract type of pyproject.toml, as import-linter wants it."""

    type_name = "imports"

    modules = fields.ListField(subfield=fields.StringField())
    only = fields.ListField(subfield=fields.StringField(), required=False)
    never = fields.ListField(subfield=fields.StringField(), required=False)
    packages = fields.ListField(subfield=fields.StringField(), required=False)
    exceptions = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        options = {key: getattr(self, key) for key in ("modules", "only", "never", "packages", "exceptions")}
        said = _rule(self.name, options).objections(
            Import(module, imported)
            for module in graph.modules
            for imported in graph.find_modules_directly_imported_by(module)
        )
        return ContractCheck(kept=not said, metadata={"said": said})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["said"]:
            output.print_error(line)
