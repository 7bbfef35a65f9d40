"""The page at /: what it is made of, who gets it, and the chat in it, in a browser where there is one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.client.interface import ChatClient
from hetrun.client.model_catalog import Found
from hetrun.client.model_pool import Shelf
from hetrun.server import listen
from hetrun.server.app import create_app
from hetrun.server.routes.page import PAGE, policy
from tests.support.browser import Page, browser, executable
from tests.support.fakes import INFO, FakeEngine

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
HOSTS = ["127.0.0.1"]
MARKUP = "<img/src=x/onerror=document.title='gone'><b>bold</b>"


class Parts(HTMLParser):
    """What a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def parts() -> list[tuple[str, dict[str, str | None]]]:
    parser = Parts()
    parser.feed(PAGE.read_text())
    return parser.found


# --- without a browser


async def test_browsers_get_the_page_and_programs_two_lines(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers=BROWSER)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.content == PAGE.read_bytes()
    words = await http.get("/")
    assert (words.status_code, words.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert len(words.text.splitlines()) == 2
    for address in ("/v1", "/openapi.json", "/health", "/metrics"):
        assert address in words.text
    for response in (page, words):
        assert response.headers["vary"] == "Accept"
        assert response.headers["x-content-type-options"] == "nosniff"


async def test_only_the_page_itself_may_run(http: httpx.AsyncClient) -> None:
    said = (await http.get("/", headers=BROWSER)).headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in said.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules[kind])
    changed = PAGE.read_text().replace('"use strict";', '"use strict"; ')
    assert policy(changed) != said


def test_it_needs_nothing_from_elsewhere() -> None:
    text = PAGE.read_text()
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text, re.IGNORECASE)
    for tag, attributes in parts():
        assert "style" not in attributes, tag  # the policy would refuse it
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "action"):
            value = attributes.get(name)
            assert value is None or re.fullmatch(r"[a-z0-9./]+|data:,", value), (tag, value)
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
        assert unsafe not in text


def test_every_field_has_a_name_for_those_who_hear_the_page() -> None:
    text = PAGE.read_text()
    for tag, attributes in parts():
        if tag in ("input", "textarea", "select"):
            labelled = re.search(rf'<label[^>]*>[^<]*<{tag} id="{attributes["id"]}"', text)
            named = f'<label for="{attributes["id"]}">' in text
            assert labelled or named or attributes.get("aria-label"), attributes


async def test_with_a_key_the_page_is_open_and_nothing_else_is(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(LocalClient(engine), api_key="secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://192.168.1.5:8080") as http:
        assert (await http.get("/", headers=BROWSER)).status_code == 200
        assert "fake" not in (await http.get("/")).text
        for path in ("/v1/models", "/openapi.json", "/page.html"):
            assert (await http.get(path)).status_code == 401
        # The page's own requests, directly and through a proxy with TLS.
        for origin in ("http://192.168.1.5:8080", "https://192.168.1.5:8080"):
            headers = {"Authorization": "Bearer secret", "Origin": origin}
            assert (await http.get("/v1/models", headers=headers)).status_code == 200
        headers |= {"Origin": "http://192.168.1.6:8080"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 403


async def test_it_stands_behind_the_checks_of_hosts(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(LocalClient(engine), hosts=HOSTS))
    async with httpx.AsyncClient(transport=transport, base_url="http://evil.example") as http:
        assert (await http.get("/", headers=BROWSER)).status_code == 421


# --- in a browser

chromium = executable()
needs_browser = pytest.mark.skipif(chromium is None, reason="no Chromium is installed")


@asynccontextmanager
async def served(client: ChatClient, api_key: str | None = None) -> AsyncIterator[str]:
    stop, started = asyncio.Event(), asyncio.Event()
    with listen.listening(listen.Address(port=0)) as bound:
        app = create_app(client, hosts=HOSTS, api_key=api_key, reasoning_format="deepseek")
        running = asyncio.create_task(listen.serve(app, bound, stop, started.set))
        await started.wait()
        yield listen.url(bound) + "/"
        stop.set()
        await asyncio.wait_for(running, 10)


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    assert chromium is not None
    async with browser(chromium, tmp_path / "browser") as found:
        yield found


class Thinker(FakeEngine):
    """Thinks before it answers, and writes what would be dangerous as markup."""

    def reply(self, prompt: str) -> Iterator[str]:
        if prompt == "think":
            yield from (
                "<think>",
                "let me see",
                "</think>",
                MARKUP,
                "\n```python\n",
                "1 < 2\n",
                "```\n",
                "so",
            )
        else:
            yield from super().reply(prompt)


async def ask(page: Page, text: str) -> None:
    await page.type("#text", text)
    await page.press_enter()


async def ended(page: Page) -> None:
    await page.until("document.querySelector('#go').textContent === 'Send'")


LAST = "#log article:last-child"


@needs_browser
async def test_a_conversation_in_a_browser(page: Page) -> None:
    engine = Thinker()
    async with served(LocalClient(engine)) as url:
        await page.open(url)
        await page.until("document.querySelector('#name').textContent === 'fake'")
        assert f"{url}v1" in await page.text("#about")

        await page.click("#options summary")
        await page.type("#system", "Be kind.")
        await page.type("#temperature", "0.5")
        await ask(page, "think")
        await page.until(f"document.querySelector('{LAST} .note')?.innerText.includes('tokens')")
        await ended(page)
        sent = engine.requests[0]
        assert sent.messages is not None
        assert [(m["role"], m["content"]) for m in sent.messages] == [
            ("system", "Be kind."),
            ("user", "think"),
        ]
        assert sent.params.temperature == 0.5
        # Thoughts are folded; markup is text; code has a box.
        assert await page.value(f"document.querySelector('{LAST} details').open") is False
        assert "let me see" in str(
            await page.value(f"document.querySelector('{LAST} .thoughts').textContent")
        )
        assert MARKUP in await page.text(LAST)
        assert await page.value("document.querySelectorAll('#log img, #log b').length") == 0
        assert await page.text(f"{LAST} pre") == "1 < 2\n"
        assert await page.value("document.title") == "hetrun"

        # Stopped, what was written stays, and the engine stops too.
        await ask(page, "forever ha")
        await page.until(f"document.querySelector('{LAST}').innerText.includes('ha ha')")
        await page.click("#go")
        await ended(page)
        assert await asyncio.to_thread(engine.idle.wait, 20)
        assert engine.cancelled == [2]
        assert "stopped" in await page.text(LAST)

        # A refusal gives the words back.
        await ask(page, "refuse")
        await page.until("!document.querySelector('#wrong').hidden")
        assert "shorten it" in await page.text("#wrong")
        assert await page.value("document.querySelector('#text').value") == "refuse"

        # The tab keeps it all.
        await page.value("window.before = true")
        await page.call("Page.reload")
        await page.until("!window.before && document.querySelectorAll('#log article').length === 4")
        assert await page.value("document.querySelector('#system').value") == "Be kind."
        assert await page.value("Object.keys(localStorage).length + document.cookie.length") == 0
        await page.click("#new")
        await page.until("document.querySelectorAll('#log article').length === 0")
        assert [text for text in page.complaints if "400" not in text] == []
    engine.close()


def of_shelf(found: Found, ram: int | None) -> ChatClient:
    fake = FakeEngine()
    fake.info = replace(INFO, path=str(found.path), name=found.name)
    return LocalClient(fake)


@needs_browser
async def test_a_key_and_several_models_in_a_browser(page: Page) -> None:
    shelf = Shelf([Found(n, Path(f"/models/{n}.gguf"), 1 << 30) for n in ("large", "small")], of_shelf)
    async with served(shelf, api_key="secret") as url:
        await page.open(url)
        await page.until("!document.querySelector('#locked').hidden")
        await page.type("#key", "wrong")
        await page.press_enter()
        await page.until("document.querySelector('#denied').innerText.includes('API key')")
        await page.type("#key", "secret")
        await page.press_enter()
        await page.until("!document.querySelector('#models').hidden")
        assert "small (not loaded)" in await page.text("#models")
        await page.choose("#models", "small")
        await ask(page, "say hello")
        await page.until(f"document.querySelector('{LAST}')?.innerText.startsWith('hello')")
        await ended(page)
        assert [model.found.name for model in shelf.loaded] == ["small"]
        assert "secret" not in str(await page.value("JSON.stringify(sessionStorage)"))

        # At the width of a phone nothing is cut off at the side.
        await page.size(360, 640)
        await ask(page, "say " + "x" * 300)
        await page.until(f"document.querySelector('{LAST}').innerText.startsWith('xxx')")
        assert await page.value("document.documentElement.scrollWidth") <= 360
        assert await page.value("document.querySelector('#go').getBoundingClientRect().right") <= 360
    await shelf.close()
