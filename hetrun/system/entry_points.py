"""What packages registered for hetrun under names: found without importing anything, loaded on use.

A package says with an entry point of the group `hetrun.api` for which version of hetrun's interface it was
written. What is for another one, or raises when it is loaded, is left out: that is said once, and hetrun runs
on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from hetrun.errors import HetrunError, PluginError, printable

if TYPE_CHECKING:  # it takes a while
    from importlib.metadata import Distribution, EntryPoint

log = logging.getLogger(__name__)

# The version of everything that docs/plugins.md lists. It grows when something there is taken away or means
# something else; what is only added changes nothing for who was there before.
API = 2
OURS = "hetrun"
SAYS_API = "api"  # the group in which a package says which version it is for
# What a module may raise when it is imported. One that leaves the process is no better than one that fails.
FAILURES = (Exception, SystemExit)


@dataclass(frozen=True, slots=True)
class PluginPoint:
    """One name that a package registered in a group."""

    group: str
    name: str
    package: str  # the installed package, as pip lists it
    version: str
    entry: EntryPoint = field(compare=False)
    apis: tuple[str, ...] = ()  # the versions that it says it is for

    @property
    def is_ours(self) -> bool:
        """Whether it came with hetrun."""
        return self.package == OURS

    @property
    def whose(self) -> str:
        """The package, for people."""
        return f"{self.package} {self.version}"

    @property
    def fault(self) -> str:
        """Why it cannot be used, as far as that is known without importing it."""
        if self.is_ours or str(API) in self.apis:
            return ""
        if not self.apis:
            return (
                f"it does not say which version of hetrun's interface it was written for (this is {API}): "
                f'its pyproject.toml needs [project.entry-points."hetrun.{SAYS_API}"]'
            )
        older = all(said.isdecimal() and int(said) < API for said in self.apis)
        mend = f"get a newer {self.package}" if older else "get a newer hetrun"
        versions = ", ".join(self.apis)
        return f"it was written for version {versions} of hetrun's interface, but this is {API}: {mend}"


# What one of a group is, for people.
KINDS: Mapping[str, str] = {
    "backends": "the backend",
    "models": "the architecture",
    "samplers": "the sampler",
    "planners": "the planner",
    "stores": "the store",
    "sources": "the reader of files",
    "workers": "the workers",
    "plugins": "the plugin",
}

_left_out: dict[PluginPoint, str] = {}


@cache
def _points() -> Mapping[tuple[str, str], PluginPoint]:
    """All of them by group and name. Looking through all packages takes milliseconds."""
    found: dict[tuple[str, str], PluginPoint] = {}
    for point in sorted(_all(), key=lambda p: (not p.is_ours, p.package)):
        first = found.setdefault((point.group, point.name), point)
        if first.package != point.package:
            leave_out(point, f"{first.whose} already has that name")
    return found


def _all() -> Iterable[PluginPoint]:
    from importlib.metadata import distributions

    for distribution in distributions():
        try:
            mine = [e for e in distribution.entry_points if e.group.startswith(f"{OURS}.")]
            if mine:
                yield from _points_of(distribution, mine)
        except FAILURES as e:  # what lies on Python's path may be anything, such as half of a package
            log.debug("what %r registered cannot be read: %s", distribution, in_words(e))


def _points_of(distribution: Distribution, mine: Sequence[EntryPoint]) -> Iterable[PluginPoint]:
    package, version = str(distribution.metadata["Name"]), str(distribution.version)
    groups = [(e.group.removeprefix(f"{OURS}."), e) for e in mine]
    apis = tuple(sorted(e.name for group, e in groups if group == SAYS_API))
    for group, entry in groups:
        if group != SAYS_API:
            yield PluginPoint(group, entry.name, package, version, entry, apis)


def points(group: str) -> Mapping[str, PluginPoint]:
    """What is registered in a group, by name, whether it can be used or not."""
    return {name: point for (g, name), point in _points().items() if g == group}


def find(group: str, name: str) -> PluginPoint | None:
    """What is registered under a name."""
    return _points().get((group, name))


def load(point: PluginPoint) -> object:
    """The object itself, imported now. PluginError: it is left out."""
    if why := _left_out.get(point) or point.fault:
        raise leave_out(point, why)
    try:
        return point.entry.load()
    except FAILURES as e:
        raise leave_out(point, f"{point.entry.value} cannot be imported: {in_words(e)}", e) from e


def named(group: str, name: str) -> object | None:
    """What a package registered under that name, imported now; None: nothing. PluginError: left out."""
    point = find(group, name)
    return load(point) if point else None


def leave_out(point: PluginPoint, why: str, cause: BaseException | None = None) -> PluginError:
    """Do without it from now on, and say so once; the error to raise where nothing else will do."""
    error = PluginError(f"{KINDS.get(point.group, point.group)} {point.name}", point.whose, why)
    if point not in _left_out:
        log.warning("%s", error, exc_info=cause if log.isEnabledFor(logging.DEBUG) else None)
    _left_out[point] = why
    return error


@contextmanager
def blamed(fault: Callable[[BaseException], HetrunError]) -> Iterator[None]:
    """Around a stranger's function: what it raises that is not for people becomes a fault that names it."""
    try:
        yield
    except HetrunError:
        raise
    except FAILURES as e:
        raise fault(e) from e


def left_out() -> Mapping[PluginPoint, str]:
    """What was left out so far, and why."""
    return dict(_left_out)


def everything() -> Sequence[PluginPoint]:
    """All that packages registered, hetrun's own as well."""
    return list(_points().values())


def in_words(error: BaseException) -> str:
    """A stranger's exception as one line of text."""
    try:
        said = printable(str(error))[:300]
    except FAILURES:  # even its text may be code that fails
        said = ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
