"""A world without packages but numpy, pytest and hypothesis: others are not found while it lasts.

What was imported before stays, so only a process that runs nothing else can tell what a test needs.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# With what pytest, hypothesis and their plugins need themselves, some of it when a test fails.
THERE = {
    "hetrun",
    "numpy",
    "pytest",
    "_pytest",
    "hypothesis",
    "pytest_asyncio",
    "random_order",
    "xdist",
    "coverage",
    "execnet",
    "iniconfig",
    "packaging",
    "pluggy",
    "pygments",
    "sortedcontainers",
    "typing_extensions",
}
PACKAGES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))


class _NumpyOnly(PathFinder):
    """Finds what lies anywhere but among the installed packages, and of those the ones that are there."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target)
        if spec is None or fullname.partition(".")[0] in THERE:
            return spec
        places = [spec.origin or "", *(spec.submodule_search_locations or ())]
        return None if any(place.startswith(PACKAGES) for place in places) else spec


@contextmanager
def numpy_only() -> Iterator[None]:
    """Look for packages there, as long as this lasts."""
    before = sys.meta_path[:]
    sys.meta_path[:] = [_NumpyOnly if finder is PathFinder else finder for finder in before]
    try:
        yield
    finally:
        sys.meta_path[:] = before
