"""Keys and commands, and how to read the machine."""

from __future__ import annotations

from textual.content import Content

from hetrun.tui.commands import COMMANDS
from hetrun.tui.screens.dialogs import Read

KEYS = (
    ("Enter / Ctrl+J", "send / begin a line"),
    ("Escape", "stop the answer"),
    ("Up, Down", "earlier messages, at the first and last line"),
    ("Ctrl+N", "a new conversation"),
    ("F2, Ctrl+F", "conversations; search them (r renames, d deletes, x exports)"),
    ("F3", "the machine"),
    ("F4", "what if: context, memory, threads"),
    ("F5", "system prompt, sampling, presets"),
    ("F6", "another model"),
    ("F7", "the exact prompt that is sent"),
    ("F8", "colours"),
    ("Ctrl+O", "attach a text file"),
    ("Ctrl+R", "answer the last message again"),
    ("Ctrl+Up, Tab", "walk through the turns (Up and Down); Enter or a second click opens a turn's menu"),
    ("  e r f", "edit and send again; answer again; fork"),
    ("  y c t", "copy; copy code; show the thought"),
    ("  i", "probabilities and alternatives of each token"),
    ("  Left, Right", "earlier and later versions of a turn"),
    ("Ctrl+Q", "leave; every conversation is kept"),
)
MACHINE = (
    ("layers", "a cell for each layer; its colour is the backend that computes it, shades come from disk"),
    ("tokens per second", "decode: as the answer comes; prefill: as your message is read"),
    ("context", "how much of what the model can see is used, and how much of it was kept from before"),
    ("memory", "what the engine takes against what it was granted, by what it is for"),
    ("links", "weights that cross to a GPU for every pass, and how long the CPU waits for it"),
    ("from disk", "weights that do not fit: how fast they come, and how long passes wait for them"),
    ("why the plan changed", "what hetrun measured, and what it decided"),
)


class HelpScreen(Read):
    """To read, and to close again."""

    def __init__(self) -> None:
        commands = [(f"/{c.name} {c.argument}".rstrip(), c.help) for c in COMMANDS]
        parts = [
            *_table("Keys", KEYS),
            *_table("Commands", commands),
            *_table("The machine, at the right", MACHINE),
        ]
        super().__init__("hetrun chat", Content("\n").join(parts))


def _table(title: str, rows: object) -> list[Content]:
    lines = [Content.styled(title, "bold")]
    assert isinstance(rows, (tuple, list)), "rows of two texts"
    lines += [Content.assemble((f"  {name:<22} ", "$primary"), what) for name, what in rows]
    return [*lines, Content("")]
