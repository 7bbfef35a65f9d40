"""Options as click wants them, made from `hetrun.config.OPTIONS`: each is described once.

Values arrive as text and are parsed by `Settings`, so that the command line, the environment and the file
accept the same spellings and refuse with the same sentences.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetrun.config import OPTIONS, Settings
from hetrun.errors import OptionError
from hetrun.option_types import SPECULATION, Choice

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

FLAGS = ("deterministic", "offline", "strict", "no_server")
FILES = ("model", "models", "plan", "prompt_cache", "chat_template", "uds")
REPEATED = ("backends", "models", "allowed_hosts", "cors_origins")
RUNNING = (
    "ctx",
    "ram",
    "vram",
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
    return click.option(
        *known.flags,
        name,
        multiple=name in REPEATED,
        metavar="VALUE",
        help=help_text,
        shell_complete=lambda context, parameter, begun: completions(name, begun),
    )


def completions(name: str, begun: str) -> list[CompletionItem]:
    """What an option's value may go on with, for a shell."""
    from click.shell_completion import CompletionItem

    parse = OPTIONS[name].parse
    if name in FILES:
        return [CompletionItem(begun, type="file")]
    words: Sequence[str] = ()
    if isinstance(parse, Choice):
        words = parse.words
    elif name == "spec":
        words = (*SPECULATION, "draft:")
    elif name == "backends":
        from hetrun.system.entry_points import points  # on use: looking through packages takes milliseconds

        words = sorted(points("backends"))
    return [CompletionItem(word) for word in words if word.startswith(begun)]


def as_json(command: Command) -> Command:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="print JSON")(command)


def verbose(command: Command) -> Command:
    """-v."""
    return click.option("-v", "--verbose", is_flag=True, callback=_say_more, help="say more on stderr")(
        command
    )


def _say_more(ctx: click.Context, param: click.Parameter, given: bool) -> bool:
    """What is decided on the way is said, too."""
    if given:
        from hetrun.cli import say_more  # on use: most commands say little

        ctx.call_on_close(say_more())
    return given


def told_of_errors() -> click.Option:
    """-v of a command that has no more to say: it is for errors of our own only."""
    help_text = "on an error of hetrun's own: where it was"
    return click.Option(["-v", "--verbose"], is_flag=True, expose_value=False, help=help_text)


class Several(click.Option):
    """An option with all that follows it up to the next one; it may also be repeated."""


def spread(arguments: Sequence[str], flags: Container[str]) -> list[str]:
    """`--workers A B` as click reads it: `--workers A --workers B`."""
    found: list[str] = []
    flag = ""
    for argument in arguments:
        if argument.startswith("-"):
            flag = argument if argument in flags else ""
        elif flag and found[-1] != flag:
            found.append(flag)
        found.append(argument)
    return found


def refuse_without(flag: str, given: Mapping[str, object]) -> None:
    """OptionError for options that mean nothing without another one."""
    for name, value in given.items():
        if value not in (None, False, ()):
            raise OptionError(f"{name} goes with {flag}: give it, or leave {name} out")


def refuse_with(flag: str, given: Mapping[str, object], mend: str) -> None:
    """OptionError for options that mean nothing beside another one."""
    for name, value in given.items():
        if value not in (None, False, ()):
            raise OptionError(f"{name} does not go with {flag}: {mend}")


def resolved_or_remote(given: Mapping[str, object]) -> Settings:
    """All options; a model of a server elsewhere (--url) is not looked for here."""
    settings = Settings.resolve(environ=None, **given)
    return settings if settings.url else resolved(given)


def resolved(given: Mapping[str, object]) -> Settings:
    """All options; a model that was named, and is no path, is looked for and perhaps downloaded."""
    settings = Settings.resolve(environ=None, **given)
    if settings.models:
        models = tuple([str(placed(Path(place), settings.offline)) for place in settings.models])
        settings = replace(settings, models=models)
    kind, _, draft = settings.spec.partition(":")
    if draft:
        settings = replace(settings, spec=f"{kind}:{placed(Path(draft), settings.offline)}")
    if settings.model is None or os.path.exists(os.path.expanduser(settings.model)):
        return settings
    from hetrun.cli.models import place_of

    return replace(settings, model=str(place_of(Path(settings.model), settings.offline)))


def placed(model: Path, offline: bool = False) -> Path:
    """The path of a model that may be given by a name instead."""
    if os.path.exists(model) or ":" not in str(model):
        return model
    from hetrun.cli.models import place_of

    return place_of(model, offline)
