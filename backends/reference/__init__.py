"""numpy in float32: exact, slow, always there. Everything else is compared with it."""

from __future__ import annotations

from hetrun.backend import Available, Backend, Descriptor, Probe
from hetrun.backend.interpreter import InterpretingBackend


def probe() -> Probe:
    """It works wherever numpy does."""
    import numpy

    return Available(f"numpy {numpy.__version__}, float32")


def create(name: str = "reference") -> Backend:
    """A reference device."""
    from hetrun.backends.reference.ops import TABLE

    made = InterpretingBackend(name, TABLE)
    made.leaves_to_slots = made.sees_whole = True
    return made


descriptor = Descriptor(
    "reference", probe, create, "numpy: exact and slow; the other backends are compared with it", preference=0
)
