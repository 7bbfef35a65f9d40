"""One process that tries models, for all tests that want one: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.pool import Child


@pytest.fixture(scope="session")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """It is replaced when it dies."""
    found = Child(tmp_path_factory.mktemp("child"))
    yield found
    found.close()
