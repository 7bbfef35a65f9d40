"""Strangers' vocabularies are tried in a process that may die of them; it says how each case ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hetrun.backends.llamacpp.vocabulary import open_vocabulary
from hetrun.errors import UserError
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.gguf_source import GGUFModel

ROOT = Path(__file__).resolve().parents[2]
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


def tried(cases: Sequence[tuple[Path, str, int]]) -> list[tuple[str, float]]:
    """What is said of each file and text, and how long it took, in a process that may die."""
    asked = "".join(json.dumps([str(path), text, times]) + "\n" for path, text, times in cases)
    command = [sys.executable, "-m", "tests.hostile.vocabulary_trial"]
    run = subprocess.run(
        command, input=asked, capture_output=True, text=True, timeout=50, check=False, cwd=ROOT
    )
    said = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, (cases[len(said)], run.stderr[-2000:])
    assert run.stderr == ""
    return said


def main() -> None:
    """Each line: a file's path, a text and how often it is repeated. Each answer: what was said, and when."""
    for line in sys.stdin:
        path, text, times = json.loads(line)
        began = time.monotonic()
        said = attempt(Path(path), text * times)
        print(json.dumps([said, time.monotonic() - began]), flush=True)


if __name__ == "__main__":
    main()
