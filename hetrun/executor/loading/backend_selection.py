"""Which backends a model may use. Those of other packages are tried before anything stands on them: what they
say of a model's ops, and what they compute."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hetrun.backend import Backend, Descriptor, registry
from hetrun.errors import OptionError, PluginError
from hetrun.graph import Graph
from hetrun.planner.options import Options
from hetrun.system import entry_points

if TYPE_CHECKING:  # few machines have a backend that has to be compared
    from hetrun.backend.conformance.self_test import Kind

log = logging.getLogger(__name__)

MOST_TOLD = 3  # faults of one backend

_passed: set[tuple[str, Kind]] = set()


def create_backends(options: Options, graph: Graph) -> dict[str, Backend]:
    """The backends asked for, or all that work here, the most wanted first."""
    known = registry.backends()
    names = registry.choose(list(options.backends) if options.backends else None, options.precision)
    some = [name for name in names if options.vram != 0 or not known[name].own_memory]
    if not some:
        raise OptionError(
            f"--vram 0 leaves no memory for {' and '.join(names)}; allow more, or other backends"
        )
    made: dict[str, Backend] = {}
    for name in some:
        try:
            made[name] = _asked(name, _created(known[name], options), graph)
        except PluginError:
            if options.backends:
                raise
    # Where none knows passes in which rows see each other, texts run all the same, and pictures are refused.
    if options.whole and any(backend.sees_whole for backend in made.values()):
        for backend in made.values():
            backend.whole = True
    return made


def _created(known: Descriptor, options: Options) -> Backend:
    backend = known.create()
    backend.exact = options.precision == "exact"
    return backend


def _asked(name: str, backend: Backend, graph: Graph) -> Backend:
    """The backend, if it can be asked about a model at all. PluginError: it is a stranger's, and cannot."""
    if (point := registry.stranger(name)) and (why := refusal(backend, graph)):
        raise entry_points.leave_out(point, why)
    return backend


def refusal(backend: Backend, graph: Graph) -> str:
    """Why a backend cannot be asked about the ops of a model; "" where it can."""
    for op in graph.ops:
        try:
            if not backend.supports(op):
                continue
            wanted = backend.wants([op])
            numbers = (backend.resident_bytes(wanted), backend.device_bytes(wanted), backend.rounding(op))
            if min(numbers) < 0 or backend.alike([op]) < 1:
                raise ValueError("a size, an error or a number of rows is too small")
        except entry_points.FAILURES as e:
            return f"asking it about {op.kind} fails: {entry_points.in_words(e)}"
    return ""


def vet(name: str, backend: Backend, graph: Graph) -> None:
    """Compare a stranger's backend with the reference on what a model consists of; each kind of op once in a
    process. It is started, if it was not. PluginError: it does not compute what it says, and is left out."""
    if (point := registry.stranger(name)) is None:
        return
    from hetrun.backend.conformance.self_test import faults, kind_of  # on use: few have such a backend

    kinds = {kind_of(op) for op in graph.ops}
    todo = {kind for kind in kinds if (name, kind) not in _passed}
    if not todo:
        return
    if not backend.started:
        with entry_points.blamed(
            lambda e: entry_points.leave_out(point, f"it does not start: {entry_points.in_words(e)}", e)
        ):
            backend.start()
    if found := faults(backend, todo):
        more = f"; and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else ""
        said = "; ".join(map(str, found[:MOST_TOLD]))
        raise entry_points.leave_out(point, f"its results differ from the reference: {said}{more}")
    _passed.update((name, kind) for kind in todo)
    log.debug("the backend %s of %s agrees with the reference", name, point.whose)
