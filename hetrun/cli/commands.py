"""Commands as click knows them, with answers for words that are other programs'."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from hetrun.cli import words

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem] | list[str]]


class AliasedOption(click.Option):
    """An option that goes by other programs' names, too; help shows its own names."""

    def __init__(
        self,
        declarations: Sequence[str],
        *,
        aliases: Sequence[str],
        multiple: bool,
        metavar: str,
        help: str,
        shell_complete: Completer,
    ) -> None:
        names = [*declarations, *aliases]
        super().__init__(names, multiple=multiple, metavar=metavar, help=help, shell_complete=shell_complete)
        self.aliases = aliases

    def process_value(self, ctx: click.Context, value: Any) -> Any:  # noqa: ANN401 - click's types
        """Several values may stand in one word, with commas between them."""
        found = super().process_value(ctx, value)
        if not self.multiple:
            return found
        # The path of a file may hold a comma.
        words = [[word] if os.path.exists(word) else word.split(",") for word in found]
        return tuple(one for word in words for one in word)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Without the aliases."""
        every = self.opts
        self.opts = [name for name in every if name not in self.aliases]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = every


class UsualCommand(click.Command):
    """A command that knows what other programs call its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does it; an option that there is not is answered with the one that is meant."""
        known = self.flags(ctx)
        for word in {arg.partition("=")[0] for arg in args if arg.startswith("-")}:
            if word in words.OPTIONS and word not in known:
                # click would read -ngl as -n gl, unless there is an option of that name.
                self.params.append(_foreign(word))
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise no_such_option(error, self.main_flags(ctx)) from None
        finally:
            self.params = [param for param in self.params if not isinstance(param, _Foreign)]

    def flags(self, ctx: click.Context) -> set[str]:
        """All that it takes, aliases too."""
        return {flag for param in self.get_params(ctx) for flag in param.opts}

    def main_flags(self, ctx: click.Context) -> dict[str, str]:
        """The option that help shows, by each name that it goes by."""
        found: dict[str, str] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and not param.hidden:
                aliases = getattr(param, "aliases", ())
                shown = [flag for flag in param.opts if flag not in aliases]
                found |= dict.fromkeys((flag for flag in param.opts if flag.startswith("--")), shown[-1])
        return found


class _Foreign(click.Option):
    """Another program's option. Whether it takes a value does not matter: it ends the command."""


def _foreign(word: str) -> _Foreign:
    def refuse(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value:
            raise click.UsageError(f"No such option '{word}': {words.OPTIONS[word]}.", ctx)

    attributes: dict[str, Any] = {"expose_value": False, "is_eager": True, "hidden": True, "callback": refuse}
    return _Foreign([word, "foreign_word"], is_flag=False, flag_value="given", **attributes)


def no_such_option(error: click.NoSuchOption, known: Mapping[str, str]) -> click.UsageError:
    """The same, with the options that may have been meant."""
    name = error.option_name
    likely = list(dict.fromkeys(known[flag] for flag in words.close(name, known)))
    hint = f" Did you mean {' or '.join(likely[:2])}?" if likely else ""
    return click.UsageError(f"No such option '{name}'.{hint}", error.ctx)


def told_of_errors() -> click.Option:
    """-v of a command that has no more to say: it is for errors of our own only."""
    help_text = "show where an internal error happened"
    return click.Option(["-v", "--verbose"], is_flag=True, expose_value=False, help=help_text)


class InOrder(click.Group):
    """Lists its commands in the order in which they were added: the most used first. Each has -v, at least
    for errors of hetrun's own."""

    command_class = UsualCommand

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """One more; it gets -v unless it has it."""
        if not any(param.name == "verbose" for param in cmd.params):
            cmd.params.append(told_of_errors())
        super().add_command(cmd, name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In their order."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`help` and `version` as people type them elsewhere."""
        if args[:1] == ["help"]:
            args = [*args[1:2], "--help"]
        elif args == ["version"]:
            args = ["--version"]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name in words.OPTIONS or self._has(ctx, error.option_name):
                said = f"options come after a command: hetrun run {error.option_name} ..."
                raise click.UsageError(f"No such option '{error.option_name}': {said}", ctx) from None
            raise

    def _has(self, ctx: click.Context, flag: str) -> bool:
        run = self.get_command(ctx, "run")
        return run is not None and any(flag in param.opts for param in run.params)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command, also by the name that Ollama has for it; a sentence where there is none."""
        name = words.SAME_COMMAND.get(args[0], args[0])
        command = self.get_command(ctx, name)
        if command is None and not ctx.resilient_parsing:
            raise click.UsageError(self._instead(name, ctx), ctx)
        return name, command, args[1:]

    def _instead(self, name: str, ctx: click.Context) -> str:
        if name.startswith("-"):
            return f"No such option '{name}'"
        if name in words.COMMANDS:
            return f"No such command '{name}': {words.COMMANDS[name]}."
        likely = words.close(name, self.list_commands(ctx), words.CLOSE_COMMAND)
        if likely:
            return f"No such command '{name}'. Did you mean '{likely[0]}'?"
        if os.path.isfile(name) or name.partition(":")[0] in ("hf", "ollama", "lmstudio"):
            return f"No such command '{name}'. To run that model: hetrun run {name} \"a prompt\""
        if len(name.split()) > 1 or name.endswith("?"):
            return f'No such command. To ask a model: hetrun run "{name}"'
        return f"No such command '{name}'."
