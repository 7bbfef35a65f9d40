"""Tiny models that are not all in memory, or not all on one backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from hetrun.api.local_model import LocalModel
from hetrun.backends.llamacpp.kernels.paging import pager
from hetrun.backends.llamacpp.kernels.sigbus_guard import guard
from hetrun.executor.loading.load_plan import LoadPlan, LoadPlanner
from hetrun.graph import Graph
from hetrun.loader.architectures import build_graph
from hetrun.loader.open_model import open_model
from hetrun.planner.plan import BUCKETS, Placement, PlanSet, make_plans
from hetrun.prefetch.streamed_weights import FromDisk
from tests.support import expert_slots
from tests.support.mapped_models import all_mapped
from tests.support.shares import everywhere, shareable, shared
from tests.support.streamed import made_small, seen
from tests.truth.verdicts import NotApplicable

BACKENDS = ("llamacpp", "reference")


@contextmanager
def streamed(path: Path, share: float, **options: Any) -> Iterator[LocalModel]:  # noqa: ANN401
    """A model of whose weights such a share stays in memory: pieces, or slots for experts of a mixture."""
    if any(op.kind == "moe" for op in build_graph(open_model(path)).ops):
        try:
            with expert_slots.opened(path, share, **options) as llm:
                yield llm
                assert experts_counts(llm), "no expert was read"
        except expert_slots.NoSlots as e:
            raise NotApplicable(str(e)) from None
        return
    with made_small(), ExitStack() as stack:
        stack.enter_context(mock.patch("hetrun.executor.model_weights.FromDisk", sharing(share)))
        stack.enter_context(mock.patch.object(LoadPlanner, "decide", LoadPlanner._not_in_memory))
        llm = stack.enter_context(LocalModel(path, **options))
        yield llm
        found = seen(llm)
        whole = found.locked_bytes + found.streamed_bytes
        assert abs(found.locked_bytes / whole - share) < 0.2, f"{found.locked_bytes} of {whole} bytes stay"
        assert found.bytes_read > found.streamed_bytes, "nothing was read"


def experts_counts(llm: LocalModel) -> int:
    """How often an expert was wanted that had no slot."""
    return int(llm.call(lambda loaded: loaded.model._weights.experts.cache.counts.missed))  # type: ignore[attr-defined]


def sharing(share: float) -> type[FromDisk]:
    """Weights of which such a part stays, whatever else there is memory for."""

    class PartFromDisk(FromDisk):
        def _slack(self, kv_bytes: int = 0) -> int:
            self.look()
            return 0

        def _room(self) -> int:
            return int(share * sum(piece.kept_bytes for piece in self._cut.pieces))

    return PartFromDisk


@contextmanager
def mapped(path: Path, **options: Any) -> Iterator[LocalModel]:  # noqa: ANN401
    """A model whose weights are pages of its file."""
    if not pager() or not guard():
        raise NotApplicable("pages need the library of a C compiler")

    def decide(deciding: LoadPlanner) -> LoadPlan:
        if found := all_mapped(deciding):
            return found
        raise NotApplicable("none of its weights can be mapped")

    with mock.patch.object(LoadPlanner, "decide", decide), LocalModel(path, **options) as llm:
        yield llm
        assert seen(llm).bytes_read > 0, "nothing was read"


@contextmanager
def shared_plan(path: Path) -> Iterator[Path]:
    """A plan in a file by which two backends compute every layer: heads, rows and experts by halves."""
    graph = build_graph(open_model(path))
    plans = PlanSet(make_plans(graph, dict.fromkeys(BUCKETS, (1, halves(graph)))), 512, "a test")
    with TemporaryDirectory(prefix="hetrun-truth-") as folder:
        file = Path(folder) / "plan.json"
        file.write_text(json.dumps(plans.to_json()))
        yield file


def halves(graph: Graph) -> tuple[Placement, ...]:
    """Each scope that has something to share, and none within another; who begins takes turns."""
    out: list[Placement] = []
    found = sorted(shareable(graph), key=lambda s: ("heads", "experts", "rows").index(s[1]))
    for scope, kind, of, _ in found:
        taken = {p.scope for p in out}
        if not any(f"{scope}.".startswith(f"{t}.") or f"{t}.".startswith(f"{scope}.") for t in taken):
            names = BACKENDS[:: 1 if len(taken) % 2 else -1]
            out += shared(scope, kind, [0, of // 2, of], names)
    if not out:
        raise NotApplicable("it has nothing to share out")
    return everywhere(BACKENDS[0], *out)
