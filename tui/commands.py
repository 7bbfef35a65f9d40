"""What can be written after a slash; the help screen and the list above the box show the same table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import NamedTuple

from hetrun.errors import UserError


class ChatCommand(NamedTuple):
    """A name, what may follow it, and what it does."""

    name: str
    argument: str  # "" for none, "[X]" where it may be left out
    help: str


COMMANDS = (
    ChatCommand("new", "", "begin a new conversation"),
    ChatCommand("system", "[TEXT]", "what the model is told first"),
    ChatCommand("set", "NAME VALUE", "sampling, as: /set temperature 0.2"),
    ChatCommand("regenerate", "", "answer the last message again"),
    ChatCommand("edit", "", "change the last message"),
    ChatCommand("fork", "", "a new conversation like this one"),
    ChatCommand("copy", "", "the last answer to the clipboard"),
    ChatCommand("attach", "FILE", "send a text file or a picture with it"),
    ChatCommand("rename", "TITLE", "call the conversation so"),
    ChatCommand("delete", "", "delete the conversation"),
    ChatCommand("export", "FILE", "write it as Markdown or JSON"),
    ChatCommand("import", "FILE", "read conversations from JSON"),
    ChatCommand("settings", "", "system prompt, sampling and presets"),
    ChatCommand("preset", "NAME", "system prompt and sampling of a preset"),
    ChatCommand("model", "[NAME]", "another model"),
    ChatCommand("whatif", "", "try other memory, context, threads"),
    ChatCommand("template", "", "the exact prompt that is sent"),
    ChatCommand("tokens", "", "how sure the model was of each token"),
    ChatCommand("machine", "", "show or hide the machine"),
    ChatCommand("conversations", "", "show or hide the conversations"),
    ChatCommand("theme", "[NAME]", "other colours"),
    ChatCommand("help", "", "keys and commands"),
    ChatCommand("quit", "", "leave"),
)
_BY_NAME = {command.name: command for command in COMMANDS}
# What other programs call them.
ALIASES = {"exit": "quit", "bye": "quit", "q": "quit", "clear": "new", "?": "help"}


class Offer(NamedTuple):
    """What the text in the box may become."""

    text: str
    label: str
    help: str
    is_whole: bool  # nothing has to follow it


def is_command(text: str) -> bool:
    """Two slashes are one that is sent."""
    return text.startswith("/") and not text.startswith("//")


def command_of(text: str) -> tuple[ChatCommand, str]:
    """The command that a text is, and what comes after it."""
    name, argument = _divided(text)
    command = _BY_NAME.get(ALIASES.get(name, name))
    if command is None:
        known = [c.name for c in COMMANDS if name and c.name.startswith(name)]
        known = known or get_close_matches(name, [*_BY_NAME, *ALIASES], n=2)
        hint = f"did you mean /{' or /'.join(known[:3])}?" if known else "/help lists the commands"
        raise UserError(f"there is no command /{name}: {hint} (// sends a text that begins with a slash)")
    argument = argument.strip()
    if argument and not command.argument:
        raise UserError(f"/{name} takes no argument")
    if not argument and command.argument and not command.argument.startswith("["):
        raise UserError(f"/{name} needs an argument: /{name} {command.argument} ({command.help})")
    return command, argument


def _divided(text: str) -> tuple[str, str]:
    words = text[1:].split(maxsplit=1)
    return (words[0] if words else ""), (words[1] if len(words) > 1 else "")


def offers(text: str, arguments: Callable[[str], Iterable[tuple[str, str]]]) -> list[Offer]:
    """What a text that is a command so far may become. `arguments`: what may follow the command of a name,
    with a word on each."""
    if not is_command(text) or "\n" in text:
        return []
    name, space, rest = text[1:].partition(" ")
    if not space:
        return _commands(name)
    command = _BY_NAME.get(name)
    if command is None or " " in rest:
        return []
    more = command.argument.strip("[]").partition(" ")[2]
    known = [(value, what) for value, what in arguments(name) if value.startswith(rest)]
    return [Offer(f"/{name} {value}{' ' * bool(more)}", value, what, not more) for value, what in known]


def _commands(begun: str) -> list[Offer]:
    """Those whose names begin so, the one that is called so first; those of other programs' names last."""
    found = sorted((c for c in COMMANDS if c.name.startswith(begun)), key=lambda c: c.name != begun)
    offered = [
        Offer(
            f"/{c.name}{' ' * bool(c.argument)}",
            f"/{c.name} {c.argument}".rstrip(),
            c.help,
            not c.argument,
        )
        for c in found
    ]
    others = [name for name in ALIASES if begun and name.startswith(begun) and ALIASES[name] != begun]
    return offered + [Offer(f"/{name}", f"/{name}", _BY_NAME[ALIASES[name]].help, True) for name in others]
