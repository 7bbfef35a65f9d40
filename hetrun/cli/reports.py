"""`hetrun plan` and `devices`: what is, without loading a model."""

from __future__ import annotations

import json
from typing import Any

from hetrun import registry
from hetrun.backend import Available, Descriptor
from hetrun.config import Settings
from hetrun.llm import make_plan
from hetrun.visible import visible


def print_plan(settings: Settings, as_json: bool) -> None:
    """The plan for the settings' model."""
    plans = make_plan(settings)
    print(json.dumps(plans.to_json(), indent=1) if as_json else visible(plans.to_text()))


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
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['backend']:<10} {'yes' if row['available'] else 'no ':<4} {row['detail']}")
        for kind, rate in row.get("peaks", {}).items():
            print(f"{'':<15} {kind} products: {rate / 1e9:,.0f} G operations/s, measured now")


def _peaks(descriptor: Descriptor) -> dict[str, float]:
    """What products reach; nothing for a backend that does not measure them."""
    backend = descriptor.create()
    try:
        return dict(backend.peaks())
    finally:
        backend.close()
