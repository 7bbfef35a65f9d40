"""A thread that does one thing after the other: what a device that works by itself is made with."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Task:
    """Work of a thread; `wait` hands its error on."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.waited = False

    def run(self) -> None:
        try:
            self._work()
        except BaseException as e:
            self._error = e
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        self.waited = True
        if self._error:
            raise self._error


class DeviceThread:
    """Runs tasks in the order in which they are given."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=f"device-{name}", daemon=True)
        self._thread.start()

    def give(self, task: Task) -> None:
        """Returns at once."""
        self._tasks.put(task)

    def _main(self) -> None:
        while task := self._tasks.get():
            task.run()

    def close(self) -> None:
        """When everything that was given is done."""
        self._tasks.put(None)
        self._thread.join()
