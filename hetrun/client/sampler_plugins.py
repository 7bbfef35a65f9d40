"""Samplers from plugins: their names and their parameters.

Apart from `hetrun.sampling`, so that a front knows the parameters without numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from reprlib import repr as short
from typing import TYPE_CHECKING

from hetrun.errors import OptionError, PluginError
from hetrun.system import entry_points

if TYPE_CHECKING:  # numpy comes with them
    from hetrun.sampling.candidates import Rule
    from hetrun.sampling.chain import Setting

GROUP = "samplers"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that a request may give."""

    name: str  # as in a request; on the command line with dashes
    default: float
    least: float
    most: float
    help: str
    off: str = ""  # the value that switches it off, in words: "0: off"
    whole: bool = False

    def check(self, where: str, value: object) -> float:
        """The number; raises an OptionError that calls it `where`."""
        kind = "an integer" if self.whole else "a number"
        if not isinstance(value, bool) and isinstance(value, Real):
            number = float(value)
            if self.least <= number <= self.most and (not self.whole or number.is_integer()):
                return number  # NaN fails every comparison
        said = f"{kind} from {self.least:g} to {self.most:g}" + (f" ({self.off})" if self.off else "")
        raise OptionError(f"{where} must be {said}, not {short(value)}")


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the chain, registered in `hetrun.samplers` under the name that --samplers takes."""

    parameters: tuple[Parameter, ...]
    # The rules for a request; empty if it is switched off. Its numbers are in `setting.params.more`.
    rules: Callable[[Setting], Sequence[Rule]]
    before: str = "temperature"  # its place in the default order


def link(name: str) -> Link | None:
    """The link of that name, or None. Raises PluginError if it is disabled."""
    if (point := entry_points.find(GROUP, name)) is None:
        return None
    found = entry_points.load(point)
    if fault := _fault(found):
        raise entry_points.leave_out(point, fault)
    assert isinstance(found, Link)
    return found


def _fault(found: object) -> str:
    if not isinstance(found, Link):
        return f"it must be a hetrun.client.sampler_plugins.Link, not {short(found)}"
    parameters: Sequence[object] = found.parameters
    for p in parameters:
        if not isinstance(p, Parameter) or not p.name.isidentifier():
            return f"{short(p)} is no Parameter with a name"
        if not all(map(math.isfinite, (p.least, p.default, p.most))) or not p.least <= p.default <= p.most:
            return f"its parameter {p.name} has no default within its limits"
    return ""


def usable() -> Mapping[str, Link]:
    """All links that work, by name."""
    found: dict[str, Link] = {}
    for name in entry_points.points(GROUP):
        try:
            if (one := link(name)) is not None:
                found[name] = one
        except PluginError:  # which has been reported
            continue
    return found


def parameters() -> Mapping[str, Parameter]:
    """The parameters of all links, by name; if two have the same name, the first counts."""
    found: dict[str, Parameter] = {}
    for one in usable().values():
        for p in one.parameters:
            found.setdefault(p.name, p)
    return found


def order(usual: Sequence[str], given: Mapping[str, float]) -> tuple[str, ...]:
    """The default order, with the plugins' links whose parameters a request sets."""
    names = list(usual)
    for name, one in usable().items():
        if any(p.name in given for p in one.parameters):
            names.insert(names.index(one.before) if one.before in names else len(names), name)
    return tuple(names)
