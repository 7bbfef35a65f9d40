"""What can be written behind a slash; the help screen and the completion show the same table."""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

from hetrun.errors import UserError


class Command(NamedTuple):
    """A name, what may stand behind it, and what it does."""

    name: str
    argument: str  # "" for none, "[X]" where it may be left out
    help: str


COMMANDS = (
    Command("new", "", "begin a new conversation"),
    Command("system", "[TEXT]", "what the model is told first; nothing takes it away"),
    Command("set", "NAME VALUE", "sampling of this conversation, as: set temperature 0.2"),
    Command("regenerate", "", "answer the last message once more"),
    Command("edit", "", "change the last message and send it again"),
    Command("fork", "", "a new conversation that begins like this one"),
    Command("copy", "", "the last answer to the clipboard"),
    Command("attach", "FILE", "put a text file behind the next message"),
    Command("rename", "TITLE", "call the conversation so"),
    Command("delete", "", "delete the conversation"),
    Command("export", "FILE", "write it as Markdown, or as JSON (FILE.json)"),
    Command("import", "FILE", "read conversations from JSON"),
    Command("settings", "", "system prompt, sampling and presets"),
    Command("preset", "NAME", "system prompt and sampling of a preset"),
    Command("model", "[NAME]", "another model"),
    Command("whatif", "", "what other memory, context or threads would mean"),
    Command("template", "", "the exact prompt that is sent"),
    Command("tokens", "", "probabilities and alternatives in the last answer"),
    Command("machine", "", "show or hide the machine"),
    Command("conversations", "", "show or hide the conversations"),
    Command("theme", "[NAME]", "other colours"),
    Command("help", "", "keys and commands"),
    Command("quit", "", "leave"),
)
_BY_NAME = {command.name: command for command in COMMANDS}


def is_command(text: str) -> bool:
    """Two slashes are one that is sent."""
    return text.startswith("/") and not text.startswith("//")


def command_of(text: str) -> tuple[Command, str]:
    """The command that a text is, and what stands behind it."""
    name, _, argument = text[1:].partition(" ")
    command = _BY_NAME.get(name.strip())
    if command is None:
        known = completions(name) or get_close_matches(name, _BY_NAME, n=2)
        hint = f"did you mean /{' or /'.join(known[:3])}?" if known else "/help shows what there is"
        raise UserError(f"there is no command /{name}: {hint} (// sends a text that begins with a slash)")
    argument = argument.strip()
    if argument and not command.argument:
        raise UserError(f"/{name} takes nothing behind it")
    if not argument and command.argument and not command.argument.startswith("["):
        raise UserError(f"/{name} needs something behind it: /{name} {command.argument}")
    return command, argument


def completions(begun: str) -> list[str]:
    """Names that begin so."""
    return [command.name for command in COMMANDS if command.name.startswith(begun)]
