"""Pictures through all fronts to a real model: each gives the answer that the others give."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from PIL import Image

from hetrun import LLM
from hetrun.client.engine_client import LocalClient
from hetrun.client.events import PICTURE_MARK, GenerateRequest
from hetrun.client.http_client import RemoteClient
from hetrun.client.pictures import data_url
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import OptionError, PictureError, UserError
from hetrun.server.app import create_app
from hetrun.server.listen import ListenAddress
from tests.server.test_listen import served
from tests.support.once import once
from tests.support.towers import write_pair

QUESTION = "What is this?"
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0}


def drawing(turned: float) -> Image.Image:
    return Image.linear_gradient("L").rotate(turned).resize((90, 60)).convert("RGB")


def png_of(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


FILES = [png_of(drawing(turned)) for turned in (0, 90)]
IN_BASE64 = [base64.b64encode(file).decode() for file in FILES]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        write_pair("qwen35", folder)

    folder = once(tmp_path_factory, "fronts-qwen35", make)
    return next(path for path in folder.glob("*.gguf") if not path.name.startswith("mmproj"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, planner="static", ctx=1024, backends=["llamacpp"]) as opened:
        yield opened


def content(*files: bytes) -> list[dict[str, object]]:
    pictures: list[dict[str, object]] = [{"type": "image", "image": file} for file in files]
    return [*pictures, {"type": "text", "text": QUESTION}]


def answer(llm: LLM, *files: bytes) -> tuple[str, int]:
    """What the model answers about pictures, and the length of the prompt."""
    found = llm.chat([{"role": "user", "content": content(*files)}], **GREEDY)
    return found.text, found.usage.prompt_tokens


@pytest.fixture
async def http(llm: LLM) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(LocalClient(llm._model))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def post(http: httpx.AsyncClient, path: str, body: Mapping[str, object]) -> Any:  # noqa: ANN401 - JSON
    response = await http.post(path, json={"model": "x", **body}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_python_takes_paths_bytes_and_images(llm: LLM, tmp_path: Path) -> None:
    assert llm.info.pictures
    text, tokens = answer(llm, FILES[0])
    assert tokens > llm.chat(QUESTION, **GREEDY).usage.prompt_tokens
    assert answer(llm, FILES[1])[0] != text
    (tmp_path / "a.png").write_bytes(FILES[0])
    for one in (tmp_path / "a.png", drawing(0)):
        parts = [{"type": "image", "image": one}, {"type": "text", "text": QUESTION}]
        assert llm.chat([{"role": "user", "content": parts}], **GREEDY).text == text
    both = llm.chat([{"role": "user", "content": content(*FILES)}], **GREEDY)
    assert both.usage.prompt_tokens > tokens
    raw = llm.generate(QUESTION, pictures=[drawing(0)], **GREEDY)
    streamed = llm.stream(f"{PICTURE_MARK}{QUESTION}", pictures=[FILES[0]], **GREEDY)
    assert "".join(event.text for event in streamed) == raw[0].text


def test_a_bad_picture_is_a_sentence(llm: LLM) -> None:
    with pytest.raises(PictureError, match="the PNG picture cannot be read: its end is missing"):
        answer(llm, FILES[0][:-40])
    with pytest.raises(OptionError, match="this is an SVG drawing"):
        answer(llm, b"<svg/>")
    assert answer(llm, FILES[0])[0]


async def test_every_api_gives_the_same_answer(llm: LLM, http: httpx.AsyncClient) -> None:
    text, tokens = answer(llm, FILES[0])
    words = {"type": "text", "text": QUESTION}
    parts = [{"type": "image_url", "image_url": {"url": data_url(FILES[0])}}, words]
    said = await post(
        http, "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], **GREEDY}
    )
    assert (said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"]) == (text, tokens)
    assert said["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    items = [
        {"type": "input_image", "image_url": data_url(FILES[0])},
        {"type": "input_text", "text": QUESTION},
    ]
    body = {"input": [{"role": "user", "content": items}], "max_output_tokens": 6, "temperature": 0}
    said = await post(http, "/v1/responses", body)
    assert (said["output"][0]["content"][0]["text"], said["usage"]["input_tokens"]) == (text, tokens)
    source = {"type": "base64", "media_type": "image/png", "data": IN_BASE64[0]}
    blocks = [{"type": "image", "source": source}, words]
    said = await post(http, "/v1/messages", {"messages": [{"role": "user", "content": blocks}], **GREEDY})
    assert said["content"][0]["text"] == text
    message = {"role": "user", "content": QUESTION, "images": IN_BASE64[:1]}
    options = {"num_predict": 6, "temperature": 0}
    said = await post(http, "/api/chat", {"messages": [message], "options": options, "stream": False})
    assert (said["message"]["content"], said["prompt_eval_count"]) == (text, tokens)
    counted = {"messages": [{"role": "user", "content": blocks}]}
    assert (await post(http, "/v1/messages/count_tokens", counted))["input_tokens"] == tokens
    counted = {"messages": [{"role": "user", "content": parts}]}
    assert (await post(http, "/v1/chat/completions/input_tokens", counted))["input_tokens"] == tokens
    raw = llm.generate(QUESTION, pictures=[FILES[0]], **GREEDY)[0].text
    prompt = {"prompt_string": PICTURE_MARK + QUESTION, "multimodal_data": IN_BASE64[:1]}
    said = await post(http, "/completion", {"prompt": prompt, "n_predict": 6, "temperature": 0})
    assert said["content"] == raw
    said = await post(http, "/v1/completions", {"prompt": prompt, **GREEDY})
    assert said["choices"][0]["text"] == raw
    assert (await http.get("/props")).json()["modalities"]["vision"] is True


async def test_a_bad_picture_is_a_400(http: httpx.AsyncClient) -> None:
    bad = {"type": "image_url", "image_url": {"url": data_url(FILES[0][:-40])}}
    for stream in (False, True):
        body = {"model": "x", "messages": [{"role": "user", "content": [bad]}], "stream": stream}
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert "its end is missing" in response.json()["error"]["message"]


@pytest.mark.parametrize("api", ["openai", "ollama", "anthropic"])
async def test_a_client_of_a_running_server(llm: LLM, api: str) -> None:
    text, tokens = answer(llm, FILES[1])
    messages = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]},)
    request = GenerateRequest(SamplingParams(**GREEDY), messages=messages, pictures=(FILES[1],))
    async with served(cast("Any", llm._model), ListenAddress("127.0.0.1", 0)) as http:
        client = RemoteClient(str(http.base_url), api=api)
        assert (await client.info()).pictures
        events = [event async for event in client.stream(request)]
    assert events[-1].error is None
    assert "".join(event.text for event in events) == text
    assert events[-1].usage.prompt_tokens == tokens


@pytest.mark.slow
def test_run_attaches_a_picture(llm: LLM, path: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(FILES[0])
    line = {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, QUESTION_PART]}]}
    (tmp_path / "lines.jsonl").write_text(json.dumps(line))
    command = [sys.executable, "-m", "hetrun", "run", "-m", str(path), "-c", "1024", "--backend", "llamacpp"]
    command += ["--planner", "static", "--temp", "0", "-n", "6"]
    text, _ = answer(llm, FILES[0])
    piped = subprocess.run(
        [*command, "-a", "-", "--json", QUESTION],
        input=FILES[0],
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert json.loads(piped.stdout)["text"] == text
    lines = subprocess.run(
        [*command, "-f", str(tmp_path / "lines.jsonl")], capture_output=True, check=True, timeout=120
    )
    assert json.loads(lines.stdout)["text"] == text


QUESTION_PART = {"type": "text", "text": QUESTION}


def test_a_model_without_an_encoder(path: Path) -> None:
    with LLM(path, planner="static", ctx=256, backends=["llamacpp"], mmproj="none") as blind:
        assert not blind.info.pictures
        with pytest.raises(
            UserError, match="reads text only here: for pictures take a model that reads them"
        ):
            answer(blind, FILES[0])
