"""All operations, by name."""

from __future__ import annotations

from tests.faults import gpu_operations, operations
from tests.faults.device_calls import DEVICE_CALLS
from tests.faults.injector import CALLS

MAKERS = operations.MAKERS
GPU_OPERATIONS = frozenset(name for name in MAKERS if MAKERS[name].__module__ == gpu_operations.__name__)
ALL_CALLS = (*CALLS, *DEVICE_CALLS)


def calls_of(name: str, lasting: bool = False) -> tuple[str, ...]:
    """The kinds of calls that can fail in an operation; a client whose connection is never accepted waits,
    whatever a server does."""
    if name in GPU_OPERATIONS:
        return DEVICE_CALLS
    return tuple(call for call in CALLS if not (lasting and call == "accept"))
