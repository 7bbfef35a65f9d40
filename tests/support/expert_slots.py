"""Mixtures that are small, and whose experts have slots all the same: as many as a test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from hetrun.api.local_model import LocalModel
from hetrun.executor.loading.load_plan import LoadPlan, LoadPlanner
from hetrun.prefetch import cached_experts
from hetrun.prefetch.expert_cache import ExpertCache
from hetrun.prefetch.expert_records import Records
from tests.support.streamed import Disk

OPTIONS: dict[str, Any] = {"backends": ["llamacpp"], "planner": "static", "ctx": 256, "spec": "off"}


class NoSlots(Exception):
    """Experts of this mixture cannot have slots."""


def decide(deciding: LoadPlanner) -> LoadPlan:
    """What is decided where experts do not fit: so small a model would fit anywhere."""
    found = deciding._experts.plan("llamacpp")
    if found is None:
        raise NoSlots("own products do not multiply by its experts")
    return deciding._assemble(found)


@contextmanager
def opened(path: Path, share: float, disk: Disk | None = None, **options: Any) -> Iterator[LocalModel]:  # noqa: ANN401
    """A model of whose experts such a share has slots."""
    cache = partial(ExpertCache, read=disk.function if disk else None)

    def divided(records: Records, room: int, worth: object = None) -> list[int]:
        least = cached_experts.least_slots(records)
        return [max(n, int(share * count)) for n, count in zip(least, records.counts, strict=True)]

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(cached_experts, "divided", divided))
        patched.enter_context(mock.patch.object(cached_experts, "ExpertCache", cache))
        patched.enter_context(mock.patch.object(LoadPlanner, "decide", decide))
        yield patched.enter_context(LocalModel(path, **OPTIONS | options))
