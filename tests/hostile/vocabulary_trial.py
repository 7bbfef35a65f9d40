"""A stranger's vocabulary is tried, in a process that may die of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from hetrun.backends.llamacpp.vocabulary import open_vocabulary
from hetrun.errors import UserError
from hetrun.formats.gguf import read_gguf
from hetrun.source import GGUFModel

TEXT = "The engine, 你好 🙂 <s> runs\n\tx\x00\x80 '1 22"


def attempt(path: Path, text: str = TEXT) -> str:
    """What is said of a file; nothing where it may be used."""
    try:
        vocabulary = open_vocabulary(GGUFModel(read_gguf(path), "llama"))
        for special in (True, False):
            vocabulary.tokenize(text, special, special)
        vocabulary.pieces()
        vocabulary.close()
    except UserError as e:
        return str(e)
    return ""


def main() -> None:
    """Each line: a file's path, a text and how often it is repeated. Each answer: what was said, and when."""
    for line in sys.stdin:
        path, text, times = json.loads(line)
        began = time.monotonic()
        said = attempt(Path(path), text * times)
        print(json.dumps([said, time.monotonic() - began]), flush=True)


if __name__ == "__main__":
    main()
