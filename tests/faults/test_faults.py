"""Every Nth call of an operation fails: one clear error or the right answer, nothing left behind, and the
next time all is well."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cuda.emulated.kernels import has_compiler
from tests.faults.catalog import GPU_OPERATIONS, MAKERS, calls_of
from tests.faults.injector import build
from tests.faults.models import make
from tests.faults.numbers import chosen
from tests.faults.trial import Wish, attempt, hub, with_hub
from tests.support.tiers import exhaustive

pytestmark = pytest.mark.slow

# Numbers of each kind of call in `make test`; where a run takes a tenth of a second they are fewer.
MOST = {"load": 2, "convert": 4, "batch": 4, "gpu-load": 2, "gpu-decode": 2, "worker": 2}
USUAL = 6
# Those that take ten seconds; the others are for `make test-all`.
QUICK = ("load", "decode", "prefix-save", "prefix-load", "gguf", "folder")
FEW_CALLS = {
    "worker": ("malloc", "new"),  # each that ends it costs the start of another
    "gpu-load": ("gpu-memory", "gpu-copy", "gpu"),
    "gpu-decode": ("gpu-launch", "gpu-wait"),
}


def calls(operation: str) -> tuple[str, ...]:
    """The kinds of calls that fail in it."""
    if operation in GPU_OPERATIONS and not has_compiler():
        pytest.skip("the emulated GPU needs g++")
    return FEW_CALLS.get(operation, calls_of(operation))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """faults.c, built."""
    found, reason = build(tmp_path_factory.mktemp("library"))
    if found is None:
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def hub_url(models: Path) -> Iterator[str]:
    with hub(models) as url:
        yield url


@pytest.mark.parametrize(
    "operation", [name if name in QUICK else pytest.param(name, marks=exhaustive) for name in MAKERS]
)
def test_some_calls_fail(operation: str, library: Path, models: Path, hub_url: str) -> None:
    """The first of each kind, the last two, and some between."""
    wish = Wish(operation, calls(operation), MOST.get(operation, USUAL))
    rows = attempt(wish, models, library, with_hub(hub_url))
    assert any(row.tried for row in rows)
    assert not [f"{row.call}: {fault}" for row in rows for fault in row.faults]


@exhaustive
@pytest.mark.parametrize(
    ("operation", "lasting", "call"),
    [
        (name, lasting, call)
        for name in MAKERS
        for lasting in (False, True)
        for call in calls_of(name, lasting)
    ],
)
def test_every_call_fails(
    operation: str, call: str, lasting: bool, library: Path, models: Path, hub_url: str
) -> None:
    calls(operation)
    (row,) = attempt(Wish(operation, [call], lasting=lasting), models, library, with_hub(hub_url))
    assert row.tried >= row.calls
    assert not row.faults


def test_numbers_are_the_first_the_last_and_ever_fewer_between() -> None:
    assert chosen(0) == []
    assert chosen(5, 5) == [1, 2, 3, 4, 5]
    assert chosen(1000) == list(range(1, 1001))
    few = chosen(1000, 10)
    assert few[:5] == [1, 2, 3, 4, 5]
    assert few[-2:] == [999, 1000]
    assert len(few) <= 10
    gaps = [b - a for a, b in pairwise(few[4:-1])]
    assert gaps == sorted(gaps)
