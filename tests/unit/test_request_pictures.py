"""Pictures of a request: each has its place, and they cross pipes and sockets as they are."""

from __future__ import annotations

import binascii
import json
import pickle
from dataclasses import replace

import pytest

from hetrun.client import events
from hetrun.client.event_json import request_as_json, request_of
from hetrun.client.events import MOST_PICTURES, PICTURE_MARK, GenerateRequest, picture_parts
from hetrun.client.pictures import anthropic_content, data_url, from_data_url, openai_messages, type_of
from hetrun.client.sampling_params import SamplingParams

PARAMS = SamplingParams()
PLACE = {"type": "image"}
WORDS = {"type": "text", "text": "What?"}
ASKED = ({"role": "user", "content": [PLACE, WORDS]}, {"role": "user", "content": [WORDS, PLACE]})
FILES = (b"\x89PNG\r\n\x1a\n\0\xff", b"\xff\xd8\xff\0")


def request() -> GenerateRequest:
    return GenerateRequest(PARAMS, messages=ASKED, pictures=FILES)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"messages": ASKED}, "0 pictures has places for 2"),
        ({"messages": ASKED, "pictures": FILES[:1]}, "1 picture has places for 2"),
        ({"messages": ASKED, "pictures": FILES * 2}, "4 pictures has places for 2"),
        ({"text": "a", "pictures": FILES}, "2 pictures has places for 0"),
        ({"text": f"{PICTURE_MARK}a", "pictures": FILES}, "2 pictures has places for 1"),
        ({"tokens": (1, 2), "pictures": FILES}, "2 pictures has places for 0"),
        ({"text": PICTURE_MARK * 65, "pictures": FILES[:1] * 65}, "may have 64 pictures, not 65"),
    ],
)
def test_each_picture_has_its_place(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GenerateRequest(PARAMS, **given)  # type: ignore[arg-type]


def test_requests_that_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert request().pictures == FILES
    assert GenerateRequest(PARAMS, text=f"a{PICTURE_MARK}", pictures=FILES[:1]).pictures == FILES[:1]
    assert GenerateRequest(PARAMS, text=f"a {PICTURE_MARK} in a text").pictures == ()
    most = FILES[:1] * MOST_PICTURES
    assert GenerateRequest(PARAMS, text=PICTURE_MARK * MOST_PICTURES, pictures=most).pictures == most
    assert str(FILES[0]) not in repr(request())
    monkeypatch.setattr(events, "MOST_PICTURE_BYTES", 5)
    with pytest.raises(ValueError, match="a picture may have"):
        request()


def test_what_has_a_place() -> None:
    assert picture_parts([*ASKED, {"role": "user", "content": "image"}, "x", {"content": [5, PLACE]}]) == 3


def test_they_cross_pipes_and_sockets() -> None:
    asked = replace(request(), client="me")
    assert pickle.loads(pickle.dumps(asked)) == asked
    said = json.loads(json.dumps(request_as_json(request())))
    assert request_of(said) == request()
    assert "pictures" not in request_as_json(GenerateRequest(PARAMS, text="a"))


@pytest.mark.parametrize("wrong", [["a"], [5], 5, ["####"], [""]])
def test_what_is_no_picture_in_json(wrong: object) -> None:
    said = request_as_json(request()) | {"pictures": wrong}
    with pytest.raises(ValueError, match=r".*"):
        request_of(said)


def test_the_shapes_of_other_apis() -> None:
    first, second = openai_messages(request())
    assert first["content"] == [{"type": "image_url", "image_url": {"url": data_url(FILES[0])}}, WORDS]
    assert second["content"][1]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    files = iter(FILES)
    blocks = [anthropic_content(message, files) for message in ASKED]
    assert blocks[1][1]["source"] == {"type": "base64", "media_type": "image/jpeg", "data": "/9j/AA=="}
    assert [block["type"] for block in blocks[0]] == ["image", "text"]
    assert [type_of(file) for file in (b"GIF89a", b"RIFF1234WEBP", b"BM", b"x")] == [
        *("image/gif", "image/webp", "image/bmp", "application/octet-stream")
    ]


def test_data_urls_are_read_as_they_are_written() -> None:
    assert [from_data_url(data_url(file)) for file in FILES] == list(FILES)
    assert from_data_url("DATA:image/png;charset=x; BASE64,YW\nI") == b"ab"
    assert from_data_url("data:,a%20b") == b"a b"
    assert from_data_url("https://example.com/a,b") is None
    with pytest.raises(binascii.Error):
        from_data_url("data:;base64,?")
