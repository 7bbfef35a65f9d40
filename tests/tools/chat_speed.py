"""What the chat costs while an answer comes: `python -m tests.tools.chat_speed`.

The app runs in a terminal (tmux) over a scripted engine in a process of its own, which gives 200 tokens of
Markdown a second behind a conversation of 10,000 tokens. What its process takes is counted by the kernel;
keys are typed all the while, and all of them must be in the prompt at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from hetrun.tui.store.store import ConversationStore
from tests.tui.storyteller import LETTERS, SECTION
from tests.tui.terminal import Terminal

TICKS = os.sysconf("SC_CLK_TCK")
KEYS = "abcdefghij" * 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000, help="of the conversation before the answer")
    parser.add_argument("--rate", type=int, default=200, help="tokens a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--size", default="120x40")
    options = parser.parse_args()
    width, _, height = options.size.partition("x")
    folder = Path(tempfile.mkdtemp())
    place = folder / "conversations.db"
    try:
        fill(place, options.tokens)
        print(f"load average {os.getloadavg()[0]:.2f}", file=sys.stderr)
        arguments = (str(place), str(options.rate))
        program = ("tests.tui.storyteller",)
        with Terminal(folder, *arguments, size=(int(width), int(height)), program=program) as terminal:
            share, escape_s, lost = measured(terminal, options.seconds)
    finally:
        shutil.rmtree(folder)
    print(
        f"{100 * share:.1f} % of a core at {options.rate} tokens/s behind {options.tokens} tokens; "
        f"Escape to silence {1000 * escape_s:.0f} ms; {lost} of {len(KEYS)} keys lost"
    )
    return 0


def fill(place: Path, tokens: int) -> None:
    """A conversation that is as long."""
    store = ConversationStore(place)
    number = store.begin("Long").id
    asked = store.add(number, None, "user", "Tell me everything.")
    store.add(number, asked.id, "assistant", SECTION * (tokens * LETTERS // len(SECTION)))
    store.close()


def measured(terminal: Terminal, seconds: float) -> tuple[float, float, int]:
    """The app's share of a core, the time from Escape to the last word, and keys that were lost."""
    terminal.until("tokens of context")
    terminal.keys("C-f")
    terminal.keys("Enter")
    terminal.until("r Rename")
    terminal.keys("Down", "Enter")
    terminal.until("return x + 1")
    terminal.keys("F2")
    terminal.type("go on")
    terminal.keys("Enter")
    terminal.until("Esc Stop")
    time.sleep(2.0)
    pid, begun, before = terminal.pid, time.monotonic(), cpu_s(terminal.pid)
    for key in KEYS:
        terminal.type(key)
        time.sleep(seconds / len(KEYS))
    share = (cpu_s(pid) - before) / (time.monotonic() - begun)
    pressed = time.monotonic()
    terminal.keys("Escape")
    while "stopped" not in terminal.screen:
        pass
    escape_s = time.monotonic() - pressed
    return share, escape_s, 0 if KEYS in terminal.screen else len(KEYS)


def cpu_s(pid: int) -> float:
    """Seconds that a process has had, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    sys.exit(main())
