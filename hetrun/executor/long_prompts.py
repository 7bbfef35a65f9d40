"""Prompts of a model whose weights come from disk: by the host in many passes, or by a device in few.

Which of the two is faster follows from how much each reads and from what its passes took so far. It is
decided
before each prompt, so a device that was slower once, or a disk that others used, is no reason for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hetrun.backend import Floats, Ints
from hetrun.executor.loading.prompt_device import PromptDevice
from hetrun.graph import Graph
from hetrun.loader.table_rows import TableRows
from hetrun.loader.weight_reader import SharedReader
from hetrun.planner.plan import PlanSet
from hetrun.system.estimate import TrackedEstimate

FEWEST = 17  # tokens of a pass that is one of a prompt
GAIN = 1.05  # times as fast as the way of now the other must be
FORGIVING = 0.98  # what is left of the device's delay each time that the host was chosen because of it


class LongPrompts:
    """Chooses for each prompt."""

    def __init__(
        self,
        device: PromptDevice,
        plans: PlanSet,
        graph: Graph,
        on_host: Callable[[int], float],
        disk_rate: Callable[[], float],
    ) -> None:
        """`plans` with those of the device; `on_host`: seconds of a pass of a number of tokens there;
        `disk_rate`: bytes a second."""
        self.device = device
        self._on_host, self._disk_rate = on_host, disk_rate
        self._late = (
            TrackedEstimate()
        )  # how much longer the device's passes take than reading the weights does
        self._gone = False
        self._reader = SharedReader()
        self.read = self._reader.read
        self._rows = TableRows(next(op.weights[0] for op in graph.ops if op.kind == "embed"))
        self._divide(plans)

    def follow(self, plans: PlanSet, now: PlanSet) -> PlanSet:
        """The same choice among the plans in another budget."""
        is_on_device = now is self.with_device
        self._divide(plans)
        return self.with_device if is_on_device else self.by_host

    def _divide(self, plans: PlanSet) -> None:
        at_once = plans.host_ubatch or plans.ubatch
        short = {bucket: plan for bucket, plan in plans.plans.items() if bucket not in self.device.plans}
        self.with_device = plans
        host = plans.plans[next(iter(short))]
        self.by_host = replace(
            plans,
            plans={bucket: short.get(bucket, replace(host, bucket=bucket)) for bucket in plans.plans},
            ubatch=at_once,
            ubatch_why=f"as many as are worthwhile on the host: {self.device.device} would be slower now",
            host_ubatch=at_once,
        )

    def chosen(self, tokens: int, now: PlanSet) -> PlanSet:
        """The plans by which to run `tokens` tokens of prompts."""
        if self._gone:
            return self.by_host
        if tokens < FEWEST:
            return now
        is_on_device = now is self.with_device
        device, host = self.on_device(tokens), self.on_host(tokens)
        faster = device <= host * GAIN if is_on_device else device * GAIN < host
        if not faster and self._late.value > 1:
            self._late.scale(max(FORGIVING, 1 / self._late.value))
        return self.with_device if faster else self.by_host

    def on_device(self, tokens: int) -> float:
        """Seconds of `tokens` tokens there."""
        passes = -(-tokens // self.device.ubatch)
        return passes * (self._late.value or 1.0) * self.device.nbytes / self._disk_rate()

    def on_host(self, tokens: int) -> float:
        """The same on the host."""
        full, rest = divmod(tokens, self.by_host.ubatch)
        seconds = full * self._on_host(self.by_host.ubatch) if full else 0.0
        return seconds + (self._on_host(rest) if rest else 0.0)

    def observe(self, tokens: int, seconds: float) -> None:
        """The device has computed `tokens` tokens in `seconds`."""
        passes = -(-tokens // self.device.ubatch)
        self._late.observe(seconds * self._disk_rate() / (passes * self.device.nbytes))

    def look_up(self, tokens: Ints) -> Floats:
        """The rows of some tokens: the host's own pass, which looks them up, is not run."""
        return self._rows(tokens) * np.float32(self.device.factor)

    def check(self) -> None:
        """Raise if a file is not the one any more that was opened."""
        self._reader.check()

    def close(self) -> None:
        """Close the files; the device reads no more."""
        self._rows.close()
        self._reader.close()

    def give_up(self) -> None:
        """The device has no room for what it would need: the host computes all from now on."""
        self._gone = True
