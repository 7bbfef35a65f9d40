"""The real model: SmolLM2 as it runs in each placement, next to the same file in float32 and to llama.cpp.

The bar is that of tests/e2e/test_quality.py: a mean KL divergence from float32 of at most 1.05 times what
llama.cpp has on the same text. Deterministic runs are asked for the same bits, wherever the weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from hetrun.api.local_model import LocalModel
from hetrun.config import DEMO_PACKAGE, default_model
from hetrun.tools.bench.peer import Peer
from hetrun.tools.evaluate import compare, logits
from tests.models.tiny import F32
from tests.truth.kernel_levels import column, forced, levels
from tests.truth.memory import mapped, streamed
from tests.truth.verdicts import BITS, Bar, Cell, Check, Said, compare as judge

TEXT = Path(__file__).parent.parent / "data" / "technical.txt"
TOKENS = 256
MOST = 1.05  # of llama.cpp's own distance from float32
NAME = "SmolLM2-135M"
OPTIONS: dict[str, Any] = {
    "backends": ["llamacpp"], "planner": "static", "spec": "off", "ctx": TOKENS, "threads": 1,
}  # fmt: skip

Opened = Callable[[], AbstractContextManager[LocalModel]]


@dataclass(frozen=True)
class RealPlacement:
    """How the model is opened; `exactly`: it says what it says in memory, to the last bit."""

    name: str
    opened: Opened
    level: str | None = None
    exactly: bool = False


def absent() -> str:
    """Why it cannot be tried here; nothing where it can."""
    missing = [name for name in (DEMO_PACKAGE, "llama_cpp") if find_spec(name) is None]
    return f"{missing[0]} is not installed" if missing else ""


def placements(path: Path) -> Iterator[RealPlacement]:
    """All that this machine has."""
    options, exactly = OPTIONS, {**OPTIONS, "deterministic": True}
    yield RealPlacement("resident", partial(LocalModel, path, **options))
    yield RealPlacement("chunks", partial(LocalModel, path, **exactly, ubatch=7), exactly=True)
    for share in (30, 50, 80):
        yield RealPlacement(f"disk-{share}", partial(streamed, path, share / 100, **exactly), exactly=True)
    yield RealPlacement("mapped", partial(mapped, path, **options))
    yield RealPlacement("exact", partial(LocalModel, path, **options, precision="exact"))
    for level in levels():
        yield RealPlacement(column(level), partial(LocalModel, path, **options), level)


def text_of(llm: LocalModel) -> list[int]:
    """The first tokens of the text."""
    return llm.tokenize(TEXT.read_text(encoding="utf-8"))[:TOKENS]


def rows_of(llm: LocalModel, tokens: Sequence[int]) -> F32:
    return np.concatenate(list(logits(llm, tokens)))


def cells() -> Iterator[Cell]:
    """The real model's line of the table, cell by cell."""
    path = default_model({})
    with LocalModel(path, backends=["reference"], kv_type="f32", ctx=TOKENS, planner="static") as llm:
        tokens = text_of(llm)
        right = rows_of(llm, tokens)
    with Peer(path) as peer:
        bar = Bar("close", MOST * compare([right], peer.logits(tokens)).mean_kl, gap=inf)
    with LocalModel(path, **OPTIONS, deterministic=True) as llm:
        alone = rows_of(llm, tokens)
    for placement in placements(path):
        start = perf_counter()
        with forced(placement.level) if placement.level else nullcontext(), placement.opened() as llm:
            found = rows_of(llm, tokens)
        checks = [check(f"float32, with llama.cpp's distance {bar.limit / MOST:.2g}", bar, right, found)]
        if placement.exactly:
            checks.append(check("the same file, in memory", BITS, alone, found))
        yield Cell(placement.name, tuple(checks), seconds=perf_counter() - start)


def check(against: str, bar: Bar, right: F32, found: F32) -> Check:
    """A run's logits against others."""
    return judge("as published", against, bar, expected=Said((), right), found=Said((), found))
