"""Lines that a server writes on standard error."""

from __future__ import annotations

from typing import IO


def next_line(log: IO[str]) -> str:
    """The next one that isn't about how long loading takes, which is said on a busy machine only."""
    while "is being loaded" in (line := log.readline()):
        pass
    return line
