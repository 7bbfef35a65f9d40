"""Work beside the screen: Textual's workers, begun by parts that are no widgets."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from textual.screen import Screen
from textual.worker import Worker


def begin_work(
    screen: Screen[None],
    work: Callable[[], Coroutine[Any, Any, None]],
    group: str,
    *,
    exclusive: bool = False,
) -> Worker[None]:
    """A worker of the screen; its failure comes to the screen as a message, and ends nothing."""
    worker: Worker[None] = screen.run_worker(work, group=group, exclusive=exclusive, exit_on_error=False)
    return worker
