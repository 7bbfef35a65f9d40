"""Keys and commands, and how to read the machine."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap

from textual.content import Content

from hetrun.tui.commands import COMMANDS
from hetrun.tui.screens.dialogs import Read

WIDTH = 44  # of what stands at the right: all of it has room in 80 columns
LEFT, AROUND = 27, 9  # columns of the longest name, and of the dialog around the text
KEYS = (
    ("Enter / Ctrl+J", "send / begin a line"),
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
    ("Ctrl+O", "attach a text file"),
    ("Ctrl+R", "answer the last message again"),
    ("Ctrl+Up, Tab", "walk through the turns (Up and Down; Escape goes back to your message)"),
    (
        "  Enter",
        "what can be done with a turn: edit, answer again, fork, copy, tokens; so does a second click",
    ),
    ("  Left, Right", "earlier and later versions of a turn"),
    ("  letters", "begin a message, wherever they are typed"),
    ("/", "commands: Up, Down and Enter choose, Tab completes, Escape closes the list"),
    ("Ctrl+Q", "leave (so does Ctrl+C, twice); every conversation is kept"),
)
ANSWERS = (
    ("accepted 36 % of 25", "guesses of what comes next that were right: each saved a pass (--spec)"),
    ("version 2 of 3", "a turn that was edited or answered again; Left and Right show the others"),
)
MACHINE = (
    ("layers", "a cell for each, the embedding first, the output last; reading prompts, and writing"),
    ("  its colour", "the backend that computes it: llamacpp and amx on the CPU, cuda on a GPU"),
    ("  its shade", "a part comes from disk, or over the link, for every pass; the lighter, the more"),
    (
        "tokens per second",
        "decode: as answers come; prefill: as messages are read. Full height: the most of late",
    ),
    ("context", "how much of what the model can see is used"),
    ("cache hits", "tokens of the last prompt that were known from before, and not read again"),
    ("memory", "what the engine has, of what it was granted; below it what that is for:"),
    ("  interpreter, libraries", "Python, and what computes"),
    ("  weights", "the model's, as far as they stay in memory"),
    ("  copies for a backend", "weights once more, in the form in which that backend is faster"),
    ("  KV", "keys and values: what the model remembers of texts"),
    ("  graphs and scratch", "what passes work in"),
    ("  streaming window", "room for weights that come from disk"),
    ("  helper processes", "those that write prompts by the model's template"),
    ("  reserve", "granted, but left free for what comes and goes"),
    ("links", "how fast weights cross to a GPU, and how long the CPU waits for it"),
    (
        "from disk",
        "weights that do not fit: how fast they come, how many for each pass (one token, or a part of a "
        "prompt), and how long passes wait for them",
    ),
    ("why the plan changed", "what hetrun measured and decided, and what you applied"),
)


class HelpScreen(Read):
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
