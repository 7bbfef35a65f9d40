"""Options as click wants them, made from `hetrun.config.OPTIONS`: each is described once.

Values arrive as text and are parsed by `Settings`, so that the command line, the environment and the file
accept the same spellings and refuse with the same sentences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hetrun.config import OPTIONS, Settings

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

FLAGS = ("deterministic", "strict")
REPEATED = ("backends", "models", "allowed_hosts", "cors_origins")
RUNNING = (
    "ctx",
    "ram",
    "threads",
    "backends",
    "ubatch",
    "kv_type",
    "precision",
    "deterministic",
    "spec",
    "planner",
    "streaming",
    "plan",
)
ANSWERING = ("max_tokens", "temperature", "seed", "system", "chat_template")


def settings(*names: str) -> Decorator:
    """Options that become keywords of `Settings.resolve`."""

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            command = _option(name)(command)
        return command

    return decorate


def _option(name: str) -> Decorator:
    known = OPTIONS[name]
    if name in FLAGS:
        return click.option(*known.flags, name, is_flag=True, default=None, help=known.help)
    default = known.shows or str(getattr(Settings, name))
    help_text = f"{known.help}  [default: {default}]"
    return click.option(*known.flags, name, multiple=name in REPEATED, metavar="VALUE", help=help_text)


def as_json(command: Command) -> Command:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="print JSON")(command)


def verbose(command: Command) -> Command:
    """-v."""
    return click.option("-v", "--verbose", is_flag=True, help="say more on stderr")(command)
