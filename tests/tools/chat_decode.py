"""How fast a model answers in the chat, in turn with `hetrun run`: `python -m tests.tools.chat_decode`.

The chat runs in a terminal (tmux), with the machine beside it, and the screen is left alone while the answer
comes: each look at it would take a core's time as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

from tests.tui.terminal import Terminal

PROMPT = "Write a long story about a ship and its crew, with many details."
OPTIONS = ("--temp", "0", "--ignore-eos", "--spec", "off")
TOKENS = 400
SLOWEST = 100  # tokens a second: the screen is not looked at before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-r", "--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    print(f"load average {os.getloadavg()[0]:.2f}", file=sys.stderr)
    in_run()  # which measures this machine, if it was not measured yet
    ratios = []
    for _ in range(rounds):
        one, other = in_run(), in_chat()
        ratios.append(other / one)
        print(f"run {one:.1f}, chat {other:.1f} tokens/s: {ratios[-1]:.3f}")
    print(f"median {median(ratios):.3f} of {rounds}; load average {os.getloadavg()[0]:.2f}")
    return 0


def in_run() -> float:
    """Tokens a second of an answer in a process of its own."""
    command = [sys.executable, "-m", "hetrun", "run", PROMPT, "--json", "-n", str(TOKENS), *OPTIONS]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["timings"]["decode_tok_s"])


def in_chat() -> float:
    """The same of an answer in the chat, as it is kept with it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Terminal(Path(folder), "-n", str(TOKENS), *OPTIONS, size=(130, 40)) as terminal,
    ):
        terminal.until("tokens of context")
        time.sleep(0.5)
        terminal.type(PROMPT)
        terminal.keys("Enter")
        time.sleep(TOKENS / SLOWEST)
        terminal.until("stopped at the limit")
        (place,) = Path(folder).rglob("conversations.db")
        with closing(sqlite3.connect(place)) as kept:
            rows = kept.execute("SELECT figures FROM turn WHERE role = 'assistant'").fetchall()
        terminal.keys("C-q")
        time.sleep(0.5)
    return float(json.loads(rows[-1][0])["decode_tok_s"])


if __name__ == "__main__":
    sys.exit(main())
