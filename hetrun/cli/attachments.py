"""Files that `hetrun run -a` puts beside a prompt: pictures, by path or on standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from hetrun.cli import standard_input
from hetrun.client.events import MOST_PICTURE_BYTES, MOST_PICTURES, PICTURE, PICTURE_MARK, GenerateRequest
from hetrun.client.pictures import bounded, read_picture
from hetrun.errors import OptionError, PictureError
from hetrun.system.terminal_text import visible

PIPE = "-"


def pictures(attached: Sequence[str]) -> tuple[bytes, ...]:
    """The files that were attached, in order."""
    if not attached:
        return ()
    from hetrun.pictures.kinds import format_of  # on use: few prompts have pictures

    paths = [path for given in attached for path in _paths(given)]
    if len(paths) > MOST_PICTURES:
        raise OptionError(f"-a is given {len(paths)} times, and a prompt may have {MOST_PICTURES} pictures")
    if paths.count(PIPE) > 1:
        raise OptionError("-a - is given twice: standard input has one picture")
    files = []
    for path in paths:
        where = f"-a {visible(path)}"
        file = _piped() if path == PIPE else read_picture(os.path.expanduser(path), where)
        try:
            format_of(file)
        except PictureError as error:
            raise OptionError(f"{where}: {error}") from None
        files.append(file)
    return tuple(files)


def _paths(given: str) -> list[str]:
    """One path, or several with commas, as llama.cpp takes them."""
    return given.split(",") if "," in given and not os.path.exists(given) else [given]


def _piped() -> bytes:
    if not standard_input.has_text():
        raise OptionError("-a - reads a picture from standard input, and nothing is piped into it")
    return bounded(sys.stdin.buffer.read(MOST_PICTURE_BYTES + 1), "the picture on standard input")


def with_pictures(request: GenerateRequest, files: tuple[bytes, ...]) -> GenerateRequest:
    """The request with pictures before its text; a raw text may have marks for them itself."""
    if not files:
        return request
    if request.messages is None:
        text = request.text or ""
        if PICTURE_MARK not in text:
            text = PICTURE_MARK * len(files) + text
        if (marks := text.count(PICTURE_MARK)) != len(files):
            raise OptionError(
                f"the prompt has {PICTURE_MARK} {marks} times, and {len(files)} pictures are attached"
            )
        return replace(request, text=text, pictures=files)
    *before, last = request.messages
    parts = [*[{"type": PICTURE} for _ in files], {"type": "text", "text": last["content"]}]
    return replace(request, messages=(*before, {**last, "content": parts}), pictures=files)
