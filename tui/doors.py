"""What the chat can have done outside: by whoever started it, and knows models, files and processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetrun.client import ChatClient


class Offered(NamedTuple):
    """A model that can be opened."""

    label: str
    path: str
    size: str


@dataclass(frozen=True)
class Doors:
    """None: that cannot be done here."""

    reopen: Callable[[Mapping[str, object]], ChatClient] | None = None  # with these options changed
    models: Callable[[], Sequence[Offered]] | None = None
