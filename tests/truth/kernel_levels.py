"""Own kernels held to some of this CPU's instructions, or left out as on a machine without a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from hetrun.backends.llamacpp import backend
from hetrun.backends.llamacpp.kernels import kernels
from hetrun.backends.llamacpp.kernels.delta_net import delta_nets
from hetrun.backends.llamacpp.kernels.matmul import LEVELS, library

OFF = "off"
# Of attention and of states, by those of products: 0 portable, 1 AVX2, 2 AVX-512. On arm64 they have one.
VECTORS = {"portable": 0, "AVX2": 1, "AVX-VNNI": 1, "AVX-512 VNNI": 2, "AMX": 2, "dotprod": 0}


def levels() -> list[str]:
    """What can be forced here: without own kernels, and each set of instructions."""
    found = library()
    return [OFF, *(LEVELS[level] for level in found.levels)] if found else [OFF]


def column(level: str) -> str:
    """What its column is called."""
    return f"kernels-{level.lower().replace(' ', '-')}"


@contextmanager
def forced(level: str) -> Iterator[None]:
    """Backends that are made meanwhile use nothing better."""
    with ExitStack() as stack:
        if level == OFF:
            for name in ("kernels", "delta_nets", "products", "sorter"):
                stack.enter_context(mock.patch.object(backend, name, return_value=None))
        else:
            stack.enter_context(mock.patch.object(backend, "products", library))  # also where ggml is faster
            products, vectors = library(), [lib for lib in (kernels(), delta_nets()) if lib]
            stack.enter_context(mock.patch.object(products, "level", LEVELS.index(level)))
            for lib in vectors:
                best = min(lib.best, VECTORS[level])
                stack.enter_context(mock.patch.object(lib, "level", best))
        yield
