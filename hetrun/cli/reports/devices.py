"""`hetrun devices`: the backends, what their products reach, and whether they compute what they should."""

from __future__ import annotations

import json
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from hetrun.backend import Available, Descriptor, registry
from hetrun.cli import options
from hetrun.cli.exit_codes import OUR_FAULT
from hetrun.cli.output import in_json
from hetrun.cli.progress import ProgressRow, rows
from hetrun.errors import BackendUnavailable, OptionError
from hetrun.executor.autotune.cpu_contention import OtherPrograms
from hetrun.option_types import names
from hetrun.system.core_sets import core_sets, to_text
from hetrun.system.cpu_topology import this_machine

REFERENCE = "reference"
BUSY = 0.25  # cores that other programs keep busy, from which on a measured speed is worth a remark


def of_devices(measure: bool, conformance: bool, chosen: Sequence[str], as_json: bool) -> int:
    """One of the two reports below; the exit code."""
    if not conformance:
        options.refuse_without("--conformance", {"--backend": chosen})
        print_devices(measure, as_json)
        return 0
    if measure:
        raise OptionError("--measure and --conformance are both given: use only one of them")
    return print_conformance(chosen, as_json)


def print_conformance(chosen: Sequence[str], as_json: bool) -> int:
    """What backends compute as the reference does; the exit code."""
    from hetrun.backend.conformance.formatting import to_json, to_text
    from hetrun.backend.conformance.report import conformance, standing

    asked = names(",".join(chosen), "--backend") if chosen else ()
    known = registry.backends()
    if unknown := [name for name in asked if name not in known]:
        raise OptionError(f"there is no backend {unknown[0]!r}; there are {', '.join(known)}")
    for column in [standing(known[name]) for name in asked]:
        if column.standing in ("away", "whole"):
            raise BackendUnavailable(f"the backend {column.backend} cannot be tried: {column.detail}")
    some = [d for name, d in known.items() if not asked or name in (*asked, REFERENCE)]
    with rows("conformance") as draw:
        found = conformance(some, draw and (lambda done, total, kind: draw(ProgressRow(done, total, kind))))
    print(in_json(to_json(found), indent=1) if as_json else to_text(found))
    return 0 if found.ok else OUR_FAULT


def print_devices(measure: bool, as_json: bool) -> None:
    """Every backend, available or not; and what its products reach, if that shall be measured."""
    found = {name: _row(descriptor) for name, descriptor in registry.backends().items()}
    busy = _measure(found) if measure else None
    tree = this_machine()
    sets = core_sets(tree)
    if as_json:
        cores = tree.to_json() | {"sets": [s.to_json() for s in sets]}
        facts: dict[str, Any] = {"backends": list(found.values()), "cores": cores}
        print(json.dumps(facts | ({"others_busy_cores": busy} if measure else {}), indent=1))
        return
    for row in found.values():
        print(f"{row['backend']:<10} {'yes' if row['available'] else 'no ':<4} {row['detail']}")
        print(f"{'':<15} {row['summary']}")
        for kind, rate in row.get("peaks", {}).items():
            print(f"{'':<15} {kind} products: {_in_words(rate)} operations/s, measured now")
    if busy is not None and busy >= BUSY:
        print(
            f"\nother programs kept about {busy:.1f} cores busy: the speeds are lower than on an idle machine"
        )
    print("", *to_text(tree, sets), sep="\n")


def _row(descriptor: Descriptor) -> dict[str, Any]:
    probe = descriptor.probe()
    is_available = isinstance(probe, Available)
    return {
        "backend": descriptor.name,
        "available": is_available,
        "detail": probe.detail if isinstance(probe, Available) else probe.reason,
        "summary": descriptor.summary,
    }


def _measure(found: dict[str, dict[str, Any]]) -> float | None:
    """Put what products reach into the rows; how many cores other programs kept busy, if that is known."""
    known = registry.backends()
    able = [d for name, d in known.items() if found[name]["available"] and not (d.way_of or d.whole)]
    others = OtherPrograms()
    others.look(perf_counter())
    with rows("measuring") as draw:
        for n, descriptor in enumerate(able):
            if draw:
                draw(ProgressRow(n, len(able), descriptor.name))
            found[descriptor.name]["peaks"] = _peaks(descriptor)
    return others.look(perf_counter())


def _in_words(rate: float) -> str:
    """Operations per second."""
    return f"{rate / 1e9:,.0f} G" if rate >= 10e9 else f"{rate / 1e9:.2g} G"


def _peaks(descriptor: Descriptor) -> dict[str, float]:
    """What products reach; nothing for a backend that does not measure them."""
    backend = descriptor.create()
    try:
        return dict(backend.peaks())
    finally:
        backend.close()
