"""What an injector counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Count:
    """What a stretch of code called."""

    calls: int = 0
    site: str = ""  # where the first call came from that failed
