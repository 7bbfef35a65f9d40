"""What the chat asks of the program that started it, which knows models, files and processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetrun.client.interface import ChatClient

Tell = Callable[[int, int, str], object]  # bytes that were brought, of how many, and of what; may raise
Opening = Callable[[], ChatClient]  # begins to load a model


class HostModel(NamedTuple):
    """A model that can be opened."""

    label: str
    path: str
    size: str


@dataclass(frozen=True)
class Doors:
    """None: that cannot be done here."""

    # The engine with these options instead of the command line's; raises if they make no sense. It is called
    # on a thread, for a model may be brought from elsewhere before.
    reopen: Callable[[Mapping[str, object], Tell], Opening] | None = None
    models: Callable[[], Sequence[HostModel]] | None = None
    is_server: bool = False  # of all options the model alone may be another one, of those that are listed
