"""Pictures for `LLM`: paths, bytes, Pillow's images and data URLs reach the engine as files."""

from __future__ import annotations

import base64
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hetrun.api.conversation import chat_messages
from hetrun.api.pictures import marked_prompt, picture_file
from hetrun.client.events import PICTURE_MARK
from hetrun.client.pictures import data_url
from hetrun.errors import OptionError
from hetrun.pictures.decoder import PictureDecoder
from tests.support.fakes import INFO
from tests.support.hostile_pictures import png

FILES = [png(4, 4, 8, 0, bytes([0, i, 9, 9, 9] * 4)) for i in range(2)]
PLACE = {"type": "image"}
SEES = replace(INFO, pictures=True)


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def test_what_a_picture_may_be_given_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a b.png"
    path.write_bytes(FILES[0])
    monkeypatch.setenv("HOME", str(tmp_path))
    same = [
        *(path, str(path), "~/a b.png", f"file://{tmp_path}/a%20b.png"),
        *(FILES[0], bytearray(FILES[0]), data_url(FILES[0])),
    ]
    assert [picture_file(one, "x") for one in same] == [FILES[0]] * len(same)


@pytest.mark.parametrize("mode", ["RGB", "CMYK", "YCbCr", "F", "1", "P", "RGBA", "I;16"])
def test_an_image_of_pillow_keeps_its_pixels(mode: str) -> None:
    image = Image.linear_gradient("L").resize((9, 5)).convert(mode)
    with PictureDecoder() as decoder:
        found = decoder.decode(picture_file(image, "x"))
    assert (found.width, found.height) == (9, 5)
    if mode in ("RGB", "CMYK", "1", "P", "RGBA"):
        assert found.rgb == image.convert("RGB").tobytes()


def test_a_turned_photograph_stays_turned() -> None:
    exif = Image.Exif()
    exif[274] = 6
    file = BytesIO()
    Image.new("RGB", (9, 5)).save(file, "JPEG", exif=exif)
    with PictureDecoder() as decoder:
        found = decoder.decode(picture_file(Image.open(BytesIO(file.getvalue())), "x"))
    assert (found.width, found.height) == (5, 9)


WRONG: list[tuple[object, str]] = [
    (5, "x must be a path, bytes or an image of Pillow, not int"),
    (None, "not NoneType"),
    (b"", "x: the picture is empty"),
    (b"<svg/>", "x: this is an SVG drawing"),
    ("none.png", r"x \(none.png\) cannot be read: No such file or directory"),
    ("/", r"x \(/\) cannot be read: is a directory"),
    ("https://example.com/a.png", "x is an address: download the picture"),
    ("data:image/png;base64,?", "x is not valid base64"),
    ("data:image/png", "x is no data URL"),
]


@pytest.mark.parametrize(("source", "said"), WRONG)
def test_what_is_wrong_with_a_picture(source: object, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        picture_file(source, "x")


def test_messages_with_pictures(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(FILES[1])
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [text("a"), {"type": "image", "image": FILES[0]}, text("b")]},
        {"role": "assistant", "content": [text("c"), text("d")]},
        {"role": "user", "content": ({"type": "image_url", "image_url": {"url": str(path)}},)},
        {"role": "user", "content": [{"type": "input_image", "image_url": data_url(FILES[0])}, text("d")]},
    ]
    said = chat_messages(messages)
    assert said.pictures == (FILES[0], FILES[1], FILES[0])
    assert [(m["role"], m["content"]) for m in said.messages] == [
        ("system", "Be brief."),
        ("user", [text("a"), PLACE, text("b")]),
        ("assistant", "c\nd"),
        ("user", [PLACE]),
        ("user", [PLACE, text("d")]),
    ]
    assert messages[1]["content"][1] == {"type": "image", "image": FILES[0]}  # what was given stays as it is


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "image"}], r"messages\[0\].content\[0\].image_url is missing"),
        ([{"type": "image", "image": 5}], r"messages\[0\].content\[0\].image must be a path"),
        ([{"type": "image", "image": FILES[0]}, {"type": "audio"}], "only text can be read, not audio"),
        ([{"type": "image", "image": FILES[0]}, {"type": "text", "text": 5}], "only text can be read"),
    ],
)
def test_parts_that_are_wrong(content: list[object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        chat_messages([{"role": "user", "content": content}])


def test_a_text_has_a_mark_for_each_picture() -> None:
    assert marked_prompt("a", FILES, SEES) == (PICTURE_MARK * 2 + "a", tuple(FILES))
    assert marked_prompt(f"a{PICTURE_MARK}b", FILES[:1], SEES)[0] == f"a{PICTURE_MARK}b"
    for prompt, pictures, info, said in (
        (f"a{PICTURE_MARK}", FILES, SEES, "1 times, and there are 2 pictures"),
        ([1, 2], FILES, SEES, "a prompt that is one text"),
        ("a", FILES, INFO, "reads text only here"),
        ("a", FILES[0], SEES, "pictures is a list"),
    ):
        with pytest.raises(OptionError, match=said):
            marked_prompt(prompt, pictures, info)


def test_pillow_loads_on_use() -> None:
    code = (
        "import sys, base64; from hetrun.api.pictures import picture_file; "
        f"picture_file(base64.b64decode({base64.b64encode(FILES[0])!r}), 'x'); "
        "assert 'PIL' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
