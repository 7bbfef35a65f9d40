"""`hetrun plan` and `devices`: what is, without loading a model."""

from __future__ import annotations

import json
from typing import Any

from hetrun import registry
from hetrun.backend import Available, Descriptor
from hetrun.config import Settings
from hetrun.coresets import core_sets, in_ranges, to_text
from hetrun.llm import make_plan
from hetrun.replies import cores_of, plan_json
from hetrun.topology import this_machine
from hetrun.visible import visible


def print_plan(settings: Settings, as_json: bool) -> None:
    """The plan for the settings' model."""
    plans = make_plan(settings)
    if as_json:
        print(json.dumps(plan_json(plans), indent=1))
        return
    some = cores_of(plans)
    print(visible(plans.to_text()))
    for n in sorted(some):
        print(f"{n} threads: {some[n].name}, CPU {in_ranges(some[n].cpus)}")


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
