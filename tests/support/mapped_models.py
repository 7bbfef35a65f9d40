"""Models that are small, and whose weights are pages of their files all the same."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

from hetrun.backend import WeightUse
from hetrun.backends.llamacpp.mapped_weights import MappedPages
from hetrun.executor.loading.load_plan import LoadPlan, LoadPlanner


def mapped(deciding: LoadPlanner) -> LoadPlan | None:
    """What is decided where experts do not fit: so small a model would fit anywhere."""
    return mapped_uses(deciding, ("experts",))


def all_mapped(deciding: LoadPlanner) -> LoadPlan | None:
    """The same of whatever can be mapped; None where nothing can."""
    return mapped_uses(deciding, ("experts", "product"))


def mapped_uses(deciding: LoadPlanner, kinds: Sequence[str]) -> LoadPlan | None:
    """What is decided where weights of these uses do not fit."""
    backend = deciding._placement.backends["llamacpp"]
    whole = backend.resident_bytes
    tables = set[object]()

    def too_large(uses: Sequence[WeightUse]) -> int:
        tables.update(use.weight for use in uses if use.use == "lookup")
        large = [u for u in uses if u.use in kinds and u.weight not in tables and not MappedPages.refusal(u)]
        return whole(uses) + (1 << 50) * bool(large)

    mapping = backend.mapping()
    assert mapping is not None
    with mock.patch.object(mapping, "_resident_bytes", too_large):
        found = deciding._mapped.plan("llamacpp", "a test says so")
        return deciding._assemble(found) if found else None
