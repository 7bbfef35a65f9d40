"""`hetrun plan` and `devices`: what is, without loading a model."""

from __future__ import annotations

import json

from hetrun import registry
from hetrun.backend import Available
from hetrun.config import Settings
from hetrun.llm import make_plan
from hetrun.visible import visible


def print_plan(settings: Settings, as_json: bool) -> None:
    """The plan for the settings' model."""
    plans = make_plan(settings)
    print(json.dumps(plans.to_json(), indent=1) if as_json else visible(plans.to_text()))


def print_devices(as_json: bool) -> None:
    """Every backend, available or not."""
    rows = []
    for name, descriptor in registry.backends().items():
        probe = descriptor.probe()
        ok = isinstance(probe, Available)
        detail = probe.detail if isinstance(probe, Available) else probe.reason
        rows.append({"backend": name, "available": ok, "detail": detail, "summary": descriptor.summary})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['backend']:<10} {'yes' if row['available'] else 'no ':<4} {row['detail']}")
