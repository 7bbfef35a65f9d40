"""The engine: one thread that owns the model; others send it work through a queue.

This thread makes every native call, always: ggml and torch keep a pool of workers per calling thread
and stop spinning for good once there are more of them than cores.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Callable
from itertools import count
from time import perf_counter
from typing import Any, TypeVar

from hetrun.client.events import CurrentStep, GenerateRequest, OnEvent, Streaming
from hetrun.engine.cancellation import Gate
from hetrun.engine.counters import EngineCounters, RequestTally
from hetrun.engine.inbox import Cancel, Close, Item, Job, SideJob
from hetrun.engine.loaded_model import LoadedModel
from hetrun.engine.loop import Loop
from hetrun.engine.pictures.store import PictureCounts
from hetrun.engine.request import ActiveRequest
from hetrun.errors import DeviceLost, EngineStopped, UserError, system_fault, system_faults

log = logging.getLogger(__name__)

R = TypeVar("R")

CLOSED = "the model was closed; open it again with LLM(...)"


def opened_elsewhere(pid: int) -> UserError:
    """The error for a fork of the process that opened the model."""
    return UserError(
        f"the model was opened in another process (PID {pid}), and a fork of it has no engine: open it here, "
        "after the fork"
    )


class Engine:
    """Starts the thread, gives it work, and stops it."""

    def __init__(
        self, load: Callable[[], LoadedModel], meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """`load` runs on the new thread, and `meanwhile` on this one, which would only wait."""
        self._pid = os.getpid()
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._ids = count(1)
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._loaded: LoadedModel | None = None
        self._gate = Gate()
        self._tally = RequestTally()
        self._loop: Loop | None = None
        self._thread = threading.Thread(target=self._main, args=(load,), name="hetrun-engine", daemon=True)
        try:
            with system_faults("the model's thread was not started"):
                self._thread.start()
            meanwhile()
            self._ready.wait()
        except BaseException:  # Ctrl-C while it loads: the thread ends itself when it comes so far
            self._stop()
            raise
        if self._failed:
            raise self._failed
        # The interpreter must not go away under a native call.
        atexit.register(self.close)

    @property
    def thread_id(self) -> int | None:
        """The thread that makes every native call."""
        return self._thread.ident

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the one that opened the model, without the engine's thread."""
        return os.getpid() != self._pid

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more work."""
        return self._gate.stopped

    def check_here(self) -> None:
        """Raise UserError in a fork of the process that opened the model, where nothing would ever answer."""
        if self.is_elsewhere:
            raise opened_elsewhere(self._pid)

    @property
    def busy(self) -> bool:
        """Whether the model computes now."""
        return self._gate.busy

    @property
    def doing(self) -> CurrentStep | None:
        """What the engine thread is in the middle of; from any thread."""
        return self._gate.doing

    @property
    def streaming(self) -> Streaming | None:
        """What the last passes were like that read weights from disk; from any thread."""
        loaded = self._loaded
        return loaded.model.stats.streaming if loaded else None

    @property
    def held(self) -> EngineCounters:
        """What there is to do, and what was done; from any thread, at once."""
        self.check_here()
        loaded, loop = self._loaded, self._loop
        if loaded is None:
            raise EngineStopped(CLOSED)
        requests = loop.requests.snapshot() if loop else ((), (), ())
        seen = loaded.pictures.counted if loaded.pictures else PictureCounts()
        return EngineCounters(loaded.model, self._tally.counts(loaded.model.stats, seen), *requests)

    def submit(self, request: GenerateRequest, on_event: OnEvent) -> int:
        """Begin a request; `on_event` is called on the engine thread."""
        new = next(self._ids)
        self._put(ActiveRequest(new, request, self._tally.counting(on_event), perf_counter()))
        return new

    def cancel(self, request_id: int) -> None:
        """End a request, also in the middle of a step. One that is over already is left alone."""
        if self.is_elsewhere:  # whose lock may have been held at the fork, and is never released
            return
        with self._gate.lock:
            if not self._gate.stopped:
                self._inbox.put(Cancel(request_id))
                self._gate.cancel(request_id)

    def call(self, work: Callable[[LoadedModel], R], *, aside: bool = False) -> R:
        """Call a function on the engine thread, between two steps, and wait for it.

        `aside`: also while a pass stands aside, because the function does nothing to the model.
        """
        if threading.current_thread() is self._thread and self._loaded:
            return work(self._loaded)  # from inside another call, or from an event
        job = (SideJob if aside else Job)(next(self._ids), work)
        try:
            self._put(job)
            job.done.wait()
        except BaseException:  # Ctrl-C
            job.abandoned = True
            self.cancel(job.id)
            raise
        if job.error:
            raise job.error
        return job.result  # type: ignore[return-value]  # set when there is no error

    def close(self) -> None:
        """Stop; running requests get an error event. A fork leaves the engine of its parent alone."""
        if self.is_elsewhere:
            return
        self._stop()
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, item: Job[Any] | ActiveRequest) -> None:
        self.check_here()
        with self._gate.lock:  # so that nothing comes in after the thread's last look
            if self._gate.stopped:
                raise EngineStopped(CLOSED)
            self._inbox.put(item)

    def _stop(self) -> None:
        with self._gate.lock:
            if not self._gate.stopped:
                self._inbox.put(Close())
                self._gate.stop()

    # --- on the engine thread

    def _main(self, load: Callable[[], LoadedModel]) -> None:
        try:
            loaded = self._loaded = load()
            self._gate.open(loaded.model, loaded.pictures)
        except BaseException as e:
            self._failed = system_fault("the model was not loaded", e) or e
            self._gate.stopped = True
            return
        finally:
            self._ready.set()
        loop = self._loop = Loop(loaded, self._inbox, self._gate)
        try:
            loop.run()
        except DeviceLost as e:
            log.warning("%s", e)
            loop.end(EngineStopped(str(e)))
        except BaseException as e:
            log.exception("the engine failed")
            said = f"the engine failed ({type(e).__name__}: {e}); please report it"
            loop.end(EngineStopped(str(system_fault("the engine ended", e) or said)))
        else:
            loop.requests.keep()
            loop.end(EngineStopped("the model was closed before the answer was complete"))
        finally:
            try:
                loaded.ending()
            except Exception:
                log.exception("closing the model failed")
            # A reference to the engine must not keep the model's memory.
            self._loaded = self._loop = None
            self._gate.release()
            if loaded.pictures:
                loaded.pictures.close()
            loaded.model.close()
            if loaded.speculation:
                loaded.speculation.close()
            if loaded.tokenizer:
                loaded.tokenizer.close()
