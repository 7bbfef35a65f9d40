"""The pictures of docs/guide.md: `python -m tests.tools.guide_pictures [NAME ...]` draws them again.

Terminals show real commands with the demo model, the chat a real conversation. `--sweep MODEL` draws the
chart of `hetrun bench` over several budgets instead, which takes minutes and wants a machine at rest.
Packages that register something with hetrun are in the pictures, too: draw them where there are none.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text
from textual.widgets import Input

from hetrun.client.engine_client import WorkerClient
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings
from hetrun.tui.app import ChatApp
from hetrun.tui.host import Doors
from hetrun.tui.screens.dialogs import Choose
from hetrun.tui.screens.help import HelpScreen
from hetrun.tui.screens.whatif import WhatIfScreen
from tests.tools.make_model import smollm2_file
from tests.tools.pictures import settled
from tests.tui.driver import Driver

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "docs" / "pictures"
MOST_BYTES = 60_000  # of a picture: pages should open at once
MOST_COLUMNS = 110
FRAME = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif }}
{styles}
</style>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
# Arguments, and the first of the lines that are not shown, if not all are.
TERMINALS: dict[str, tuple[str, str]] = {
    "plan-from-disk": ("plan -c 2048 --ram 200MiB", ""),
    "devices": ("devices", ""),
    "doctor": ("doctor", ""),
    "inspect": ("inspect model.gguf", "metadata"),
}
SWEEP = "-c 2048 --ram 15%,25%,35%,45% -n 32 -r 3"
QUESTION = "Write a Python function that adds two numbers, and say what it does."
SECOND = "Write one sentence about the sea."


def slim(svg: str) -> str:
    """Without fonts from elsewhere, and without a frame for each line, which only too long ones need."""
    svg = re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<clipPath .*?</clipPath>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' clip-path="[^"]*"', "", svg)
    svg = re.sub(r"\s*<defs>\s*</defs>", "", svg)
    svg = re.sub(r"terminal(-\d+)?-", "t-", svg)  # a picture by itself has no other's names beside it
    svg = svg.replace(' shape-rendering="crispEdges"', "").replace(
        "<style>", "<style> rect { shape-rendering: crispEdges }", 1
    )
    return re.sub(r"[ \t]+\n", "\n", svg)


def private(text: str, home: Path) -> str:
    """What is this machine's own, as a reader has it: a home, a checkout in it, a kernel of some version."""
    for path, instead in ((REPOSITORY, "~/hetrun"), (home.resolve(), "~"), (home, "~")):
        text = text.replace(str(path), instead)
    text = text.replace(sys.prefix, "~/hetrun/.venv")
    return re.sub(r"Linux \S+ on", "Linux ... on", text)


def terminal(arguments: str, until: str, home: Path) -> str:
    """A command and what it prints, as SVG."""
    command = [sys.executable, "-m", "hetrun", *arguments.split()]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True)
    lines = private(done.stdout, home).rstrip().split("\n")
    if until:
        lines = [*lines[: lines.index(until)], "..."]
    shown = [f"$ hetrun {arguments}", *lines]
    width = min(max(map(len, shown)) + 1, MOST_COLUMNS)
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text.assemble(("$ ", "dim"), (shown[0][2:], "bold")))
    for line in lines:
        console.print(Text(line, no_wrap=True, overflow="ellipsis"))
    return slim(console.export_svg(title="", code_format=FRAME, unique_id="t"))


# --- the chat


async def talked(chat: Driver) -> None:
    """Two conversations, the second of which is shown."""
    await chat.exchange(SECOND)
    await chat.new()
    await chat.exchange(QUESTION)


async def what_if(chat: Driver) -> None:
    await chat.exchange(SECOND)
    await chat.press("f4")
    await chat.opened(WhatIfScreen)
    chat.front.query_one("#ctx", Input).value = "32768"


async def help_(chat: Driver) -> None:
    await chat.press("f1")
    await chat.opened(HelpScreen)


async def turn(chat: Driver) -> None:
    await chat.exchange(SECOND)
    await chat.select(1)
    await chat.press("enter")
    await chat.opened(Choose)


Scene = Callable[[Driver], Awaitable[None]]
CHATS: dict[str, tuple[Scene, tuple[int, int]]] = {
    "chat": (talked, (130, 30)),
    "chat-what-if": (what_if, (80, 26)),
    "chat-help": (help_, (80, 30)),
    "chat-turn": (turn, (80, 24)),
}


async def chat(scene: Scene, size: tuple[int, int], home: Path) -> str:
    """A scene with the demo model, as SVG."""
    chosen = Settings.resolve(environ={})
    with tempfile.TemporaryFile() as log:
        client = WorkerClient(chosen, log=log)
        params = SamplingParams(temperature=0.0, max_tokens=120)
        app = ChatApp(client, params, doors=Doors(reopen=lambda changes, tell: lambda: client))
        async with app.run_test(size=size) as pilot:
            driver = Driver(app, pilot)
            await driver.until(lambda: driver.screen.parts.engine.info is not None)
            await scene(driver)
            await asyncio.sleep(1)  # what the machine does is looked at once a second
            drawn = await settled(driver)
        await client.close()
    return slim(private(drawn, home))


# --- all of them


@contextmanager
def at_home(environ: MutableMapping[str, str]) -> Iterator[Path]:
    """A home in which there is nothing but the demo model, for this process and those that it starts."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "model.gguf").symlink_to(smollm2_file())
        for name in [name for name in environ if name.startswith(("HETRUN_", "HF_", "XDG_", "OLLAMA_"))]:
            del environ[name]
        environ.update({"HOME": folder, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "90"})
        yield home


def sweep(model: Path) -> None:
    """The chart."""
    command = [sys.executable, "-m", "hetrun", "bench", "-m", model.name, *SWEEP.split()]
    subprocess.run([*command, "--picture", str(FOLDER / "sweep.svg")], cwd=model.parent, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join([*TERMINALS, *CHATS])}")
    parser.add_argument("--sweep", type=Path, metavar="MODEL", help="draw the chart, with this model")
    options = parser.parse_args()
    if unknown := set(options.names) - {*TERMINALS, *CHATS}:
        parser.error(f"there is no picture {', '.join(sorted(unknown))}")
    FOLDER.mkdir(exist_ok=True)
    if options.sweep:
        sweep(options.sweep.resolve())
        return 0
    with at_home(os.environ) as home:
        for name in options.names or [*TERMINALS, *CHATS]:
            print(name, file=sys.stderr)
            if name in TERMINALS:
                drawn = terminal(*TERMINALS[name], home)
            else:
                drawn = asyncio.run(chat(*CHATS[name], home))
            if len(drawn.encode()) > MOST_BYTES:
                raise SystemExit(f"{name}.svg has {len(drawn.encode()):,} bytes, more than {MOST_BYTES:,}")
            (FOLDER / f"{name}.svg").write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
