"""Web pages: none may use the server that was not named, under whatever name it reaches it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.config import Settings
from hetrun.errors import OptionError
from hetrun.server.app import create_app
from hetrun.server.listen import ListenAddress
from hetrun.server.middleware.origin import host_name
from tests.server.test_api import CHAT, asking, error_of
from tests.support.fakes import FakeEngine

PAGE = "https://chat.example:3000"


def app_client(engine: FakeEngine, **options: object) -> httpx.AsyncClient:
    given: dict[str, object] = {"hosts": ["127.0.0.1"], **options}
    transport = httpx.ASGITransport(create_app(LocalClient(engine), **given))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8080")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("localhost.", 200),
        ("box.localhost:1", 200),
        ("127.0.0.1:8080", 200),
        ("127.1.2.3", 200),
        ("[::1]:8080", 200),
        ("my-box:8080", 200),  # allowed by name
        ("evil.example", 421),
        ("evil.example:8080", 421),
        ("localhost.evil.example", 421),
        ("192.168.1.5:8080", 421),
        ("[::1", 200),
        ("", 421),
        ("127.0.0.1.evil.example", 421),
    ],
)
async def test_names_that_lead_here(engine: FakeEngine, host: str, status: int) -> None:
    async with app_client(engine, hosts=["127.0.0.1", "My-Box"]) as http:
        response = await http.post(CHAT, json=asking(), headers={"Host": host})
    assert response.status_code == status
    if status == 421:
        assert error_of(response)["code"] == "wrong_host"
        assert engine.requests == []


async def test_any_name_where_others_decide_who_comes_in(engine: FakeEngine) -> None:
    async with app_client(engine, hosts=None) as http:
        assert (await http.get("/health", headers={"Host": "evil.example"})).status_code == 200


def test_hosts_of_an_address(tmp_path: Path) -> None:
    assert ListenAddress().hosts(["box"]) == frozenset({"127.0.0.1", "box"})
    assert ListenAddress(uds=tmp_path / "socket").hosts([]) is None
    assert ListenAddress("0.0.0.0").hosts([]) is None  # reached from outside, so a key is needed


@pytest.mark.parametrize(
    "origin", [PAGE, "http://localhost:3000", "null", "http://localhost:8080.evil.example"]
)
async def test_pages_that_were_not_named(engine: FakeEngine, origin: str) -> None:
    async with app_client(engine) as http:
        headers = {"Origin": origin}
        response = await http.post(CHAT, json=asking(), headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in response.headers
        preflight = headers | {"Access-Control-Request-Method": "POST"}
        response = await http.options(CHAT, headers=preflight)
        assert response.status_code == 403
    assert engine.requests == []


async def test_a_page_of_our_own_may(engine: FakeEngine) -> None:
    async with app_client(engine) as http:
        response = await http.post(CHAT, json=asking(), headers={"Origin": "http://localhost:8080"})
    assert response.status_code == 200


@pytest.mark.parametrize("named", [PAGE, PAGE.upper() + "/", "*"])
async def test_a_page_that_was_named(engine: FakeEngine, named: str) -> None:
    async with app_client(engine, origins=["https://other.example", named], api_key="secret") as http:
        headers = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        wanted = {"Access-Control-Request-Headers": "authorization, x-stainless-os"}
        response = await http.options(CHAT, headers=headers | wanted)
        assert response.status_code == 204  # no key: browsers send none with it
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
        assert response.headers["vary"] == "Origin"
        odd = {"Access-Control-Request-Headers": "x: y"}
        response = await http.options(CHAT, headers=headers | odd)
        assert "access-control-allow-headers" not in response.headers
        # Errors are for the page, too.
        response = await http.post(CHAT, json=asking(), headers={"Origin": PAGE})
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, PAGE)
        key = {"Authorization": "Bearer secret"}
        response = await http.post(CHAT, json=asking(), headers={"Origin": PAGE, **key})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "retry-after-ms" in response.headers["access-control-expose-headers"]


async def test_programs_are_no_pages(engine: FakeEngine) -> None:
    async with app_client(engine, origins=[PAGE]) as http:
        response = await http.post(CHAT, json=asking())
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("said", "host"),
    [
        ("a:80", "a"),
        ("a", "a"),
        ("[::1]:80", "::1"),
        ("A.B.", "a.b"),
        ("a:b", "a:b"),
        (":80", ":80"),
    ],
)
def test_the_host_of_a_header(said: str, host: str) -> None:
    assert host_name(said) == host


@pytest.mark.parametrize("origin", ["example.com", "https://", "https://a/b", "https://u@a", "https://a b"])
def test_origins_are_checked_when_they_are_given(origin: str) -> None:
    with pytest.raises(OptionError, match="a scheme and a host"):
        Settings.resolve(environ={}, cors_origins=[origin])
    assert Settings.resolve(environ={}, cors_origins=[PAGE, "*"]).cors_origins == (PAGE, "*")
    assert Settings.resolve(environ={}, cors_origins="localhost").cors_origins == ("localhost",)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("https://LOCALHOST", 200),
        ("http://127.0.0.1:5173", 200),
        ("http://[::1]:1", 200),
        ("http://localhost.evil.example", 403),
        ("http://evil.example:3000", 403),
        ("http://127.0.0.1.evil.example", 403),
        ("http://localhost:3000@evil.example", 403),
        ("http://user@localhost:3000", 403),
        ("http://localhost:x", 403),
        ("file://localhost", 403),
        ("null", 403),
    ],
)
async def test_pages_on_any_port_of_this_machine(engine: FakeEngine, origin: str, status: int) -> None:
    async with app_client(engine, origins=("localhost",)) as http:
        headers = {"Origin": origin}
        response = await http.post(CHAT, json=asking(), headers=headers)
        assert response.status_code == status
        preflight = headers | {"Access-Control-Request-Method": "POST"}
        answer = await http.options(CHAT, headers=preflight)
        assert answer.status_code == (204 if status == 200 else 403)
        for found in (response, answer):
            assert found.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
