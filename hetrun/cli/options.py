"""Options as click wants them, made from `hetrun.config.OPTIONS`: each is described once.

Values arrive as text and are parsed by `Settings`, so that the command line, the environment and the file
accept the same spellings and refuse with the same sentences.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from hetrun.cli import words
from hetrun.cli.commands import AliasedOption
from hetrun.cli.output import say
from hetrun.config import OPTIONS, Settings
from hetrun.errors import OptionError
from hetrun.option_types import SPECULATION, WordChoice
from hetrun.system.memory_info import machine_memory
from hetrun.system.units import format_bytes

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

FLAGS = ("deterministic", "offline", "strict", "no_server", "ollama", "context_shift", "keep_billing_header")
FILES = (
    *("model", "mmproj", "models", "plan", "prompt_cache", "slot_save_path", "media_path"),
    *("chat_template", "uds"),
)
REPEATED = ("backends", "models", "allowed_hosts", "media_domains", "cors_origins", "aliases")
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
    "mmproj",
)
TEMPLATE = ("chat_template", "chat_template_kwargs", "reasoning")
ANSWERING = ("max_tokens", "temperature", "seed", "system", *TEMPLATE)


def settings(
    *names: str, help: Mapping[str, str] | None = None, shows: Mapping[str, str] | None = None
) -> Decorator:
    """Options that become keywords of `Settings.resolve`; `help` and `shows` (the default in words) replace
    texts that do not fit a command."""

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            text, default = (help or {}).get(name, OPTIONS[name].help), (shows or {}).get(name)
            command = _option(name, text, default)(command)
        return command

    return decorate


def model(command: Command) -> Command:
    """-m and --offline; the model may also be the first word."""
    return _model(command, {})


def model_or_all(command: Command) -> Command:
    """The same for a command that takes all models if none is named."""
    return _model(command, {"model": "all that hetrun list shows"})


def _model(command: Command, shows: Mapping[str, str]) -> Command:
    @wraps(command)
    def call(named: str | None, **given: object) -> object:
        return command(**given | {"model": one_of(named, cast("str | None", given["model"]))})

    return click.argument("named", required=False, metavar="[MODEL]", shell_complete=files)(
        settings("model", "offline", shows=shows)(call)
    )


def only_model(command: Command) -> Command:
    """MODEL, which must be named; -m does that, too."""

    @wraps(command)
    def call(named: str | None, other: str | None, **given: object) -> object:
        if (found := one_of(named, other)) is None:
            raise click.UsageError("Missing argument 'MODEL'.", click.get_current_context())
        return command(model=placed(found), **given)

    return click.argument("named", required=False, metavar="MODEL", shell_complete=files)(
        also_by_option(call)
    )


def also_by_option(command: Command) -> Command:
    """-m of a command whose MODEL is an argument. Not listed: it is the same."""
    return click.option("-m", "--model", "other", hidden=True)(command)


def one_of(named: str | None, option: str | None) -> str | None:
    """The model that was named, in whichever way."""
    if named is not None and option is not None and named != option:
        raise OptionError(f"the models {named} and -m {option} are both given: use only one of them")
    return option if named is None else named


def _option(name: str, text: str, shows: str | None = None) -> Decorator:
    known = OPTIONS[name]
    if name in FLAGS:
        return click.option(*known.flags, name, is_flag=True, default=None, help=text)
    default = shows or known.shows or str(getattr(Settings, name))
    help_text = f"{text}  [default: {default}]"
    return click.option(
        *known.flags,
        name,
        cls=AliasedOption,
        aliases=words.ALIASES.get(name, ()),
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
    if isinstance(parse, WordChoice):
        words = parse.words
    elif name == "spec":
        words = (*SPECULATION, "draft:")
    elif name == "backends":
        from hetrun.system.entry_points import points  # on use: looking through packages takes milliseconds

        words = sorted(points("backends"))
    return [CompletionItem(word) for word in words if word.startswith(begun)]


def files(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """A model that is a word may be a file."""
    return completions("model", begun)


def as_json(command: Command) -> Command:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="print JSON")(command)


FULL, FULL_FLAG = "--json=full", "--full-json"  # as people write it, and as click can read it


def json_or_full(command: Command) -> Command:
    """--json, and --json=full; None, "short" or "full"."""
    short_help = f"print JSON; {FULL}: with the plan and the use of memory, too"
    command = click.option("--json", "as_json", flag_value="short", default=None, help=short_help)(command)
    return click.option(FULL_FLAG, "as_json", flag_value="full", hidden=True)(command)


def readable(args: Sequence[str]) -> list[str]:
    """Arguments in which click finds --json=full: it knows no option whose value may be left out, unless it
    takes the prompt after it for one."""
    end = args.index("--") if "--" in args else len(args)
    for arg in args[:end]:
        if arg.startswith("--json=") and arg != FULL:
            raise OptionError(f"{arg}: take --json, or {FULL} for the plan and the use of memory, too")
    return [FULL_FLAG if arg == FULL else arg for arg in args[:end]] + list(args[end:])


def verbose(command: Command) -> Command:
    """-v."""
    return click.option("-v", "--verbose", is_flag=True, callback=_say_more, help="show more on stderr")(
        command
    )


def _say_more(ctx: click.Context, param: click.Parameter, given: bool) -> bool:
    """What is decided on the way is said, too."""
    if given:
        from hetrun.cli import say_more  # on use: most commands say little

        ctx.call_on_close(say_more())
    return given


class MultiValueOption(click.Option):
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
            raise OptionError(f"{name} needs {flag}: add {flag}, or leave out {name}")


def refuse_beside(flag: str, given: Mapping[str, object], mend: str = "leave one of them out") -> None:
    """OptionError for options that mean nothing beside another one."""
    for name, value in given.items():
        if value not in (None, False, ()):
            raise OptionError(f"{name} cannot be combined with {flag}: {mend}")


def resolved_or_remote(given: Mapping[str, object]) -> Settings:
    """All options; a model of a server elsewhere (--url) is not looked for here."""
    settings = Settings.resolve(environ=None, **given)
    return settings if settings.url else resolved(given)


def resolved(given: Mapping[str, object]) -> Settings:
    """All options; a model that was named, and is no path, is looked for and perhaps downloaded."""
    settings = Settings.resolve(environ=None, **given)
    _remark_on_excess(settings)
    if settings.models:
        models = tuple([str(placed(place, settings.offline)) for place in settings.models])
        settings = replace(settings, models=models)
    kind, _, draft = settings.spec.partition(":")
    if draft:
        settings = replace(settings, spec=f"{kind}:{placed(draft, settings.offline)}")
    if settings.model is None or os.path.exists(os.path.expanduser(settings.model)):
        return settings
    from hetrun.cli.models import place_of

    pictures = settings.mmproj is None
    return replace(settings, model=str(place_of(settings.model, settings.offline, pictures)))


def _remark_on_excess(settings: Settings) -> None:
    """Say it where more is allowed than there is."""
    usable = len(os.sched_getaffinity(0))
    if settings.threads is not None and settings.threads > usable:
        say(
            f"--threads {settings.threads} is more than the {usable} hardware threads of this "
            "machine, which is slower"
        )
    if settings.ram is not None and settings.ram > (total := machine_memory()):
        ram, whole = format_bytes(settings.ram), format_bytes(total)
        say(f"--ram {ram} is more than the {whole} of this machine, so it limits nothing")


def placed_if_known(model: str) -> Path:
    """The same where the name is known; else what was typed, as a path."""
    path = Path(model)
    if os.path.exists(path):
        return path
    from hetrun.loader.hub.resolve import by_name
    from hetrun.loader.hub.stores import available

    return placed(model) if ":" in model or by_name(model, available()) else path


def placed(model: str, offline: bool = False) -> Path:
    """The path of a model that may be given by a name instead."""
    path = Path(model)
    if os.path.exists(path):
        return path
    from hetrun.cli.models import place_of

    return place_of(model, offline)
