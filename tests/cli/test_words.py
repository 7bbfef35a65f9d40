"""Words of llama.cpp and Ollama: taken where they mean the same, else answered with ours."""

from __future__ import annotations

import re

import click
import pytest

import hetrun
from hetrun.cli import words
from hetrun.cli.app import hetrun as group
from hetrun.config import OPTIONS
from hetrun.executor.loading import memory_estimates
from hetrun.memory.ledger import Figures
from tests.cli.conftest import Run

SENTENCES = {**words.OPTIONS, **words.COMMANDS}
# What our sentences say of other programs, and examples of values.
NOT_OURS = {"MODEL", "TEXT", "NAME", "PATH"}


def test_options_with_the_same_meaning_are_taken(answer: Run) -> None:
    ours = answer("hello", "-n", "3", "--ctx", "128", "--threads", "1", "--system", "Be brief.")
    theirs = ("--n-predict", "3", "--ctx-size=128", "-t", "1", "-sys", "Be brief.", "--ubatch-size", "64")
    assert ours.code == 0
    assert answer("-p", "hello", *theirs).out == ours.out
    assert answer("--prompt", "hello", *theirs, "--temperature", "0").out == ours.out


def test_aliases_are_not_listed(run: Run) -> None:
    listed = run("run", "--help").out
    for names in words.ALIASES.values():
        assert not any(re.search(rf"(?<![\w-]){name}(?![\w-])", listed) for name in names)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "-ngl", "99", "hi"], "No such option '-ngl': --backend cuda uses NVIDIA GPUs"),
        (["run", "hi", "--n-gpu-layers=99"], "--vram says"),
        (["serve", "--gpu"], "--backend cuda uses"),
        (["run", "hi", "--gpu", "0"], "--backend cuda uses"),
        (["run", "hi", "--cpu"], "--vram 0"),
        (["run", "hi", "--device", "cuda"], "--backend NAME chooses"),
        (["serve", "-ctk", "q8_0"], "--kv-type"),
        (["run", "hi", "--audio", "cat.wav"], "it takes no audio"),
        (["run", "hi", "--no-mmproj"], "--mmproj none leaves the vision tower out"),
        (["serve", "--mmproj-url", "https://x"], "--mmproj FILE is the vision tower"),
        (["run", "hi", "--lora", "a.gguf"], "merge it into the model"),
        (["run", "hi", "--n-cpu-moe", "4"], "computed by the CPU"),
        (["run", "hi", "--jinja"], "the model's own chat template"),
        (["run", "hi", "-fa"], "leave it out"),
        (["chat", "--mlock"], "--ram says"),
        (["run", "-cnv"], "hetrun run -i"),
        (["run", "hi", "--temprature", "3"], "Did you mean --temp?"),
        (["run", "hi", "--rma", "3GiB"], "--ram"),
        (["-m", "x.gguf", "-p", "hi"], "hetrun run -m ..."),
        (["create", "x"], "there is no Modelfile"),
        (["quantize", "x.gguf"], "hetrun convert MODEL -q"),
        (["push", "x"], "uploads nothing"),
        (["llama-server", "-m", "x.gguf"], "hetrun serve MODEL"),
        (["hello there"], 'hetrun run "hello there"'),
        (["hf:user/repo"], 'hetrun run hf:user/repo "a prompt"'),
        (["pul"], "Did you mean 'pull'?"),
    ],
    ids=" ".join,
)
def test_other_words_are_answered_with_ours(run: Run, arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert said in result.err.splitlines()[-1]


@pytest.mark.parametrize("option", ["--zzz", "--maximum", "--wormup"])
def test_nothing_is_suggested_by_a_few_letters(run: Run, option: str) -> None:
    assert run("run", "hi", option).err.splitlines()[-1] == f"Error: No such option '{option}'."


def test_another_programs_word_may_be_a_value(answer: Run) -> None:
    assert answer("hello", "-n", "1", "--system", "-ngl", "--stop", "--lora").code == 0
    assert answer("-n", "1", "--", "--lora").code == 0


def test_every_sentence_names_what_there_is() -> None:
    with click.Context(group) as ctx:
        commands = {name: group.get_command(ctx, name) for name in group.list_commands(ctx)}
        options = {
            flag for command in commands.values() if command for p in command.params for flag in p.opts
        }
    options |= {"--help"}
    for word, said in SENTENCES.items():
        assert set(re.findall(r"(?<![\w-])--[a-z-]+", said)) <= options, word
        named = set(re.findall(r"hetrun ([a-z]+) (?:[A-Z-]|lists|writes|is)", said))
        assert named <= commands.keys(), word
    assert not words.COMMANDS.keys() & commands.keys()
    assert words.ALIASES.keys() <= OPTIONS.keys() | {"json_schema", "grammar"}
    aliases = {name for names in words.ALIASES.values() for name in names}
    assert not aliases & words.OPTIONS.keys()


def test_commands_with_another_name(run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # `inspect` counts this process, which grows while tests run.
    monkeypatch.setattr(memory_estimates, "kernel_figures", lambda: Figures(25 << 20, 12 << 20))
    assert run("show", tiny).out == run("inspect", tiny).out
    assert run("ls").out == run("list").out
    assert run("version").out == f"hetrun {hetrun.__version__}\n"
    assert run("help", "plan").out == run("plan", "--help").out
    assert run("help").out == run("--help").out
