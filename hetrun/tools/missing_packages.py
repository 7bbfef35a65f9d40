"""Packages that hetrun can use and that this Python cannot have, as no wheel of theirs is for it.

What is known beforehand stands in hetrun's own requirements (`python_version < "3.14"`), and what
scripts/install.py met when it made the environment in a file there.
"""

from __future__ import annotations

import json
import operator
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

NOTES = "hetrun-without.json"  # in the environment; scripts/install.py has the same name for it
HERE = sys.version_info[:2]

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
MARKER = re.compile(r"python_version\s*([<>]=?)\s*[\"'](\d+)\.(\d+)[\"']")
NAME = re.compile(r"[A-Za-z0-9._-]+")
EXTRA = re.compile(r"extra\s*==\s*[\"']([\w-]+)[\"']")
# By extra.
LOST = {
    "demo": "no small model comes along (hetrun pull gets one)",
    "amx": "no backend amx",
    "ipex": "no backend amx-ipex",
    "cuda": "no backend cuda",
    "cuda12": "no backend cuda for older drivers",
    "test": "tests that need it are skipped",
}


@dataclass(frozen=True, slots=True)
class MissingPackage:
    """A package that is neither here nor to be had."""

    name: str
    extras: tuple[str, ...]  # which ask for it

    @property
    def module(self) -> str:
        """What the package is imported as, by what nearly all packages do."""
        return self.name.replace("-", "_").lower()

    def to_text(self) -> str:
        lost = "; ".join(LOST[extra] for extra in self.extras if extra in LOST)
        return f"{self.name} has no wheel for Python {HERE[0]}.{HERE[1]}{': ' if lost else ''}{lost}"


def not_to_be_had() -> list[MissingPackage]:
    """Of what the extras of hetrun ask for."""
    try:
        requirements = metadata.requires("hetrun") or []
    except metadata.PackageNotFoundError:
        return []  # a checkout that is not installed
    found = unavailable(requirements, noted(Path(sys.prefix)))
    return [package for package in found if not _is_here(package.name)]


def tell(extras: Iterable[str]) -> None:
    """A line for each that one of these extras asks for: the installation's last words."""
    for package in not_to_be_had():
        if not set(package.extras).isdisjoint(extras):
            print(f"{package.to_text()}.")


def unavailable(
    requirements: Iterable[str], without: Sequence[str], python: tuple[int, int] = HERE
) -> list[MissingPackage]:
    """Those that an extra asks for: excluded wherever they are named, or met as missing at installation."""
    extras: defaultdict[str, list[str]] = defaultdict(list)
    to_be_had = set[str]()
    for requirement in requirements:
        name, extra = NAME.match(requirement), EXTRA.search(requirement)
        if name is None or extra is None:
            continue
        is_out = not _holds(requirement, python)
        if is_out or name[0] in without:
            extras[name[0]].append(extra[1])
        if not is_out:
            to_be_had.add(name[0])
    return [
        MissingPackage(name, tuple(of))
        for name, of in sorted(extras.items())
        if name in without or name not in to_be_had
    ]


def _holds(requirement: str, python: tuple[int, int]) -> bool:
    """Whether the requirement is one for this Python."""
    return all(COMPARE[how](python, (int(a), int(b))) for how, a, b in MARKER.findall(requirement))


def noted(environment: Path) -> list[str]:
    """The names that were left out when this environment was made for this Python."""
    try:
        notes = json.loads((environment / NOTES).read_text(encoding="utf-8"))
        return [str(name) for name in notes["without"]] if notes["python"] == [*HERE] else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _is_here(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
