"""Options of sampling on the command line: the table, what is typed, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from hetrun import cli
from hetrun.cli.sampling_options import (
    ROWS,
    SAMPLING,
    SCORES,
    SHAPE,
    SamplingCommand,
    options,
    params_of,
    taken,
)
from hetrun.client.sampling_params import CHECKS, MOST_STRUCTURE, SamplingParams
from hetrun.config import Settings
from hetrun.errors import OptionError
from tests.support.effort import effort


def typed(*arguments: str) -> dict[str, object]:
    """What a command with all options of the table gets."""
    got: dict[str, object] = {}

    @click.command(cls=SamplingCommand)
    @options(*ROWS.values())
    def command(**given: object) -> None:
        got.update(taken(given))
        assert given == {}

    command.main(arguments, standalone_mode=False)
    return got


def test_every_field_has_an_option() -> None:
    elsewhere = {"max_tokens", "temperature", "seed"}  # in hetrun.config
    assert set(ROWS) == set(CHECKS) - elsewhere
    assert len(ROWS) == len(SAMPLING) + len(SCORES) + len(SHAPE)


def test_what_is_not_typed_is_at_its_default() -> None:
    assert typed() == {}
    assert params_of(Settings(), {}) == SamplingParams()


EVERY = {
    "--top-k 5": ("top_k", 5),
    "--top-p 0.5": ("top_p", 0.5),
    "--min-p .1": ("min_p", 0.1),
    "--typical 0.7": ("typical_p", 0.7),
    "--typical-p 1": ("typical_p", 1.0),
    "--top-nsigma 2": ("top_n_sigma", 2.0),
    "--top-n-sigma -1": ("top_n_sigma", -1.0),
    "--min-keep 3": ("min_keep", 3),
    "--xtc-probability 0.5": ("xtc_probability", 0.5),
    "--xtc-threshold 0.2": ("xtc_threshold", 0.2),
    "--dynatemp-range 0.5": ("dynatemp_range", 0.5),
    "--dynatemp-exp 2": ("dynatemp_exponent", 2.0),
    "--repeat-penalty 1.1": ("repeat_penalty", 1.1),
    "--presence-penalty -1.5": ("presence_penalty", -1.5),
    "--frequency-penalty 1e-1": ("frequency_penalty", 0.1),
    "--repeat-last-n -1": ("repeat_last_n", -1),
    "--dry-multiplier 0.8": ("dry_multiplier", 0.8),
    "--dry-base 2": ("dry_base", 2.0),
    "--dry-allowed-length 4": ("dry_allowed_length", 4),
    "--dry-penalty-last-n 0": ("dry_penalty_last_n", 0),
    r"--dry-sequence-breaker a --dry-sequence-breaker \n": ("dry_sequence_breakers", ("a", "\n")),
    "--dry-sequence-breaker a --dry-sequence-breaker none": ("dry_sequence_breakers", ()),
    "--dry-sequence-breaker none --dry-sequence-breaker a": ("dry_sequence_breakers", ("a",)),
    "--mirostat 2": ("mirostat", 2),
    "--mirostat-lr 0.2": ("mirostat_eta", 0.2),
    "--mirostat-ent 4": ("mirostat_tau", 4.0),
    "--samplers top_k;typ_p;temperature": ("samplers", ("top_k", "typ_p", "temperature")),
    "--logit-bias 15043+1 --logit-bias 7-0.5 -l 3-inf": (
        "logit_bias",
        {15043: 1.0, 7: -0.5, 3: float("-inf")},
    ),
    "--ignore-eos": ("ignore_eos", True),
    r"--stop END -r \\n --reverse-prompt \t": ("stop", ("END", r"\n", "\t")),
    "--logprobs 0": ("logprobs", 0),
    "--prompt-logprobs 3": ("prompt_logprobs", 3),
    "--regex a+": ("regex", "a+"),
    '-j {"type":"object"}': ("json_schema", '{"type": "object"}'),
    "--grammar root::=[a-z]": ("grammar", "root::=[a-z]"),
}


@pytest.mark.parametrize("line", EVERY)
def test_an_option_arrives(line: str) -> None:
    name, value = EVERY[line]
    got = typed(*line.split(" "))
    assert got == {name: value}
    assert type(got[name]) is type(value)
    assert getattr(params_of(Settings(), got), name) == value


def test_every_option_is_tried_above() -> None:
    assert {name for name, _ in EVERY.values()} == set(ROWS)


def test_schemas_and_grammars_come_from_files(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "s.json", tmp_path / "g.gbnf"
    schema.write_bytes('\ufeff{"enum": ["ä"]}\n'.encode())  # editors on Windows begin so
    grammar.write_text('root ::= "a"\n')
    assert typed("--json-schema", str(schema)) == {"json_schema": '{"enum": ["ä"]}'}
    assert typed("--grammar", str(grammar)) == {"grammar": 'root ::= "a"\n'}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--top-k many", r"top_k \(--top-k\) must be an integer of -1 or more .*, not 'many'"),
        ("--top-k 1.5", r"\(--top-k\) must be an integer"),
        ("--top-p nan", r"\(--top-p\) must be a number"),
        ("--typical 2", r"typical_p \(--typical\) must be a number from 0 to 1"),
        ("--dynatemp-exp -1", r"\(--dynatemp-exp\)"),
        ("--mirostat 3", r"\(--mirostat\) must be an integer from 0 to 2"),
        ("--repeat-penalty 0", r"\(--repeat-penalty\)"),
        ("--samplers top_x", r"\(--samplers\) holds 'top_x'"),
        ("--logit-bias 5", r"\(--logit-bias\) must be like 15043\+1"),
        ("--logit-bias x+1", r"\(--logit-bias\) must be like"),
        ("--logit-bias 5+nan", r"\(--logit-bias\) must be like"),
        ("--logit-bias 5+inf", "logit_bias of token 5 must be"),
        ("--stop ", r"\(--stop\) holds an empty string"),
        ("--logprobs -1", r"\(--logprobs\)"),
        ("-j {", r"\(--json-schema\) is not JSON"),
        ("--json-schema MISSING", "--json-schema MISSING: No such file"),
        ("--json-schema /", "--json-schema /: is a directory, not a file"),
        ("--json-schema /dev/zero", "is not a regular file"),
        ("--json-schema FIFO", "--json-schema FIFO: is not a regular file"),
        ("--json-schema HUGE", "--json-schema HUGE: has 1073741824 bytes; it may have"),
        ("--json-schema EMPTY", "--json-schema EMPTY is not JSON"),
        ("--json-schema BYTES", "--json-schema BYTES: byte 1 is not UTF-8 text"),
        ("--json-schema LIST", "--json-schema LIST must be a JSON object"),
        ("--json-schema DEEP", "--json-schema DEEP is not JSON"),
        ("--grammar EMPTY", "--grammar EMPTY must have 1 to"),
        ("--grammar FIFO", "--grammar FIFO: is not a regular file"),
        ("-j {} --regex a", "--json-schema and --regex are both given"),
        ("-j {} --regex a --grammar a::=b", "--json-schema and --regex and --grammar are both"),
    ],
)
def test_what_cannot_be_is_refused(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("FIFO")
    with open("HUGE", "wb") as huge:
        huge.truncate(1 << 30)
    Path("EMPTY").touch()
    Path("BYTES").write_bytes(b"{\xff}")
    Path("LIST").write_text("[1]")
    Path("DEEP").write_text("[" * (MOST_STRUCTURE // 2))
    with effort() as took, pytest.raises(OptionError, match=said):
        typed(*line.split(" "))
    assert took.calls < 100_000


def test_help_is_grouped_and_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.exit_code(["run", "--help"]) == 0
    usual, _, sampling = capsys.readouterr().out.partition("Sampling")
    listed = set(re.findall(r"^  (?:-., )?(--[a-z-]+)", sampling, re.MULTILINE))
    assert listed == {row.flag for row in SAMPLING}
    assert "--json-schema" in usual
    assert "-h, --help" in usual
    assert len(sampling.splitlines()) < len(SAMPLING) + 5  # nearly all fit into a line
    for command in ("chat", "serve"):
        assert cli.exit_code([command, "--help"]) == 0
        assert "--dry-multiplier" in capsys.readouterr().out


def test_the_table_is_cheap() -> None:
    code = "import sys, hetrun.cli.app; assert not {'numpy', 'jinja2', 'rich', 'json'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
