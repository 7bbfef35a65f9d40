"""Keys and commands, and how to read the machine."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap

from textual.content import Content

from hetrun.tui.commands import COMMANDS
from hetrun.tui.screens.dialogs import TextView

WIDTH = 44  # of what stands at the right: all of it has room in 80 columns
LEFT, AROUND = 27, 9  # columns of the longest name, and of the dialog around the text
KEYS = (
    ("Enter / Ctrl+J", "send / start a new line"),
    ("Escape", "stop the answer"),
    ("Up, Down", "earlier messages, at the first and last line"),
    ("Ctrl+N", "a new conversation"),
    ("F2, Ctrl+F", "conversations; search them (Right: rename, export, delete)"),
    ("F3", "the machine"),
    ("F4", "what if: context, memory, threads"),
    ("F5", "system prompt, sampling, presets"),
    ("F6", "another model"),
    ("F7", "the exact prompt that is sent"),
    ("F8", "colours"),
    ("Ctrl+O", "attach a text file or a picture; a picture's path in a message does, too"),
    ("Ctrl+V", "attach the picture that was copied"),
    ("Backspace", "in an empty box: take away what was attached last (or click on its ✕)"),
    ("Ctrl+R", "answer the last message again"),
    ("Ctrl+Up, Tab", "move through the turns (Up and Down; Escape goes back to your message)"),
    (
        "  Enter",
        "a menu for the turn: edit, answer again, fork, copy, tokens; a second click opens it, too",
    ),
    ("  Left, Right", "earlier and later versions of a turn"),
    ("  letters", "start a message, wherever you type them"),
    ("/", "commands: Up, Down and Enter choose, Tab completes, Escape closes the list"),
    ("Ctrl+Q", "leave (also Ctrl+C, twice); conversations are saved"),
)
ANSWERS = (
    ("9 of 25 accepted", "drafted tokens that were right; each one saved a pass (--spec)"),
    ("version 2 of 3", "a turn that was edited or answered again; Left and Right show the others"),
)
MACHINE = (
    (
        "layers",
        "one cell each, from the embedding to the output; upper row: reading prompts, lower row: writing",
    ),
    ("  its colour", "the backend that computes it: llamacpp and amx on the CPU, cuda on a GPU"),
    ("  its shade", "the lighter, the more of it is read from disk, or copied over the link, for every pass"),
    (
        "tokens per second",
        "decode: how fast answers are written; prefill: how fast messages are read. Full height: the recent "
        "maximum",
    ),
    ("context", "how much of it this conversation fills"),
    ("cache hits", "tokens of the last prompt that were in the prefix cache, and were not read again"),
    ("memory", "how much of the limit is in use; below, for what:"),
    ("  interpreter, libraries", "Python, and the libraries that compute"),
    ("  weights", "those that stay in memory"),
    ("  copies for a backend", "weights a second time, in a form in which that backend is faster"),
    ("  KV", "keys and values: what the model remembers of texts"),
    ("  graphs and scratch", "memory that passes work in"),
    ("  streaming window", "room for weights that are read from disk"),
    ("  helper processes", "those that apply the model's chat template"),
    ("  reserve", "part of the limit that is left free, for what changes"),
    ("links", "how fast weights are copied to a GPU, and how long the CPU waits for it"),
    (
        "from disk",
        "weights that don't fit: how fast they are read, how much for each pass (one token, or a part of a "
        "prompt), and how long passes wait for them",
    ),
    ("why the plan changed", "what hetrun measured and decided, and what you applied"),
)


class HelpScreen(TextView):
    """To read, and to close again."""

    def __init__(self, columns: int) -> None:
        """`columns`: of the terminal."""
        commands = [(f"/{c.name} {c.argument}".rstrip(), c.help) for c in COMMANDS]
        width = max(min(WIDTH, columns - AROUND - LEFT), 10)
        parts = [
            *_table("Keys", KEYS, width),
            *_table("Commands", commands, width),
            *_table("Below answers", ANSWERS, width),
            *_table("The machine, at the right", MACHINE, width),
        ]
        super().__init__("hetrun chat", Content("\n").join(parts))


def _table(title: str, rows: Iterable[tuple[str, str]], width: int) -> list[Content]:
    lines = [Content.styled(title, "bold")]
    for name, what in rows:
        for i, line in enumerate(wrap(what, width)):
            lines.append(Content.assemble((f"  {'' if i else name:<22} ", "$primary"), line))
    return [*lines, Content("")]
