"""Pictures that lines of a file name by a path."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from hetrun.client.pictures import data_url
from hetrun.tools.batch.request_lines import Ask, RequestReader
from hetrun.tools.batch.result_lines import Reply
from hetrun.tools.batch.runner import BatchRun
from hetrun.tools.batch.worker import Place
from tests.batch.fakes import ALL, opened, reply, results
from tests.support.hostile_pictures import png

FILE = png(4, 4, 8, 0, bytes(20))


class Keeps(Place):
    """Keeps what it is asked."""

    name, lanes = "keeps", 1

    def __init__(self) -> None:
        self.bodies: dict[int, Any] = {}

    async def answer(self, ask: Ask) -> Reply:
        self.bodies[ask.index] = ask.body
        return reply("fine")


def line(*parts: object) -> bytes:
    content = [{"type": "text", "text": "What is this?"}, *parts]
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode() + b"\n"


def url(address: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": address, "detail": "low"}}


def test_paths_beside_the_file_become_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "batch"
    (folder / "of cats").mkdir(parents=True)
    (folder / "of cats/a.png").write_bytes(FILE)
    (folder / "text.png").write_text("secret words")
    (tmp_path / "outside.png").write_bytes(FILE)
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    good = [
        url("of cats/a.png"),
        url("file://of%20cats/a.png"),
        url(f"{folder}/of cats/a.png"),
        {"type": "input_image", "image_url": "./of cats/a.png"},
        {"type": "image", "image": "of cats/a.png"},
    ]
    bad = {
        "../outside.png": "does not lie in",
        "link.png": "does not lie in",
        "/etc/passwd": "does not lie in",
        "none.png": "the picture none.png cannot be read: No such file or directory",
        "text.png": "the picture text.png: this is not a picture in a format that is read",
        "of cats": "is a directory",
        "a\0b": "does not lie in",
    }
    left = [url("https://example.com/a.png"), url(data_url(FILE))]
    source, output, place = folder / "in.jsonl", tmp_path / "out.jsonl", Keeps()
    source.write_bytes(
        b"".join([*map(line, good), *(line(url(name)) for name in bad), *map(line, left), line()])
    )
    with opened(source, output) as ends:
        tally = asyncio.run(BatchRun(ends, RequestReader(ALL), [place], folder=folder.resolve()).run())
    assert (tally.answered, tally.failed) == (len(good) + len(bad) + len(left) + 1, len(bad))
    sent = [place.bodies[i]["messages"][0]["content"][1] for i in range(len(good))]
    assert sent[:3] == [url(data_url(FILE))] * 3
    assert sent[3:] == [
        {"type": "input_image", "image_url": data_url(FILE)},
        {"type": "image", "image": data_url(FILE)},
    ]
    begin = len(good) + len(bad)
    assert [place.bodies[begin + i]["messages"][0]["content"][1] for i in range(len(left))] == left
    said = [str(one["error"]) for one in results(output)[len(good) : begin]]
    for (name, words), found in zip(bad.items(), said, strict=True):
        assert words in found, name
        assert "secret" not in found
