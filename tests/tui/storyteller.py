"""The chat over an engine that tells Markdown steadily: `python -m tests.tui.storyteller PLACE RATE`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from hetrun.client.engine_client import WorkerClient
from hetrun.config import Settings
from hetrun.tui.app import ChatApp
from tests.support.fakes import FakeEngine

SENTENCE = (
    "The **engine** serves requests on one thread, and the *planner* measures what each `segment` takes. "
)
SECTION = (
    f"## Section\n\n{3 * SENTENCE}\n\n- first item of a list\n- second item\n\n"
    "```python\ndef f(x):\n    return x + 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
)
LETTERS = 4  # of a token, about


class Storyteller(FakeEngine):
    """Never ends; `seed` is how many tokens it gives a second."""

    def __init__(self, *, seed: int = 200, progress: Callable[[float], None] | None = None) -> None:
        super().__init__(progress=progress, pace_s=1 / seed - 0.0001)

    def reply(self, prompt: str) -> Iterator[str]:
        for _ in count():
            for at in range(0, len(SECTION), LETTERS):
                yield SECTION[at : at + LETTERS]


def main() -> None:
    place, rate = sys.argv[1:]
    with tempfile.TemporaryFile() as log:
        settings = Settings.resolve(environ={}, seed=int(rate))
        client = WorkerClient(settings, log=log, engine="tests.tui.storyteller:Storyteller")
        ChatApp(client, place=Path(place)).run()
        asyncio.run(client.close())


if __name__ == "__main__":
    main()
