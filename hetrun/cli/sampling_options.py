"""Options of sampling under llama.cpp's names: one table makes the flags, their help and `SamplingParams`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import click

from hetrun.cli import words
from hetrun.cli.commands import UsualCommand
from hetrun.cli.options import FULL_FLAG, MultiValueOption, readable, spread
from hetrun.client import sampler_plugins
from hetrun.client.sampler_plugins import Parameter
from hetrun.client.sampling_params import CHECKS, MOST_STRUCTURE, STRUCTURES, SamplingParams
from hetrun.config import OPTIONS, Settings
from hetrun.errors import OptionError
from hetrun.option_types import ANSWER_LENGTH, refused
from hetrun.system.files import read_text

HEADING = "Sampling (defaults in brackets)"
ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
BIAS = re.compile(r"\s*([0-9]{1,10})\s*([+-].+)")


# --- from what was typed to a value; what it may be is checked where SamplingParams checks it


def number(where: str, typed: str) -> object:
    """A number; another text is left for the check to refuse."""
    for kind in (int, float):
        try:
            return kind(typed)
        except ValueError:
            continue
    return typed


def as_typed(where: str, typed: object) -> object:
    """What click made of it."""
    return typed


def texts(where: str, typed: tuple[str, ...]) -> tuple[str, ...]:
    """Texts in which \\n is a line end, as llama.cpp reads them: not every shell can type one."""
    return tuple(re.sub(r"\\([nrt\\'\"])", lambda found: ESCAPED[found[1]], text) for text in typed)


def breakers(where: str, typed: tuple[str, ...]) -> tuple[str, ...]:
    """Texts; "none" forgets those before it."""
    after = max((i + 1 for i, text in enumerate(typed) if text == "none"), default=0)
    return texts(where, typed[after:])


def biases(where: str, typed: tuple[str, ...]) -> dict[int, float]:
    """TOKEN+BIAS or TOKEN-BIAS each; -inf forbids the token."""
    found = {}
    for text in typed:
        match = BIAS.fullmatch(text)
        bias = number(where, match[2]) if match else None
        if match is None or not isinstance(bias, int | float) or math.isnan(bias):
            raise OptionError(f"{where} must be like 15043+1, 15043-0.5 or 15043-inf, not {text!r}")
        found[int(match[1])] = bias
    return found


def structure(where: str, typed: str) -> str:
    """The schema or grammar in a file, unless it was typed itself."""
    return typed if _is_structure(typed) else _content(where, typed)


def _is_structure(typed: str) -> bool:
    # No file is called so: a JSON object, a rule of GBNF, or a grammar of several lines.
    return typed.lstrip().startswith("{") or "::=" in typed or "\n" in typed


def _content(where: str, path: str) -> str:
    try:
        return read_text(path, MOST_STRUCTURE)
    except ValueError as error:
        raise OptionError(f"{where}: {error}") from None


def _refuse_no_schema(where: str, text: str) -> None:
    import json  # on use: few answers have a schema

    from hetrun.client.schema_words import fault_in_words

    if fault := fault_in_words(json.loads(text)):
        raise OptionError(f"{where}: {fault}")


# --- the table


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One field of SamplingParams on the command line."""

    name: str
    flags: tuple[str, ...]
    help: str
    off: str = ""  # the value that switches it off, in words where there is more to say
    metavar: str | None = "N"  # None: a flag without a value
    read: Callable[[str, Any], object] = number
    repeated: bool = False
    aliases: tuple[str, ...] = ()  # taken, not listed
    brought: Parameter | None = None  # what it is in the sampler of a package, if it is that

    @property
    def flag(self) -> str:
        """How errors call it."""
        return self.flags[-1]

    @property
    def help_text(self) -> str:
        default = self.brought.default if self.brought else getattr(SamplingParams, self.name, None)
        shown = f"{default:g}" if isinstance(default, int | float) and self.metavar else ""
        notes = [shown] if shown and not self.off.startswith(f"{shown}:") else []
        notes += [self.off] if self.off else []
        return f"{self.help}  [{'; '.join(notes)}]" if notes else self.help

    def value(self, typed: object) -> object:
        """The value for SamplingParams; OptionError names the flag."""
        where = f"{self.name} ({self.flag})"
        if self.read is structure and isinstance(typed, str) and not _is_structure(typed):
            where = f"{self.flag} {typed}"
        if self.brought:
            return self.brought.check(where, self.read(where, typed))
        value = CHECKS[self.name](where, self.read(where, typed))
        if self.name == "json_schema":
            _refuse_no_schema(where, str(value))
        return value


SHAPE = (
    SamplingRow(
        "json_schema",
        ("-j", "--json-schema"),
        "answer in JSON that follows this schema",
        "",
        "FILE|JSON",
        structure,
        aliases=words.ALIASES["json_schema"],
    ),
    SamplingRow(
        "grammar",
        ("--grammar",),
        "answer with a text that follows this grammar (GBNF or Lark)",
        "",
        "FILE|TEXT",
        structure,
        aliases=words.ALIASES["grammar"],
    ),
    SamplingRow(
        "regex", ("--regex",), "answer with a text that matches this regular expression", "", "TEXT", as_typed
    ),
)
SCORES = (
    SamplingRow(
        "logprobs", ("--logprobs",), "with --json: log-probability of each token, and of the N likeliest"
    ),
    SamplingRow("prompt_logprobs", ("--prompt-logprobs",), "the same for the prompt's tokens"),
)
SAMPLING = (
    SamplingRow("top_k", ("--top-k",), "keep the N likeliest tokens", "0: all"),
    SamplingRow("top_p", ("--top-p",), "the likeliest that add up to N", "1: off"),
    SamplingRow("min_p", ("--min-p",), "at least N times the likeliest", "0: off"),
    SamplingRow(
        "typical_p",
        ("--typical",),
        "the most typical that add up to N",
        "1: off",
        aliases=("--typical-p",),
    ),
    SamplingRow(
        "top_n_sigma",
        ("--top-nsigma",),
        "within N deviations of the best",
        "-1: off",
        aliases=("--top-n-sigma",),
    ),
    SamplingRow("min_keep", ("--min-keep",), "fewest tokens that filters leave"),
    SamplingRow(
        "xtc_probability",
        ("--xtc-probability",),
        "chance of dropping the likeliest",
        "0: off",
    ),
    SamplingRow("xtc_threshold", ("--xtc-threshold",), "probability that counts as likely"),
    SamplingRow("dynatemp_range", ("--dynatemp-range",), "vary the temperature by up to N", "0: off"),
    SamplingRow("dynatemp_exponent", ("--dynatemp-exp",), "exponent of the entropy"),
    SamplingRow("repeat_penalty", ("--repeat-penalty",), "penalty for repeated tokens, a factor", "1: off"),
    SamplingRow("presence_penalty", ("--presence-penalty",), "penalty if a token has appeared", "0: off"),
    SamplingRow("frequency_penalty", ("--frequency-penalty",), "penalty for each appearance", "0: off"),
    SamplingRow("repeat_last_n", ("--repeat-last-n",), "tokens to look back", "0: off, -1: all"),
    SamplingRow("dry_multiplier", ("--dry-multiplier",), "penalty for repeated sequences", "0: off"),
    SamplingRow("dry_base", ("--dry-base",), "factor for each further token"),
    SamplingRow("dry_allowed_length", ("--dry-allowed-length",), "longest sequence without penalty"),
    SamplingRow(
        "dry_penalty_last_n",
        ("--dry-penalty-last-n",),
        "tokens to look back",
        "0: off, -1: all",
    ),
    SamplingRow(
        "dry_sequence_breakers",
        ("--dry-sequence-breaker",),
        "text that ends a sequence; may be repeated",
        '\\n : " *; none: no text',
        "TEXT",
        breakers,
        repeated=True,
    ),
    SamplingRow("mirostat", ("--mirostat",), "1 or 2: instead of the filters", "0: off"),
    SamplingRow("mirostat_eta", ("--mirostat-lr",), "its learning rate"),
    SamplingRow("mirostat_tau", ("--mirostat-ent",), "its target entropy"),
    SamplingRow(
        "samplers",
        ("--samplers",),
        "use these, such as top_k;top_p;temperature",
        "",
        "NAMES",
        as_typed,
    ),
    SamplingRow(
        "logit_bias",
        ("-l", "--logit-bias"),
        "5+1 favours token 5, 5-inf forbids it; may be repeated",
        "",
        "TOKEN+BIAS",
        biases,
        repeated=True,
    ),
    SamplingRow("ignore_eos", ("--ignore-eos",), "do not stop where the model would", "", None, as_typed),
    SamplingRow(
        "stop",
        ("-r", "--stop"),
        "text that ends the answer (\\n: line end); may be repeated",
        "",
        "TEXT",
        texts,
        repeated=True,
        aliases=("--reverse-prompt",),
    ),
)
ROWS = {row.name: row for row in (*SHAPE, *SCORES, *SAMPLING)}


@cache
def brought() -> Mapping[str, SamplingRow]:
    """The parameters of samplers that packages brought, by name."""
    found: dict[str, SamplingRow] = {}
    for p in sampler_plugins.parameters().values():
        flag = f"--{p.name.replace('_', '-')}"
        found[p.name] = SamplingRow(p.name, (flag,), p.help, p.off, brought=p)
    return found


# --- click


class SamplingOption(click.Option):
    """An option of the table; its help leaves out the aliases."""

    def __init__(self, declarations: Sequence[str], row: SamplingRow) -> None:
        names = (*row.flags, *row.aliases, *declarations)
        if row.metavar is None:
            super().__init__(names, help=row.help_text, is_flag=True, default=None)
        else:
            super().__init__(names, help=row.help_text, metavar=row.metavar, multiple=row.repeated)
        self.row = row

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        flags = ", ".join(self.row.flags)
        return f"{flags} {self.row.metavar}" if self.row.metavar else flags, self.row.help_text


class SamplingCommand(UsualCommand):
    """Its help has the usual options first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = {
            flag for param in self.params if isinstance(param, MultiValueOption) for flag in param.opts
        }
        if any(FULL_FLAG in param.opts for param in self.params):
            args = readable(args)
        known = {flag for param in self.get_params(ctx) for flag in param.opts}
        if any(a.startswith("--") and a.partition("=")[0] not in known for a in args):
            self.take_what_packages_brought()
        return super().parse_args(ctx, spread(args, several))

    def take_what_packages_brought(self) -> None:
        """The options of their samplers. Only where they are needed: to find them takes its time."""
        known = {flag for param in self.params for flag in param.opts}
        new = [row for row in brought().values() if row.flag not in known]
        if any(isinstance(param, SamplingOption) and param.row in SAMPLING for param in self.params):
            self.params += [SamplingOption((row.name,), row) for row in new]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.take_what_packages_brought()
        usual: list[tuple[str, str]] = []
        sampling: list[tuple[str, str]] = []
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and (record := option.get_help_record(ctx)):
                is_sampling = isinstance(option, SamplingOption) and (
                    option.row in SAMPLING or option.row.brought
                )
                under = sampling if is_sampling else usual
                under.append(record)
        for heading, records in (("Options", usual), (HEADING, sampling)):
            with formatter.section(heading):
                formatter.write_dl(records)


def options(*rows: SamplingRow) -> Callable[[Callable[..., Any]], Any]:
    """Options of the table; `taken` reads them."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for row in reversed(rows):
            command = click.option(row.name, cls=SamplingOption, row=row)(command)
        return command

    return decorate


def taken(given: dict[str, object]) -> dict[str, object]:
    """Take what was typed of the table out of what click gives, as values for SamplingParams."""
    rows = ROWS if given.keys() <= {*ROWS, *OPTIONS} else {**ROWS, **brought()}
    typed = {name: given.pop(name) for name in rows if name in given}
    found = {name: rows[name].value(value) for name, value in typed.items() if value not in (None, ())}
    several = [ROWS[name].flag for name in STRUCTURES if name in found]
    if len(several) > 1:
        raise OptionError(f"{' and '.join(several)} are both given: an answer can follow only one")
    return found


def params_of(settings: Settings, sampling: Mapping[str, object]) -> SamplingParams:
    """What all options together say about sampling."""
    if settings.max_tokens == 0 and "prompt_logprobs" not in sampling:
        raise refused("max_tokens (--max-tokens)", 0, ANSWER_LENGTH)
    own = {"max_tokens": settings.max_tokens, "temperature": settings.temperature, "seed": settings.seed}
    return SamplingParams.from_mapping(own | dict(sampling))
