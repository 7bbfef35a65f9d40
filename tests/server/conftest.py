"""An app in front of a scripted engine, and a client that talks to it in process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.server.app import create_app
from tests.support.fakes import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture
async def http(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(LocalClient(engine))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


@pytest.fixture
async def strict(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(LocalClient(engine), strict=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client
