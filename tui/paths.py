"""Paths of pictures as people give them: typed, quoted, escaped for a shell, or dropped as file:// URLs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Those that are read, and others that are pictures, too: a sentence says why these are not.
SUFFIXES = ("png", "jpg", "jpeg", "jpe", "jfif", "webp", "gif", "bmp", "heic", "heif", "avif", "tif", "tiff")
_START = re.compile(r"\S")
_WORD = re.compile(r"(?:\\.|[^\s\\])+|\\", re.DOTALL)
_BEGINS = (
    "/",
    "~/",
    "./",
    "../",
    "file://",
)  # of a path in a message: a name alone may be a word of the text
_AFTER = ",;:!?)."  # a word
_ENDS = tuple(f".{suffix}" for suffix in SUFFIXES)
MOST_DROPPED = 64 << 10  # characters of a paste that is looked at for paths


def path_of(written: str) -> Path:
    """The file that is named."""
    text = written.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    elif "\\" in text and not _exists(Path(text)):
        text = re.sub(r"\\(.)", r"\1", text)
    if text.lower().startswith("file://"):
        text = unquote(urlsplit(text).path)
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:  # the home of a user who does not exist
        return path


def is_picture(path: Path) -> bool:
    """Whether a file's name is one of a picture."""
    return path.suffix[1:].lower() in SUFFIXES


def names_picture(text: str) -> bool:
    """Whether a message begins with the path of a picture, and not with a command."""
    first = next(_named(text), None)
    return first is not None and first[0] == 0 and is_file_of_picture(path_of(text[: first[1]]))


def is_file_of_picture(path: Path) -> bool:
    """Whether there is such a file."""
    return is_picture(path) and _exists(path)


def dropped(text: str) -> list[Path]:
    """The pictures that a pasted text names, if it is nothing but their paths: so terminals paste what is
    dropped on them."""
    if not text.strip() or len(text) > MOST_DROPPED:
        return []
    for words in ([text.strip()], text.strip().splitlines(), _words(text)):
        paths = [path_of(word) for word in words if word.strip()]
        if paths and all(path.is_absolute() and is_file_of_picture(path) for path in paths):
            return paths
    return []


def _words(text: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote that is not closed
        return []


def without_paths(text: str) -> tuple[str, list[Path]]:
    """A message without the paths of pictures in it, and those; what names no file stays text."""
    found: list[Path] = []
    rest: list[str] = []
    at = 0
    for begin, end in _named(text):
        path = path_of(text[begin:end])
        if is_file_of_picture(path):
            found += [path] * (path not in found)
            before = text[at:begin]
            follows = text[end : end + 1]
            if before.endswith(" ") and (not follows or follows in " \n" + _AFTER):
                before = before[:-1]  # the blank goes with the path
            rest.append(before)
            at = end
    return "".join([*rest, text[at:]]).strip() if found else text, found


def _named(text: str) -> Iterator[tuple[int, int]]:
    """Where paths may stand: in quotes, or words that begin as a path does. It takes linear time."""
    at = 0
    while start := _START.search(text, at):
        begin = start.start()
        if (quote := text[begin]) in "\"'":
            close = text.find(quote, begin + 1)
            if close >= 0 and "\n" not in text[begin:close] and _is_named(text[begin + 1 : close]):
                at = close + 1
                yield begin, at
            else:
                at = begin + 1
            continue
        word = _WORD.match(text, begin)
        assert word is not None, "it matches what is not blank"
        at = word.end()
        written = word[0].rstrip(_AFTER)
        if written.startswith(_BEGINS) and _is_named(written):
            yield begin, begin + len(written)


def _is_named(written: str) -> bool:
    return written.lower().endswith(_ENDS)


def _exists(path: Path) -> bool:
    try:
        return path.expanduser().is_file()
    except (OSError, ValueError, RuntimeError):
        return False
