"""A backend for hetrun: float32 products of weights that ggml has no wide kernels for, compiled by numba."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version

from hetrun.backend import Available, Backend, Descriptor, Probe, Unavailable

INSTALL = "pip install numba"


def probe() -> Probe:
    """Whether numba is installed; it stays unloaded."""
    if importlib.util.find_spec("numba") is None:
        return Unavailable(f"numba is not installed: {INSTALL}")
    try:
        found = version("numba")
    except PackageNotFoundError:
        return Unavailable(f"numba is there, but was not installed as a package: {INSTALL}")
    return Available(f"numba {found}, float32")


def create() -> Backend:
    """A device; numba is imported when it starts."""
    from hetrun_numba.device import NumbaBackend

    return NumbaBackend()


descriptor = Descriptor(
    "numba",
    probe,
    create,
    "numba: float32 products of types that ggml has no wide kernels for",
    preference=40,
)
