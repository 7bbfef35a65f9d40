"""The page at /: what is sent to whom, what a browser may do with it, and the chat in a browser."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.client.interface import ChatClient
from hetrun.client.model_catalog import CatalogModel
from hetrun.client.model_pool import ModelPool
from hetrun.server import listen
from hetrun.server.app import create_app
from hetrun.server.routes import page
from tests.support import chromium
from tests.support.fakes import INFO, FakeEngine

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def app_of(client: ChatClient, key: str | None) -> httpx.AsyncClient:
    app = create_app(client, api_key=key, hosts=("test",))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_browsers_get_a_page_under_a_strict_policy(http: httpx.AsyncClient) -> None:
    answer = await http.get("/", headers=HTML)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == f"'{page.digest(answer.text, 'script')}'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert (await http.head("/", headers=HTML)).status_code == 200


async def test_programs_get_addresses(http: httpx.AsyncClient) -> None:
    answer = await http.get("/", headers={"Accept": "*/*"})
    assert answer.headers["content-type"].startswith("text/plain")
    for what in ("http://test/v1 ", "http://test/openapi.json", "hetrun chat --url http://test"):
        assert what in answer.text


async def test_with_a_key_the_page_may_be_read_and_says_nothing_of_the_models() -> None:
    models = [CatalogModel(name, Path(f"/models/{name}.gguf"), 1) for name in ("alpha", "beta")]
    shelf = ModelPool(models, lambda found, ram: LocalClient(FakeEngine()))
    for key in (None, "sesame"):
        async with app_of(shelf, key) as http:
            plain = (await http.get("/")).text
            assert ("model alpha\nmodel beta" in plain) == (key is None)
            assert (await http.get("/", headers=HTML)).content == page.content()
            assert (await http.get("/v1/models")).status_code == (401 if key else 200)
    await shelf.close()


async def test_it_stands_behind_the_same_checks_of_hosts() -> None:
    engine = FakeEngine()
    async with app_of(LocalClient(engine), None) as http:
        assert (await http.get("/", headers={**HTML, "Host": "evil.example"})).status_code == 421
    engine.close()


async def test_a_page_of_the_server_itself_may_ask_with_the_key_wherever_it_listens() -> None:
    engine = FakeEngine()
    body = {"messages": [{"role": "user", "content": "say hello"}]}
    for key, status in ((None, 403), ("sesame", 200)):
        app = create_app(LocalClient(engine), api_key=key, hosts=None)  # as on 0.0.0.0
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://box:8080") as http:
            for scheme in ("http", "https"):
                headers = {"Origin": f"{scheme}://box:8080", "Authorization": "Bearer sesame"}
                answer = await http.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == status
            others = {"Origin": "http://evil.example", "Authorization": "Bearer sesame"}
            assert (await http.post("/v1/chat/completions", json=body, headers=others)).status_code == 403
    engine.close()


def test_nothing_in_it_is_from_elsewhere_or_made_of_markup() -> None:
    html = page.content().decode()
    assert re.findall(r"https?://(?!\[\^|\\)[a-z0-9.]+", html.replace("https?:\\/\\/", "")) == []
    for name in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        " style=",
        " onclick=",
    ):
        assert name not in html, name
    assert re.findall(r'(?:src|href)="([^"]*)"', html) == [
        *("data:,", "v1/models", "openapi.json", "health", "metrics"),
    ]


# --- in a browser

MARKDOWN = """say ## Head
Some **bold** `code` <img src=x onerror=document.title='bad'> [good](https://example.org)
and [bad](javascript:alert(1))

- one
- two

```html
<script>document.title = "bad"</script>
```
"""


@asynccontextmanager
async def served(client: ChatClient, key: str | None = None) -> AsyncIterator[str]:
    address = listen.ListenAddress(port=0)
    with listen.listening(address) as bound:
        app = create_app(client, hosts=address.hosts(()), api_key=key, reasoning_format="deepseek")
        async with listen.served(app, bound):
            yield listen.url(bound)


@pytest.fixture(scope="module")
def program() -> str:
    if (found := chromium.found()) is None:
        pytest.skip(f"none of {', '.join(chromium.NAMES)} is installed")
    return found


def an_answer_is_shown_and_another_one_stopped(tab: chromium.Page, url: str) -> None:
    tab.open(url)
    tab.until("document.querySelector('#facts').textContent.includes('fake')")
    tab.value(f"document.querySelector('#text').value = {json.dumps(MARKDOWN)}")
    tab.click("#send")
    tab.until("document.querySelector('.turn.assistant .note').textContent.includes('tokens/s')")
    shown = tab.value(
        "[...document.querySelectorAll('.turn.assistant .body *')].map(e => e.tagName).join(' ')"
    )
    assert shown == "H2 P STRONG CODE A BR UL LI LI PRE CODE"
    assert tab.value("document.querySelector('.turn.assistant a').href") == "https://example.org/"
    assert "<img src=x" in tab.value("document.querySelector('.turn.assistant p').textContent")
    assert tab.value("document.title") == "hetrun"

    tab.type("#text", "forever so")
    tab.key("Enter")
    tab.until("document.querySelectorAll('.turn.assistant')[1]?.textContent.includes('so so so')")
    assert tab.value("document.querySelector('#send').hidden")
    tab.click("#stop")
    tab.until("document.querySelectorAll('.turn.assistant .note')[1].textContent === 'stopped'")

    tab.type("#text", "refuse")
    tab.key("Enter")
    tab.until("document.querySelector('.bad:not([hidden])')?.textContent.includes('shorten it')")
    assert tab.value("document.querySelector('#text').value") == "refuse"  # to be changed and sent again


def the_conversation_stays_in_the_tab(tab: chromium.Page, url: str) -> None:
    tab.open(url)  # again
    tab.until("document.querySelectorAll('.turn').length === 6")
    assert tab.value("localStorage.length + document.cookie.length") == 0
    tab.click("#fresh")
    assert tab.value("document.querySelectorAll('.turn').length") == 0
    tab.size(360, 640, dark=True)
    assert tab.value("document.documentElement.scrollWidth") == 360  # nothing is wider than a phone
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"


def the_key_is_asked_for_and_a_model_chosen(tab: chromium.Page, url: str) -> None:
    tab.open(url)
    tab.until("!document.querySelector('#keyrow').hidden")
    tab.type("#key", "sesame")
    tab.value("document.querySelector('#key').dispatchEvent(new Event('change'))")
    tab.until("document.querySelectorAll('#model option').length === 2")
    tab.value("document.querySelector('#model').value = 'small'")
    tab.type("#system", "Be brief.")
    tab.type("#temperature", "0.5")
    tab.type("#text", "say <think>hm</think>well")
    tab.key("Enter")
    tab.until("document.querySelector('.turn.assistant .note')?.textContent.includes('1 token')")
    assert tab.value("document.querySelector('.thoughts').textContent") == "hm"
    assert tab.value("document.querySelector('.turn.assistant .body').textContent") == "well"
    assert not tab.value("document.querySelector('.turn details').open")


@pytest.mark.slow
async def test_a_conversation_in_a_browser(program: str) -> None:
    engine = FakeEngine()
    async with served(LocalClient(engine)) as url:

        def look() -> list[str]:
            with chromium.browser(program) as tab:
                an_answer_is_shown_and_another_one_stopped(tab, url)
                the_conversation_stays_in_the_tab(tab, url)
                return tab.complaints

        complaints = await asyncio.to_thread(look)
    assert [text for text in complaints if "status of 400" not in text] == []  # what was refused
    assert await asyncio.to_thread(engine.idle.wait, 5)
    assert engine.cancelled == [2]  # Stop stops the model
    *_, last = engine.requests[1].messages or ()
    assert [m["role"] for m in engine.requests[1].messages or ()] == ["user", "assistant", "user"]
    assert last["content"] == "forever so"
    engine.close()


@pytest.mark.slow
async def test_a_key_and_several_models_in_a_browser(program: str) -> None:
    engines: dict[str, FakeEngine] = {}

    def start(found: CatalogModel, ram: int | None) -> ChatClient:
        engines[found.name] = fake = FakeEngine()
        fake.info = replace(INFO, path=str(found.path))
        return LocalClient(fake)

    shelf = ModelPool(
        [CatalogModel(n, Path(f"/models/{n}.gguf"), 1 << 20) for n in ("large", "small")], start
    )
    async with served(shelf, "sesame") as url:

        def look() -> list[str]:
            with chromium.browser(program) as tab:
                the_key_is_asked_for_and_a_model_chosen(tab, url)
                return tab.complaints

        complaints = await asyncio.to_thread(look)
    assert [text for text in complaints if "status of 401" not in text] == []
    [request] = engines["small"].requests
    assert (request.messages or ({},))[0].get("content") == "Be brief."
    assert request.params.temperature == 0.5
    assert "large" not in engines
    await shelf.close()
