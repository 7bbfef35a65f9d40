"""What instructions the kernel says that this CPU has."""

from __future__ import annotations

from functools import cache


@cache
def cpu_flags() -> frozenset[str]:
    """Their names, as Linux writes them; none where it does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    return frozenset(found.partition(":")[2].split())
