"""A stack that is deep enough for what calls itself as deeply as a stranger's text is nested, or long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

# The size holds for every thread that begins, and two who set it at once would restore each other's.
_one = threading.Lock()


def with_stack(nbytes: int, work: Callable[[], T]) -> T:
    """What a function gives on a thread of its own that has so much stack: it is address space only."""
    given: Future[T] = Future()

    def run() -> None:
        try:
            given.set_result(work())
        except BaseException as error:
            given.set_exception(error)

    thread = threading.Thread(target=run, name="hetrun-deep")
    with _one:
        before = threading.stack_size(max(nbytes, 1 << 20) // 4096 * 4096)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return given.result()
