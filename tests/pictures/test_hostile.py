"""Pictures made to do harm: each is a picture or a sentence, in bounded time and memory."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from hetrun.errors import PictureError
from hetrun.pictures import limits
from hetrun.pictures.decoder import PictureDecoder
from tests.support.hostile_pictures import good, hostile

MIB = 1 << 20
MOST_S = 60.0  # for one, on a busy machine: its limits of computing are below


def kilobytes(pid: int, name: str) -> int:
    """A figure of a process's memory."""
    said = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{name}:\s*(\d+) kB", said, re.M)
    assert found
    return int(found[1])


def outcome(decoder: PictureDecoder, file: bytes) -> str:
    """Empty for a picture, else what is said."""
    try:
        picture = decoder.decode(file)
    except PictureError as error:
        return str(error)
    assert len(picture.rgb) == 3 * picture.width * picture.height
    assert picture.width * picture.height <= limits.MOST_PIXELS
    return ""


@pytest.mark.parametrize(
    ("count", "seed"),
    [(160, 40), pytest.param(2000, 41, marks=[pytest.mark.exhaustive, pytest.mark.slow])],
    ids=["some", "all"],
)
def test_a_sentence_or_a_picture(count: int, seed: int) -> None:
    ours = kilobytes(os.getpid(), "VmRSS")
    with PictureDecoder() as decoder:
        assert outcome(decoder, good()[0]) == ""
        assert decoder.pid
        start = kilobytes(decoder.pid, "VmRSS")
        most, said = start, set[str]()
        for number, file in enumerate(hostile(count, seed)):
            began = time.monotonic()
            text = outcome(decoder, file)
            assert time.monotonic() - began < MOST_S, number
            assert text.isprintable(), number
            assert len(text) < 500, number
            said.add(re.sub(r"[\d,]+", "0", text))
            if decoder.pid:
                most = max(most, kilobytes(decoder.pid, "VmHWM"))
        assert most - start <= limits.MEMORY // 1024
        # They were not all refused for one reason, nor all decoded.
        assert "" in said
        assert len(said) > 12
        assert outcome(decoder, good()[0]) == ""
    assert kilobytes(os.getpid(), "VmRSS") - ours < 128 * 1024
