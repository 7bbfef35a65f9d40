"""What an event costs on its way from the engine to a reader of `stream()`: python -m tests.tools.pipe_cost

An engine in a worker gives 16 requests a token every 16 ms, and this process reads them all and does nothing
with them. Every microsecond of either process is taken from a model that computes on the same cores.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from hetrun.client.engine_client import WorkerClient
from hetrun.client.events import Event, GenerateRequest, ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings
from tests.support.fakes import INFO

STEP_S = 0.016
CLIENTS = 16


class Steady:
    """Gives every request a token each step, with what a sampler does between two of them."""

    doing = None

    def __init__(self, *, progress: Callable[[float], None], **options: object) -> None:
        self.info: ModelInfo = replace(INFO, load_s=0.0)
        self._orders: queue.SimpleQueue[tuple[Callable[[Event], None], int]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, request: GenerateRequest, on_event: Callable[[Event], None]) -> int:
        self._orders.put((on_event, request.params.max_tokens or 0))
        return 1

    def cancel(self, request_id: int) -> None: ...

    def close(self) -> None: ...

    def _run(self) -> None:
        running: list[tuple[Callable[[Event], None], int]] = []
        logits = np.random.default_rng(0).standard_normal(49152, np.float32)
        while True:
            time.sleep(STEP_S)
            while not self._orders.empty():
                running.append(self._orders.get())
            for i, (on_event, left) in enumerate(running):
                token = int(logits.argmax())
                on_event(Event("token", " word", token) if left else Event("done", finish_reason="length"))
                running[i] = (on_event, left - 1)
            running = [r for r in running if r[1] >= 0]


async def _read(client: ChatClient, tokens: int) -> int:
    request = GenerateRequest(SamplingParams(max_tokens=tokens), text="x")
    return len([event async for event in client.stream(request)])


def _spent(pid: int) -> dict[str, float]:
    """Seconds of CPU of each thread, by Linux's own count."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return {thread.name: int((thread / "schedstat").read_text().split()[0]) / 1e9 for thread in threads}


async def measure(seconds: float) -> None:
    client = WorkerClient(Settings(), engine="tests.tools.pipe_cost:Steady")
    await client.info()
    pids = {"front": os.getpid(), "worker": client.pid}
    before = {who: _spent(pid) for who, pid in pids.items()}
    events = sum(await asyncio.gather(*(_read(client, int(seconds / STEP_S)) for _ in range(CLIENTS))))
    for who, pid in pids.items():
        each = [(s - before[who].get(thread, 0.0)) / events * 1e6 for thread, s in _spent(pid).items()]
        threads = " + ".join(f"{us:.1f}" for us in sorted(each, reverse=True) if us >= 0.05)
        print(f"{who}: {sum(each):.1f} us an event of {events} (its threads: {threads})")
    await client.close()


if __name__ == "__main__":
    asyncio.run(measure(float(sys.argv[1]) if len(sys.argv) > 1 else 10))
