"""Which backends there are here that take parts of a model."""

from __future__ import annotations

from hetrun.backend import Unavailable, registry


def parts() -> list[str]:
    """Those that take parts of a model."""
    found = [(name, d) for name, d in registry.backends().items() if d.whole is None]
    return [name for name, d in found if not isinstance(d.probe(), Unavailable)]


def backends() -> list[str]:
    """Those that multiply floats as floats; what others round is the subject of test_rounding."""
    return [name for name in parts() if not registry.backends()[name].create().arithmetic]


def rounding() -> list[str]:
    """Those that round floats before they multiply."""
    return [name for name in parts() if name not in backends()]
