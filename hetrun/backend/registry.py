"""Backends by name, and the other things that packages registered: imported on use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from hetrun.backend.interface import Available, Backend, Descriptor, Precision, Probe, Unavailable
from hetrun.backend.picture_encoder import Pictures
from hetrun.errors import BackendUnavailable, OptionError, PluginError
from hetrun.system import entry_points
from hetrun.system.entry_points import FAILURES, PluginPoint, in_words

log = logging.getLogger(__name__)

# A stranger's backend comes behind ours in the fixed order: it runs what it was measured to be faster at, or
# what it was named for. One that wants to run only what no other can says 0, as the reference does.
MOST_WANTED_STRANGER = 40

_added: dict[str, Descriptor] = {}


def register(descriptor: Descriptor) -> Callable[[], None]:
    """Add a backend without an entry point; the result takes it away again."""
    _added[descriptor.name] = descriptor

    def unregister() -> None:
        _added.pop(descriptor.name, None)

    return unregister


def backends() -> dict[str, Descriptor]:
    """Every backend that is known, available or not, the most wanted first; several of one package stay in
    its order."""
    found = {name: _load(point) for name, point in entry_points.points("backends").items()}
    found |= {name: (descriptor,) for name, descriptor in _added.items()}
    ordered = [(-d.preference, name, at, d) for name, some in found.items() for at, d in enumerate(some)]
    return {d.name: d for *_, d in sorted(ordered, key=lambda item: item[:3])}


def backends_of(name: str) -> Sequence[Descriptor]:
    """Those that one package registered under a name, imported now and without the others."""
    return _load(entry_points.points("backends")[name])


def picture_encoder() -> Pictures:
    """What encodes pictures here; BackendUnavailable says why nothing does."""
    reasons = []
    for name, descriptor in backends().items():
        if descriptor.pictures is None:
            continue
        probe = descriptor.probe()
        if isinstance(probe, Available):
            return descriptor.pictures
        reasons.append(f"{name}: {probe.reason}")
    raise BackendUnavailable(
        f"nothing can encode pictures here: {'; '.join(reasons) or 'no backend does it'}"
    )


def stranger(backend: str) -> PluginPoint | None:
    """Who brought a backend that is not hetrun's own: one of that name, or of a number of devices."""
    for name, point in entry_points.points("backends").items():
        if not point.is_ours and (backend == name or backend.startswith(f"{name}-")):
            return point
    return None


def _load(point: PluginPoint) -> Sequence[Descriptor]:
    """A package's backends: one, or what a function says, of which each is a device. One that is broken says
    so when it is asked for."""
    try:
        found = entry_points.load(point)
        many = cast("Callable[[], Sequence[Descriptor]]", found)
        some = [found] if isinstance(found, Descriptor) else list(many())
        return some if point.is_ours else [_guarded(point, d) for d in some]
    except PluginError as e:
        error = e
    except FAILURES as e:
        error = entry_points.leave_out(point, f"{point.entry.value} cannot be used: {in_words(e)}", e)
    broken = Unavailable(str(error))
    return (Descriptor(point.name, lambda: broken, partial(_refuse, point.name, broken), preference=-1),)


def _refuse(name: str, broken: Unavailable) -> Backend:
    raise BackendUnavailable(f"the backend {name} cannot work here: {broken.reason}")


def _guarded(point: PluginPoint, d: object) -> Descriptor:
    """A stranger's: whatever it raises is said of it, and it comes behind ours."""
    if not isinstance(d, Descriptor) or not (d.name == point.name or d.name.startswith(f"{point.name}-")):
        raise TypeError(f"{d!r:.80} is not a Descriptor of {point.name}")

    unclear = Unavailable(f"of {point.whose}: its probe returns neither Available nor Unavailable")

    def probe() -> Probe:
        try:
            found: object = d.probe()
        except FAILURES as e:
            return Unavailable(f"of {point.whose}: its probe fails: {in_words(e)}")
        return found if isinstance(found, Available | Unavailable) else unclear

    def create() -> Backend:
        try:
            made: object = d.create()
        except FAILURES as e:
            raise entry_points.leave_out(point, f"it cannot be created: {in_words(e)}", e) from e
        if not isinstance(made, Backend):
            raise entry_points.leave_out(point, f"it creates {made!r:.80}, which is not a Backend")
        return made

    return replace(d, probe=probe, create=create, preference=min(d.preference, MOST_WANTED_STRANGER))


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
            raise OptionError(
                f"{name} runs whole models and cannot be combined with other backends; name it alone"
            )
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
