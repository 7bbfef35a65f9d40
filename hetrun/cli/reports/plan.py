"""`hetrun plan` and `devices`: what is, without loading a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hetrun.api.local_model import make_plan
from hetrun.backend import Available, Descriptor, registry
from hetrun.cli import options
from hetrun.cli.exit_codes import OUR_FAULT
from hetrun.cli.output import in_json
from hetrun.cli.progress import Row, loading, rows
from hetrun.config import Settings
from hetrun.engine.query_handlers import cores_of, plan_json
from hetrun.errors import BackendUnavailable, OptionError
from hetrun.option_types import names
from hetrun.system.core_sets import core_sets, in_ranges, to_text
from hetrun.system.cpu_topology import this_machine
from hetrun.system.terminal_text import visible
from hetrun.system.units import counted

REFERENCE = "reference"


def print_plan(settings: Settings, as_json: bool) -> None:
    """The plan for the settings' model."""
    from hetrun.tools.outlook import with_outlook

    with loading("measuring memory and products") as tell:
        plans = with_outlook(make_plan(settings), settings, tell)
    if as_json:
        print(json.dumps(plan_json(plans), indent=1))
        return
    some = cores_of(plans)
    print(visible(plans.to_text()))
    for n in sorted(some):
        print(f"{counted(n, 'thread')}: {some[n].name}, CPU {in_ranges(some[n].cpus)}")


def of_devices(measure: bool, conformance: bool, chosen: Sequence[str], as_json: bool) -> int:
    """One of the two reports below; the exit code."""
    if not conformance:
        options.refuse_without("--conformance", {"--backend": chosen})
        print_devices(measure, as_json)
        return 0
    if measure:
        raise OptionError("--measure and --conformance are both given: take one of them")
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
        found = conformance(some, draw and (lambda done, total, kind: draw(Row(done, total, kind))))
    print(in_json(to_json(found), indent=1) if as_json else to_text(found))
    return 0 if found.ok else OUR_FAULT


def print_devices(measure: bool, as_json: bool) -> None:
    """Every backend, available or not; and what its products reach, if that shall be measured."""
    rows: list[dict[str, Any]] = []
    for name, descriptor in registry.backends().items():
        probe = descriptor.probe()
        ok = isinstance(probe, Available)
        detail = probe.detail if isinstance(probe, Available) else probe.reason
        row: dict[str, Any] = {
            "backend": name,
            "available": ok,
            "detail": detail,
            "summary": descriptor.summary,
        }
        if measure and ok and not descriptor.way_of and not descriptor.whole:
            row["peaks"] = _peaks(descriptor)
        rows.append(row)
    tree = this_machine()
    sets = core_sets(tree)
    if as_json:
        cores = tree.to_json() | {"sets": [s.to_json() for s in sets]}
        print(json.dumps({"backends": rows, "cores": cores}, indent=1))
        return
    for row in rows:
        print(f"{row['backend']:<10} {'yes' if row['available'] else 'no ':<4} {row['detail']}")
        print(f"{'':<15} {row['summary']}")
        for kind, rate in row.get("peaks", {}).items():
            print(f"{'':<15} {kind} products: {rate / 1e9:,.0f} G operations/s, measured now")
    print("", *to_text(tree, sets), sep="\n")


def _peaks(descriptor: Descriptor) -> dict[str, float]:
    """What products reach; nothing for a backend that does not measure them."""
    backend = descriptor.create()
    try:
        return dict(backend.peaks())
    finally:
        backend.close()
