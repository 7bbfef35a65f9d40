"""Named things, found through entry points and imported on use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, distributions

from hetrun.backend import Descriptor, Unavailable
from hetrun.errors import BackendUnavailable, OptionError

_added: dict[str, Descriptor] = {}


@cache
def _points() -> Mapping[tuple[str, str], EntryPoint]:
    """Every entry point of ours, by group and name: looking through all packages takes milliseconds, so once."""
    points = (p for d in distributions() for p in d.entry_points if p.group.startswith("hetrun."))
    return {(p.group.removeprefix("hetrun."), p.name): p for p in points}


def named(group: str, name: str) -> object | None:
    """What a package registered under that name, imported now."""
    point = _points().get((group, name))
    return point.load() if point else None


def register(descriptor: Descriptor) -> Callable[[], None]:
    """Add a backend without an entry point; the result takes it away again."""
    _added[descriptor.name] = descriptor

    def unregister() -> None:
        _added.pop(descriptor.name, None)

    return unregister


def backends() -> dict[str, Descriptor]:
    """Every backend that is known, available or not, the most wanted first."""
    found = {name: point.load() for (group, name), point in _points().items() if group == "backends"} | _added
    return dict(sorted(found.items(), key=lambda item: (-item[1].preference, item[0])))


def choose(names: list[str] | None) -> list[str]:
    """The backends to use, in order: those asked for, which must all work, or all that work here."""
    known = backends()
    for name in names or []:
        if name not in known:
            raise OptionError(f"there is no backend {name!r}; there are {', '.join(known)}")
        probe = known[name].probe()
        if isinstance(probe, Unavailable):
            raise BackendUnavailable(f"the backend {name} cannot work here: {probe.reason}")
    if names:
        return [name for name in known if name in names]
    return [name for name, d in known.items() if not isinstance(d.probe(), Unavailable)]
