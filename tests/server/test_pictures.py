"""Pictures in requests: each API's shapes give the engine the files as they were sent, in their places."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.client.events import MOST_PICTURES, PICTURE_MARK, GenerateRequest
from hetrun.errors import OptionError
from hetrun.server.app import create_app
from hetrun.server.pictures import parts, sources
from hetrun.server.pictures.sources import Sources
from tests.server.test_api import error_of
from tests.support.fakes import FakeEngine
from tests.support.hostile_pictures import png

FILES = [png(4, 4, 8, 0, bytes([0, i, 9, 9, 9] * 4)) for i in range(3)]
TEXT = [base64.b64encode(file).decode() for file in FILES]
URLS = [f"data:image/png;base64,{text}" for text in TEXT]
CHAT = "/v1/chat/completions"
PLACE = {"type": "image"}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """One whose model reads pictures."""
    fake = FakeEngine()
    fake.info = replace(fake.info, pictures=True)
    yield fake
    fake.close()


@asynccontextmanager
async def served(engine: FakeEngine, **options: Any) -> AsyncIterator[httpx.AsyncClient]:  # noqa: ANN401
    app = create_app(LocalClient(engine), **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


@pytest.fixture
async def http(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with served(engine, strict=True) as client:
        yield client


def text(said: str) -> dict[str, object]:
    return {"type": "text", "text": said}


def of_openai(*content: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": list(content)}]}


async def asked(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, object]
) -> GenerateRequest:
    """What the engine was asked."""
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return engine.requests[-1]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URLS[0], "detail": "high"}},
        {"type": "image_url", "image_url": URLS[0]},
        {"type": "input_image", "image_url": URLS[0], "detail": "low"},
        {"type": "image", "image": URLS[0]},
        {"type": "image", "url": URLS[0].replace(";base64", ";charset=x; BASE64")},
        {"type": "image_url", "image_url": {"url": f"data:,{'%89PNG%0D%0A%1A%0A' + FILES[0][8:].hex()}"}},
    ],
)
async def test_shapes_of_openai(http: httpx.AsyncClient, engine: FakeEngine, part: dict[str, Any]) -> None:
    request = await asked(http, engine, CHAT, of_openai(text("say a"), part, text("say b")))
    assert request.messages is not None
    assert request.messages[0]["content"] == [text("say a"), PLACE, text("say b")]
    if part.get("image_url") != {"url": f"data:,{'%89PNG%0D%0A%1A%0A' + FILES[0][8:].hex()}"}:
        assert request.pictures == (FILES[0],)


async def test_pictures_of_several_messages_are_in_order(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts_ = [{"type": "image_url", "image_url": {"url": url}} for url in URLS]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [parts_[0], text("say 1"), parts_[1]]},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": [text("say 2"), text("say 3"), parts_[2]]},
    ]
    request = await asked(http, engine, CHAT, {"messages": messages})
    assert request.pictures == tuple(FILES)
    assert request.messages is not None
    assert [message["content"] for message in request.messages] == [
        "Be brief.",
        [PLACE, text("say 1"), PLACE],
        "one",
        [text("say 2"), text("say 3"), PLACE],
    ]


async def test_responses_keep_pictures_for_the_next_turn(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    content = [{"type": "input_text", "text": "say a"}, {"type": "input_image", "image_url": URLS[0]}]
    first = await http.post("/v1/responses", json={"input": [{"role": "user", "content": content}]})
    assert first.status_code == 200, first.text
    output = [{"type": "input_image", "image_url": URLS[1]}, {"type": "input_text", "text": "say b"}]
    calls = [
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": output},
    ]
    body = {"input": calls, "previous_response_id": first.json()["id"]}
    request = await asked(http, engine, "/v1/responses", body)
    assert request.pictures == (FILES[0], FILES[1])
    assert request.messages is not None
    assert request.messages[0]["content"] == [text("say a"), PLACE]
    assert request.messages[-1]["content"] == [PLACE, text("say b")]


async def test_blocks_of_anthropic(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    def image(number: int) -> dict[str, object]:
        source = {"type": "base64", "media_type": "image/png", "data": TEXT[number]}
        return {"type": "image", "source": source}

    url = {"type": "image", "source": {"type": "url", "url": URLS[2]}}
    messages = [
        {"role": "user", "content": [image(0), {"type": "text", "text": "say a"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [text("found"), image(1)]},
                {"type": "text", "text": "say"},
                url,
                {"type": "text", "text": "b"},
                {"type": "text", "text": "c"},
            ],
        },
    ]
    body = {"model": "fake", "max_tokens": 9, "messages": messages}
    request = await asked(http, engine, "/v1/messages", body)
    assert request.pictures == tuple(FILES)
    assert request.messages is not None
    assert [message.get("content") for message in request.messages] == [
        [PLACE, text("say a")],
        None,
        [text("found"), PLACE],
        [text("say"), PLACE, text("b\nc")],
    ]
    counted = await http.post("/v1/messages/count_tokens", json={"model": "fake", "messages": messages})
    assert counted.json() == {"input_tokens": 300}


async def test_a_failed_call_with_a_picture_says_so(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": TEXT[0]}
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": True}
    result["content"] = [{"type": "image", "source": source}]
    messages = [
        {"role": "user", "content": "say a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    body = {"model": "fake", "max_tokens": 9, "messages": messages}
    request = await asked(http, engine, "/v1/messages", body)
    assert request.messages is not None
    assert request.messages[-1]["content"] == [text("Error: "), PLACE]


async def test_images_of_ollama(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    message = {"role": "user", "content": "say a", "images": TEXT[:2]}
    request = await asked(http, engine, "/api/chat", {"model": "fake", "messages": [message]})
    assert request.pictures == (FILES[0], FILES[1])
    assert request.messages is not None
    assert request.messages[0]["content"] == [PLACE, PLACE, text("say a")]
    prompt: dict[str, object] = {"model": "fake", "prompt": "say b", "images": [TEXT[2]]}
    request = await asked(http, engine, "/api/generate", prompt)
    assert request.pictures == (FILES[2],)
    assert request.messages is not None
    assert request.messages[0]["content"] == [PLACE, text("say b")]
    raw = {"model": "fake", "prompt": "say [img-1] [img-0]", "images": TEXT, "raw": True}
    request = await asked(http, engine, "/api/generate", raw)
    assert request.text == f"{PICTURE_MARK}say {PICTURE_MARK} {PICTURE_MARK}"
    assert request.pictures == (FILES[2], FILES[1], FILES[0])
    raw["prompt"] = f"say {PICTURE_MARK}"
    assert (await http.post("/api/generate", json=raw)).status_code == 400


async def test_multimodal_data_of_llama_cpp(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    prompt = {"prompt_string": f"say {PICTURE_MARK} and {PICTURE_MARK}", "multimodal_data": TEXT[:2]}
    request = await asked(http, engine, "/completion", {"prompt": prompt})
    assert (request.text, request.pictures) == (prompt["prompt_string"], tuple(FILES[:2]))
    refused = await http.post("/completion", json={"prompt": prompt | {"multimodal_data": TEXT}})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "prompt.prompt_string")
    # A text without pictures may have the mark.
    request = await asked(http, engine, "/completion", {"prompt": f"say {PICTURE_MARK}"})
    assert (request.text, request.pictures) == (f"say {PICTURE_MARK}", ())


async def test_who_says_that_the_model_reads_pictures(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    for sees in (True, False):
        engine.info = replace(engine.info, pictures=sees)
        shown = (await http.post("/api/show", json={"model": "fake"})).json()
        assert ("vision" in shown["capabilities"]) is sees
        tags = (await http.get("/api/tags")).json()["models"][0]
        assert ("clip" in tags["details"]["families"]) is sees
        assert (await http.get("/props")).json()["modalities"] == {"vision": sees, "audio": False}
        listed = (await http.get("/v1/models")).json()["data"][0]
        assert listed["meta"]["vision"] is sees
        assert listed["architecture"]["input_modalities"] == (["text", "image"] if sees else ["text"])


ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT[0]}}
SENT = {"type": "input_image", "image_url": URLS[0]}
WITHOUT = [
    (CHAT, of_openai({"type": "image_url", "image_url": {"url": URLS[0]}})),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URLS[0]}]}]},
    ),
    ("/v1/messages", {"max_tokens": 9, **of_openai(ANTHROPIC)}),
    ("/api/chat", {"model": "fake", "messages": [{"role": "user", "content": "", "images": TEXT}]}),
    ("/api/generate", {"model": "fake", "prompt": "x", "images": TEXT, "raw": True}),
    ("/completion", {"prompt": {"prompt_string": PICTURE_MARK, "multimodal_data": TEXT[:1]}}),
]


@pytest.mark.parametrize(("path", "body"), WITHOUT, ids=[path for path, _ in WITHOUT])
async def test_a_model_that_reads_text_only(path: str, body: dict[str, object]) -> None:
    engine = FakeEngine()
    try:
        async with served(engine) as http:
            response = await http.post(path, json=body)
    finally:
        engine.close()
    assert response.status_code == 400
    assert "fake reads text only here; for pictures, serve a model that reads them" in response.text
    assert engine.requests == []


def url(address: object) -> dict[str, object]:
    return of_openai({"type": "image_url", "image_url": {"url": address}})


WRONG = {
    "number": (url(5), "messages[0].content[0].image_url.url must be a string"),
    "missing": (of_openai({"type": "image_url"}), "messages[0].content[0].image_url is missing"),
    "no url": (of_openai({"type": "image_url", "image_url": {}}), "image_url.url is missing"),
    "detail": (of_openai({"type": "image_url", "image_url": {"url": URLS[0], "detail": 7}}), "detail"),
    "base64": (url("data:image/png;base64,???"), "is not valid base64"),
    "empty": (url("data:image/png;base64,"), "the picture is empty"),
    "svg": (url("data:image/svg+xml,<svg/>"), "this is an SVG drawing, which is not read"),
    "html": (url("data:image/png,<html>"), "this is a web page"),
    "name": (url("cat.png"), "no address that can be read; give the picture itself, as data:"),
    "ftp": (url("ftp://example.com/cat.png"), "this is no address that can be read"),
    "http": (url("https://example.com/cat.png"), "this server fetches no pictures (--allowed-media-domain"),
    "file": (url("file:///etc/passwd"), "this server reads no files for requests (--media-path"),
    "long": (url("http://" + "a" * 9000), "this is no address"),
    "id": (of_openai({"type": "input_image", "file_id": "f"}), "this server keeps no files"),
    "many": (of_openai(*[{"type": "image_url", "image_url": URLS[0]}] * (MOST_PICTURES + 1)), "64 pictures"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
async def test_what_is_wrong_with_a_picture(http: httpx.AsyncClient, engine: FakeEngine, case: str) -> None:
    body, said = WRONG[case]
    response = await http.post(CHAT, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error"), response.text
    assert said in error["message"]
    assert error["param"].startswith("messages[0].content[")
    assert engine.requests == []


async def test_a_picture_that_is_too_large(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MOST_PICTURE_BYTES", 50)
    error = error_of(await http.post(CHAT, json=url(URLS[0])))
    assert (error["param"], error["code"]) == ("messages[0].content[0].image_url.url", "image_too_large")


async def test_files_of_one_folder(engine: FakeEngine, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    (folder / "of cats").mkdir(parents=True)
    (folder / "of cats/a.png").write_bytes(FILES[0])
    (tmp_path / "secret.png").write_bytes(FILES[1])
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "text.png").write_text("root:x:0:0")
    allowed = Sources.of(folder.resolve(), ())
    good = [f"file://{folder}/of%20cats/a.png", "file://of cats/a.png", "FILE:of%20cats/a.png"]
    bad = {
        f"file://{tmp_path}/secret.png": "does not lie in the folder",
        "file://../secret.png": "does not lie in the folder",
        "file://%2e%2e/secret.png": "does not lie in the folder",
        "file://link.png": "does not lie in the folder",
        "file://text.png": "not a picture in a format that is read",
        "file://none.png": "the file cannot be read (No such file or directory)",
        "file://of cats": "the file cannot be read (is a directory, not a file)",
        "file://a%00.png": "there is no such file",
    }
    async with served(engine, pictures=allowed) as http:
        for address in good:
            assert (await asked(http, engine, CHAT, url(address))).pictures == (FILES[0],)
        for address, said in bad.items():
            response = await http.post(CHAT, json=url(address))
            assert response.status_code == 400
            assert said in response.json()["error"]["message"], address
            assert "root:" not in response.text


class Host(BaseHTTPRequestHandler):
    """Sends a picture, or something else by its path."""

    def do_GET(self) -> None:
        match self.path:
            case "/cat.png":
                self._send(200, FILES[0])
            case "/moved.png":
                self._send(302, b"", f"http://{self.headers['Host']}/cat.png")
            case "/away.png":
                self._send(302, b"", "http://example.invalid/cat.png")
            case "/file.png":
                self._send(302, b"", "file:///etc/passwd")
            case "/round.png":
                self._send(302, b"", f"http://{self.headers['Host']}/round.png")
            case "/large.png":
                self._send(200, FILES[0] + bytes(5000))
            case _:
                self._send(404, b"no")

    def _send(self, status: int, body: bytes, location: str = "") -> None:
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_addresses_of_named_hosts(
    engine: FakeEngine, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MOST_PICTURE_BYTES", 4000)
    bad = {
        f"http://{host}/none.png": "its host did not send it (404 Not Found)",
        f"http://{host}/away.png": "its host did not send it (302 it sends us to another host)",
        f"http://{host}/file.png": "its host did not send it",
        f"http://{host}/round.png": "its host did not send it",
        f"http://{host}/large.png": "it is larger than",
        f"https://{host}/cat.png": "its host did not send it",
        "http://127.0.0.1/cat.png": "its host is not on this server's list",
        f"http://{host}@example.com/": "its host is not on this server's list",
        f"http://localhost:{host.partition(':')[2]}/cat.png": "its host is not on this server's list",
        "http://[": "this is no address",
    }
    async with served(engine, pictures=Sources.of(None, [f"example.org,{host}"])) as http:
        for name in ("cat", "moved"):
            assert (await asked(http, engine, CHAT, url(f"http://{host}/{name}.png"))).pictures == (FILES[0],)
        source = {"type": "url", "url": f"http://{host}/cat.png"}
        body = {"max_tokens": 9, **of_openai({"type": "image", "source": source})}
        assert (await asked(http, engine, "/v1/messages", body)).pictures == (FILES[0],)
        for address, said in bad.items():
            response = await http.post(CHAT, json=url(address))
            assert response.status_code == 400
            assert said in response.json()["error"]["message"], address


@pytest.mark.parametrize("name", ["https://example.com", "a b", "example.com/", "*.example.com"])
def test_names_that_are_no_hosts(name: str) -> None:
    with pytest.raises(OptionError, match="is not the name of a host"):
        Sources.of(None, [name])


async def test_texts_and_tokens_of_messages_with_pictures(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await http.post("/tokenize", json=url(URLS[0]))
    assert response.status_code == 400
    assert "messages have pictures, which have no tokens to be listed" in response.json()["error"]["message"]
    shown = await http.post("/apply-template", json=url(URLS[0]))
    assert shown.status_code == 200
    assert TEXT[0] not in shown.text


async def test_a_prompt_is_what_is_streamed_too(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = of_openai({"type": "image_url", "image_url": {"url": URLS[0]}}, text("say one two"))
    response = await http.post(CHAT, json=body | {"stream": True, "n": 2})
    chunks = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    said = "".join(json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert sorted(said) == sorted("one twoone two")
    assert [request.pictures for request in engine.requests] == [(FILES[0],)] * 2
