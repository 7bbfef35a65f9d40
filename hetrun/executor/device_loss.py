"""A device failed that had its part of the weights: they are read again, and the model goes on without it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from hetrun.backend import Backend
from hetrun.errors import Cancelled, UserError
from hetrun.executor.loading.load_plan import LoadPlan, prepare
from hetrun.executor.loading.memory_estimates import SOON
from hetrun.executor.model_parts import ModelParts
from hetrun.loader.source import ModelSource
from hetrun.memory import breakdown
from hetrun.planner.options import Options

log = logging.getLogger(__name__)


class DeviceLoss:
    """Decides all again without a device. Keys and values stay as they are."""

    def __init__(self, source: ModelSource, options: Options, prepared: LoadPlan, parts: ModelParts) -> None:
        """`prepared`: what was decided when all devices were there."""
        memory = prepared.plans.memory
        of_process = {name: memory[name] for name in memory if name in breakdown.OF_THE_PROCESS}
        self._source = source
        self._options = replace(options, ctx=prepared.context, besides=of_process, mtp="off")
        self._predicts = prepared.block is not None
        self._backends = prepared.backends
        self._parts, self._executor, self._weights = parts, parts.executor, parts.weights

    def recover(self, name: str, error: Exception) -> bool:
        """A backend failed in the middle of a step: whether the others can take the same step."""
        device = self._backends.get(name)
        # A file that cannot be read is no fault of the device, nor is memory that others need.
        if device is None or isinstance(error, Cancelled | UserError):
            return False
        prompts = self._weights.prompt_device
        runs_prompts = prompts is not None and name == prompts.backend
        if not (device.device_bytes(self._weights.wanted.get(name, ())) or runs_prompts):
            return False
        prepared = self._decide_without(name)
        if prepared is None:
            return False
        log.warning("the backend %s is left out, and weights are read again without it: %s", name, error)
        why = f"{name} failed: what it had of the weights comes from disk"
        self._read_again(replace(prepared, plans=replace(prepared.plans, reason=why)))
        return True

    def _decide_without(self, name: str) -> LoadPlan | None:
        """What it had comes from disk from now on: RAM has no room for it. None: that cannot be."""
        others = self._others(name)
        # A block that guesses has its weights there, too.
        if self._executor.stands_still or self._predicts or not others:
            return None
        plans = self._executor.plans
        wishes = replace(self._options.wishes, ubatch=plans.host_ubatch or plans.ubatch, plan=None)
        options = replace(self._options, wishes=wishes, backends=others, ram=self._parts.books.granted.nbytes)
        try:
            return prepare(self._source, options, SOON)
        except UserError as e:
            log.debug("nothing goes on without %s: %s", name, e)
            return None

    def _others(self, name: str) -> tuple[str, ...]:
        """The backends that are left without a device, and without what runs prompts, which may be on it."""
        lost = {name}
        if prompts := self._weights.prompt_device:
            lost |= {prompts.backend}
            if name in (prompts.backend, prompts.device):
                lost |= {prompts.device}
        return tuple(other for other in self._backends if other not in lost)

    def _read_again(self, prepared: LoadPlan) -> None:
        self._give_weights_back()
        self._backends.update(prepared.backends)
        self._weights.store.forget()
        with self._weights.begin(prepared) as undo:
            self._weights.load(prepared, None)
            undo.pop_all()
        self._executor.adopt(prepared.plans)
        self._parts.kv.limit_bytes = prepared.kv_bytes
        self._weights.open(self._executor, None)

    def _give_weights_back(self) -> None:
        """All of them, with the backends that had them."""
        self._parts.tuning.end()
        self._executor.forget_devices()
        self._weights.close()
        close_all(self._backends)
        self._backends.clear()
        self._weights.close_files()
        self._parts.books.forget_weights()


def close_all(backends: Mapping[str, Backend]) -> None:
    """Close backends, also where one fails."""
    for name, backend in backends.items():
        try:
            backend.close()
        except Exception as e:  # a plugin may fail in any way, and the others are closed
            log.warning("the backend %s could not be closed: %s", name, e)
