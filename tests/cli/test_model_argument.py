"""`hetrun run MODEL PROMPT`: what is a model, what is a prompt; and models as words of other commands."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hetrun.cli.model_argument import as_prompt, model_and_prompt
from hetrun.errors import UserError
from hetrun.loader.hub.stores import own_folder
from tests.cli.conftest import Run


def _model_and_prompt(words: list[str]) -> tuple[str | None, str | None]:
    return model_and_prompt(words)[:2]


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which nothing lies."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["Hello"],
        ["Why?"],
        ["hi there"],
        ["hi", "there"],
        [""],
        ["-"],
        [" "],
        ["and/or"],
        ["TCP/IP", "explained"],
        ["24/7"],
        ["10:30"],
        ["v1.2"],
        ["e.g."],
        ["falcon"],
        ["philosophy101"],
        ["C++"],
        ["mistral", "is", "a", "wind"],
        ["llama facts, please"],
        ["what is tiny.gguf"],
        ["translate", "guten", "Morgen"],
        ["translate guten", "Morgen, du"],
        ["-", "guten Morgen"],
        ["hello", "world "],
        ["true/false", "questions", "about", "cats"],
        ["https://example.com"],
        ["Note:this"],
    ],
    ids=" ".join,
)
def test_a_prompt_stays_a_prompt(words: list[str]) -> None:
    assert _model_and_prompt(words) == (None, " ".join(words))


@pytest.mark.parametrize(
    "words",
    [
        ["llama3.2"],
        ["qwen3:8b"],
        ["qwen2.5-coder:7b-instruct", "hi"],
        ["deepseek-r1"],
        ["gpt-oss:20b"],
        ["mistral"],
        ["mistral", "why is the sky blue"],
        ["foo.gguf"],
        ["no/such/model.safetensors", "hi", "there"],
        ["user/repo"],
        ["meta-llama/Llama-3.2-1B", "hi"],
        ["user/repo", "why is it so"],
        ["hf:user/repo"],
        ["https://huggingface.co/user/repo", "hi"],
        ["ollama:own"],
        ["own:latest", "hi"],
        ["my-model-7b-q4_k_m"],
        ["pet", "Say hello."],
        ["Translate:", "guten Morgen"],
    ],
    ids=" ".join,
)
def test_what_can_only_be_a_models_name_is_one(words: list[str]) -> None:
    assert _model_and_prompt(words) == (words[0], " ".join(words[1:]) or None)


def test_no_words_are_neither() -> None:
    assert _model_and_prompt([]) == (None, None)


def test_what_is_here_is_a_model_by_a_glance_at_it(somewhere: Path, tiny: str) -> None:
    (somewhere / "plain").write_bytes(Path(tiny).read_bytes())
    (somewhere / "hf").mkdir()
    (somewhere / "hf" / "config.json").touch()
    (somewhere / "hf" / "model.safetensors").touch()
    (somewhere / "my model.gguf").touch()
    for name in (tiny, "plain", "./plain", "hf", "hf/", "my model.gguf"):
        assert _model_and_prompt([name, "a", "b"]) == (name, "a b")


def test_files_that_are_no_models(somewhere: Path) -> None:
    (somewhere / "tests").mkdir()
    (somewhere / "tests" / "config.json").touch()  # of something else
    (somewhere / "hello").write_text("hello")
    (somewhere / "notes.txt").write_text("hello")
    for word in ("tests", "hello"):  # words, too
        assert _model_and_prompt([word]) == (None, word)
    with pytest.raises(
        UserError, match=r'notes\.txt is not a model\. To ask about a file: hetrun run ".*" < notes'
    ):
        _model_and_prompt(["notes.txt", "sum it up"])
    with pytest.raises(UserError, match="tests/ does not contain a model"):
        _model_and_prompt(["tests/"])


def test_run_answers_with_the_model_that_the_first_word_names(run: Run, tiny: str) -> None:
    options = ("--backend", "reference", "--temp", "0", "-n", "4")
    named = run("run", "-m", tiny, "a b", *options)
    assert named.code == 0
    assert run("run", tiny, "a b", *options).out == named.out
    assert run("run", tiny, "a", "b", *options).out == named.out
    assert run("run", "-m", tiny, "a", "b", *options).out == named.out
    assert run("run", "-m", tiny, "a", "c", *options).out != named.out


def test_a_model_that_is_a_plain_word_is_named(
    run: Run, home: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_folder().mkdir(parents=True)
    (own_folder() / "mistral.gguf").write_bytes(Path(tiny).read_bytes())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    options = ("-n", "1", "--temp", "0", "--backend", "reference", "--json")
    said = (
        "hetrun: mistral is taken as the model; if it is part of the prompt, put the whole prompt in quotes"
    )
    assert run("run", "mistral", "is", "a", "wind", *options).err.splitlines()[0] == said
    assert said not in run("run", "mistral", "a wind", *options).err


def test_with_m_a_models_name_is_a_prompt_as_any(answer: Run) -> None:
    assert answer("llama3.2", "-n", "1").code == 0


def test_a_model_that_is_not_here_is_an_error_that_helps(run: Run) -> None:
    said = run("run", "llama3.2").sentence
    assert said.startswith("hetrun: llama3.2 does not exist; ")
    assert said.endswith("if it is your prompt, name a model before it: hetrun run smollm2 llama3.2")
    said = run("run", "mistral", "Why is the sky blue?").sentence
    assert said.endswith(
        'if it is part of the prompt, put the whole prompt in quotes: hetrun run "mistral Why '
        'is the sky blue?"'
    )
    assert "from Hugging Face's hub: hf:user/repo; if it is" in run("run", "user/repo").sentence
    assert "your prompt" not in run("run", "tiny.gguf").sentence


@pytest.mark.parametrize(
    "words", [["smolm2"], ["smolm2", "Hello"], ["smollm", "Hello"], ["smolm2", "a", "b"]]
)
def test_a_slip_in_a_name_that_is_here_is_refused(run: Run, words: list[str]) -> None:
    result = run("run", *words)
    assert (result.code, result.out) == (2, "")
    assert "did you mean smollm2? If it is " in result.sentence


@pytest.mark.parametrize("word", ["mistral", "ollama/llama3.2", "tinyllama", "smol"])
def test_a_models_name_before_a_prompt_of_one_word_is_refused(
    run: Run, somewhere: Path, tiny: str, word: str
) -> None:
    (somewhere / "tinyllama-1b.gguf").symlink_to(tiny)
    result = run("run", word, "hello")
    assert (result.code, result.out) == (2, "")
    assert f'if it is part of the prompt, put the whole prompt in quotes: hetrun run "{word} hello"' in (
        result.sentence.replace("? If it is", "; if it is")
    )


def test_words_that_are_unlike_all_names_begin_a_prompt(run: Run) -> None:
    for words in (["small", "talk"], ["smell", "it"], ["smolders", "and", "burns"]):
        assert _model_and_prompt(words) == (None, " ".join(words))


def test_a_word_before_a_prompt_in_quotes_is_a_model_or_refused(run: Run, somewhere: Path) -> None:
    (somewhere / "folder").mkdir()
    result = run("run", "pet", "Say hello.")
    assert (result.code, result.out) == (2, "")
    assert result.sentence == (
        "hetrun: there is no model pet; hetrun list shows those that are here; if it is part of the prompt, "
        'put the whole prompt in quotes: hetrun run "pet Say hello."'
    )
    said = run("run", "smol", "Say hello.").sentence
    assert "did you mean smollm2? If it is part of the prompt, " in said
    assert "folder does not contain a model" in run("run", "folder", "Say hello.").sentence
    said = run("run", "--url", "http://127.0.0.1:9", "pet", "Say hello.").sentence
    assert said.startswith("hetrun: with --url, -m names the model: -m pet; if it is part of the prompt")


@pytest.mark.parametrize(
    "words",
    [["pet", "it's 5 o'clock"], ["pet", 'say "hello"!'], ["pet", "costs $5 `or` so"], ["a\\b", "c d"]],
)
def test_the_command_that_is_suggested_is_the_whole_prompt_for_a_shell(words: list[str]) -> None:
    suggested = as_prompt(words).partition("hetrun run ")[2]
    typed = subprocess.run(["sh", "-c", f"printf %s {suggested}"], capture_output=True, text=True, check=True)
    assert typed.stdout == " ".join(words)


@pytest.mark.parametrize("prompt", ["two\nlines of it", "long " * 50])
def test_a_prompt_that_does_not_fit_on_a_line_is_not_repeated(prompt: str) -> None:
    assert as_prompt(["pet", prompt]) == "if it is part of the prompt, put the whole prompt in quotes"


def test_a_batch_takes_the_model_as_a_word(run: Run, somewhere: Path, tiny: str) -> None:
    (somewhere / "in.txt").write_text("hello\n")
    assert "a prompt are both given" in run("run", tiny, "hi", "-f", "in.txt").sentence
    options = ("-f", "in.txt", "-o", "out.jsonl", "-n", "1", "--temp", "0", "--backend", "reference")
    assert run("run", tiny, *options).code == 0
    (line,) = (somewhere / "out.jsonl").read_text().splitlines()
    assert json.loads(line)["usage"]["completion_tokens"] == 1


def unmeasured(out: str) -> list[str]:
    """Lines that say the same each time: a plan measures how fast memory is."""
    return [line for line in out.splitlines() if not line.startswith("speed: ")]


@pytest.mark.parametrize("command", ["plan", "inspect", "check"])
def test_other_commands_take_the_model_both_ways(run: Run, tiny: str, command: str) -> None:
    as_word, by_option = run(command, tiny), run(command, "-m", tiny)
    assert (as_word.code, as_word.err) == (0, "")
    assert unmeasured(by_option.out)[:3] == unmeasured(as_word.out)[:3]


@pytest.mark.parametrize("command", ["chat", "serve", "plan", "bench", "inspect", "convert", "repack"])
def test_two_models_are_one_too_many(run: Run, tiny: str, command: str) -> None:
    more = ("-q", "q8_0") if command == "convert" else ()
    result = run(command, tiny, "-m", "other.gguf", *more)
    assert (result.code, result.out) == (2, "")
    assert (
        result.sentence == f"hetrun: the models {tiny} and -m other.gguf are both given: use only one of them"
    )


def test_eval_and_bench_look_for_the_model_that_the_word_names(run: Run) -> None:
    assert "smolm does not exist" in run("bench", "smolm").sentence
    assert "smolm does not exist" in run("eval", "smolm", "-f", "text").sentence
    assert "smolm does not exist" in run("serve", "smolm", "--port", "0").sentence


def test_a_folder_with_one_gguf_file_is_that_model(run: Run, somewhere: Path, tiny: str) -> None:
    folder = somewhere / "folder"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(Path(tiny).read_bytes())
    (folder / "mmproj-a.gguf").touch()
    (folder / "README.md").touch()
    options = ("--backend", "reference", "--temp", "0", "-n", "2")
    assert run("run", "folder", "hi", *options).out == run("run", tiny, "hi", *options).out
    (folder / "b.gguf").touch()
    assert "name the GGUF file in it: a.gguf, b.gguf" in run("run", "folder", "hi", *options).sentence


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["tinylama", "Say hello."], "tinyllama-1b.gguf"),
        (["tinyllama-1b", "Say", "hello"], "tinyllama-1b.gguf"),
        (["tinylama-1b.gguf"], "tinyllama-1b.gguf"),
        (["TinyLlama", "Say hello."], "tinyllama-1b.gguf"),
        (["-m", "tinylama", "hi"], "tinyllama-1b.gguf"),
        (["./deep/quen-1b.gguf"], "./deep/qwen-1b.gguf"),
        (["-m", "phi-folde", "hi"], "phi-folder"),
    ],
    ids=lambda found: " ".join(found) if isinstance(found, list) else "",
)
def test_a_mistyped_name_leads_to_the_file_beside_it(
    run: Run, somewhere: Path, words: list[str], meant: str
) -> None:
    for folder in ("deep", "phi-folder", "photos"):
        (somewhere / folder).mkdir()
    for name in ("tinyllama-1b.gguf", "deep/qwen-1b.gguf", "phi-folder/model.gguf", "tinylama-mmproj.gguf"):
        (somewhere / name).touch()
    assert f" does not exist; did you mean {meant}?" in run("run", *words).err


def test_a_name_that_is_like_no_file_leads_to_none(run: Run, somewhere: Path) -> None:
    (somewhere / "ab.gguf").touch()
    (somewhere / "cd.gguf-00002-of-00002.gguf").touch()
    for name in ("xy.gguf", "cd.gguf"):
        assert "did you mean" not in run("run", name).err


def test_list_says_how_the_files_of_this_folder_are_run(
    run: Run, somewhere: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "other .gguf files are run by their path; in this folder: "
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert said not in run("list").err
    for name in "abcd":
        (somewhere / f"{name}.gguf").touch()
    assert f'{said}a.gguf, b.gguf, c.gguf and 1 more (hetrun run a.gguf "a prompt")' in run("list").err
    assert said not in run("list", "--json").err
    own_folder().parent.mkdir(parents=True)
    own_folder().symlink_to(somewhere)  # all are in the list
    assert said not in run("list").err
