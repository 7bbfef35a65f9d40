"""Named things, found through entry points and imported on use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, distributions
from types import ModuleType
from typing import cast

from hetrun import quant
from hetrun.backend import Available, Backend, Descriptor, Precision, Unavailable
from hetrun.errors import BackendUnavailable, OptionError
from hetrun.quant.service import Dequantiser

log = logging.getLogger(__name__)

MODELS = "hetrun.models"

_added: dict[str, Descriptor] = {}


@cache
def _points() -> Mapping[tuple[str, str], EntryPoint]:
    """Every entry point of ours, by group and name. Looking through all packages takes milliseconds."""
    points = (p for d in distributions() for p in d.entry_points if p.group.startswith("hetrun."))
    return {(p.group.removeprefix("hetrun."), p.name): p for p in points}


def names() -> Iterable[tuple[str, str]]:
    """Group and name of everything that packages registered."""
    return _points().keys()


def named(group: str, name: str) -> object | None:
    """What a package registered under that name, imported now."""
    point = _points().get((group, name))
    return point.load() if point else None


# Some types of weights are unpacked by whoever registers to.
quant.provide(lambda: cast("Dequantiser | None", named("services", "dequantise")))


def own_model(name: str = "") -> ModuleType:
    """A file of `models/`, or the folder itself; by name, because no core module knows an architecture."""
    return import_module(f"{MODELS}.{name}" if name else MODELS)


def register(descriptor: Descriptor) -> Callable[[], None]:
    """Add a backend without an entry point; the result takes it away again."""
    _added[descriptor.name] = descriptor

    def unregister() -> None:
        _added.pop(descriptor.name, None)

    return unregister


def backends() -> dict[str, Descriptor]:
    """Every backend that is known, available or not, the most wanted first; several of one package stay in
    its order."""
    found = {name: _load(point) for (group, name), point in _points().items() if group == "backends"}
    found |= {name: (descriptor,) for name, descriptor in _added.items()}
    ordered = [(-d.preference, name, at, d) for name, some in found.items() for at, d in enumerate(some)]
    return {d.name: d for *_, d in sorted(ordered, key=lambda item: item[:3])}


def backends_of(package: str) -> Sequence[Descriptor]:
    """Those that one package registered under a name, imported now and without the others."""
    return _load(_points()["backends", package])


def _load(point: EntryPoint) -> Sequence[Descriptor]:
    """A package's backends: one, or what a function says, of which each is a device. One that is broken says
    so when it is asked for."""
    try:
        found = cast(Descriptor | Callable[[], Sequence[Descriptor]], point.load())
        return (found,) if isinstance(found, Descriptor) else found()
    except Exception as e:
        broken = Unavailable(f"{point.value} cannot be imported: {e}")
        log.debug("the backend %s: %s", point.name, broken.reason, exc_info=True)
        return (Descriptor(point.name, lambda: broken, partial(_refuse, point.name, broken), preference=-1),)


def _refuse(name: str, broken: Unavailable) -> Backend:
    raise BackendUnavailable(f"the backend {name} cannot work here: {broken.reason}")


def choose(names: list[str] | None, precision: Precision = "exact") -> list[str]:
    """The backends to use, in order: those asked for, which must all work, or all that work here.

    One that runs models as a whole is only there if it is asked for, alone; one that is fast rather than
    exact only with that precision; and some only by name.
    """
    known = backends()
    if unknown := [name for name in names or [] if name not in known]:
        raise OptionError(f"there is no backend {unknown[0]!r}; there are {', '.join(known)}")
    for name in names or []:
        if known[name].whole and len(set(names or [])) > 1:
            raise OptionError(f"{name} runs models as a whole, not together with others; name it alone")
    chosen = []
    for name, descriptor in known.items():
        asked = name in (names or ())
        if names and not asked and descriptor.way_of not in names:
            continue
        hidden = descriptor.whole or descriptor.by_name
        if not asked and (hidden or (descriptor.precision == "fast" and precision != "fast")):
            continue
        probe = descriptor.probe()
        if isinstance(probe, Available):
            chosen.append(name)
        elif asked:
            raise BackendUnavailable(f"the backend {name} cannot work here: {probe.reason}")
    return chosen
