"""The `hetrun` command: in process where that shows enough, else as the command that people run."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest

import hetrun
from hetrun.backend import registry
from hetrun.backend.interpreter import InterpretingBackend
from hetrun.cli import app as commands
from hetrun.cli.exit_codes import STOPPED
from hetrun.cli.progress import ProgressRow
from hetrun.cli.reports import devices as reports
from hetrun.client.events import Streaming, Timings, accepted
from hetrun.engine import query_handlers
from hetrun.executor.autotune.cpu_contention import OtherPrograms
from hetrun.executor.planned_model import PlannedModel
from hetrun.loader.vision import read_vision
from hetrun.system.core_sets import core_sets
from hetrun.system.cpu_topology import read_topology, this_machine
from hetrun.system.thread_affinity import ThreadCores
from tests.cli.conftest import TINY, Run
from tests.support import towers
from tests.support.limits import Within
from tests.support.sysfs import EPYC, of

COMMANDS = (
    "run",
    "chat",
    "serve",
    "launch",
    "ps",
    "stop",
    "bench",
    "eval",
    "plan",
    "convert",
    "repack",
    "inspect",
    "check",
    "devices",
    "pull",
    "list",
    "rm",
    "doctor",
    "completion",
)


@contextmanager
def start(*arguments: str, code: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process of its own, after some code; it ends with the block at the latest."""
    begin = ("-c", f"{code}\nfrom hetrun.cli import main; main()") if code else ("-m", "hetrun")
    process = subprocess.Popen(
        [sys.executable, *begin, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Tests that were started in the background ignore Ctrl-C, and their children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


# --- help, versions, and what is refused


def test_help_names_every_command(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    listed = re.findall(r"^  ([a-z]+) ", result.out.partition("Commands:")[2], re.MULTILINE)
    assert tuple(listed) == COMMANDS
    assert run("--version").out == f"hetrun {hetrun.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_only_what_belongs_to_it(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.code == 0
    offered = set(re.findall(r"--[a-z-]+", result.out))
    assert ("--url" in offered) == (command in ("run", "chat", "launch"))
    assert "--verbose" in offered


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from hetrun.cli import main; sys.argv[1:] = ['--help']; main()"
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in loaded
    heavy = {"numpy", "rich", "textual", "starlette", "uvicorn", "llama_cpp", "jinja2", "torch", "asyncio"}
    assert not heavy & loaded


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "hi", "-m", "missing.gguf"], "missing.gguf does not exist"),
        (["run", "hi", "-m", __file__], "is not a GGUF file"),
        (["run", "hi", "--ctx", "lots"], "ctx (--ctx) must be an integer of 1 or more, not 'lots'"),
        (["run", "hi", "--seed", "1.5"], "seed (--seed) must be"),
        (["run", "hi", "--temp", "-1"], "temperature (--temp) must be"),
        (
            ["run", "hi", "-n", "0"],
            "max_tokens (--max-tokens) must be an integer of 1 or more, or -1 for no limit",
        ),
        (["run", "hi", "-n", "-5"], "must be an integer of 1 or more, or -1 for no limit"),
        (["run", "", "-m", "TINY"], "the prompt is empty"),
        (["run", "hi", "-m", "http://example.com/x.gguf"], "http://example.com/x.gguf is an address"),
        (["run", "hi", "--ram", "0%"], "a share of the machine's memory"),
        (["run", "hi", "--logprobs", "2"], "--logprobs is shown with --json only"),
        (["run", "hi", "--json-schema", "missing.json"], "--json-schema missing.json: No such file"),
        (["run", "hi", "-j", "{}", "--grammar", "x"], "--grammar x: No such file"),
        (["run", "hi", "-m", "TINY", "--logit-bias", "99999+1"], "token 99999 does not exist"),
        (["run", "hi", "--top-p", "3", "-m", "TINY"], "top_p (--top-p) must be a number from 0 to 1"),
        (["run", "hi", "-m", "TINY", "--backend", "nope"], "there is no backend 'nope'"),
        (["run", "", "-m", "TINY", "--raw", "--backend", "reference"], "the prompt is empty"),
        (["run", "\udcff", "-m", "TINY", "--backend", "reference"], "valid UTF-8"),
        (["run", "long " * 9000, "-m", "TINY", "--backend", "reference"], "shorten it"),
        (
            ["run", "hi", "-m", "TINY", "--ram", "100KiB", "--backend", "reference"],
            "this model needs at least",
        ),
        (["run", "hi", "-m", "TINY", "--streaming", "fast"], "streaming (--streaming) must be balanced or"),
        (["plan", "-m", "TINY", "--plan", "missing.json"], "missing.json"),
        (["inspect", "/"], "has no config.json"),
        (["inspect", "/dev/null"], "is not a regular file"),
        (["check", "a" * 300], "cannot be opened: File name too long"),
        (["plan", "-m", "a" * 300], "does not exist"),
        (["plan", "-m", "a\x1b[2J\nb"], "a\\x1b[2J\\nb does not exist"),
        (["plan", "-m", "TINY", "--plan", "/dev/zero"], "is not a regular file"),
        (["eval", "-m", "TINY", "-f", "/dev/zero"], "is not a regular file"),
        (["convert", "TINY"], "name a type, as -q q4_k_m; there are f32, f16"),
        (["convert", "TINY", "-q", "q8_0", "-o", "/dev/null", "--force"], "is a device"),
        (["convert", "TINY", "-q", "q8_0", "-o", "a" * 300], "File name too long"),
        (["bench", "-p", "x"], "-p must be a number"),
        (["serve", "--port", "99999"], "port (--port) must be"),
        (["serve", "--host", "0.0.0.0"], "--api-key"),
        (["serve", "--uds", "/no/such/folder/x.sock"], "No such file or directory"),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else "",
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    run: Run, tiny: str, arguments: list[str], said: str
) -> None:
    result = run(*(tiny if argument == "TINY" else argument for argument in arguments))
    assert result.code == 2
    assert said in result.sentence
    assert result.sentence.startswith("hetrun: ")
    assert result.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rnu"], "Did you mean 'run'?"),
        (["run", "--temprature", "3"], "No such option"),
        (["inspect"], "Missing argument 'MODEL'"),
        (["check"], "Missing argument 'MODEL...'"),
        (["plan", "a", "b"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_says_where_help_is(run: Run, arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert said in result.err
    assert "--help' for help" in result.err


def test_a_bug_of_ours_is_reported_as_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*options: bool) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(reports, "print_devices", fail)
    result = run("devices")
    assert result.code == 1
    assert result.sentence.startswith("hetrun: something went wrong inside hetrun: ZeroDivisionError: oops")
    assert "-v" in result.sentence

    monkeypatch.setattr(commands, "run_command", lambda arguments: fail(False))
    assert "Traceback" in run("run", "-v").err


# --- run


def test_run_writes_the_answer_and_nothing_else(answer: Run) -> None:
    first = answer("hello", "-n", "6")
    assert first.code == 0
    assert first.out.endswith("\n")
    assert first.err == ""  # no terminal, no figures
    assert answer("hello", "-n", "6").out == first.out


def test_run_verbose_says_what_was_chosen_and_how_it_went(answer: Run) -> None:
    err = answer("hello", "-n", "6", "-v").err
    assert "reference" in err
    assert re.search("^template: .*the model", err, re.MULTILINE)
    assert "sampling: temperature 0, greedy\n" in err
    assert "6 tokens at " in err
    more = ("--dry-multiplier", "0.8", "--stop", "X", "--stop", "Y", "--raw")
    err = answer("hello", "-n", "6", "-v", *more).err
    assert "template: none (--raw)" in err
    assert "sampling: temperature 0, dry_multiplier 0.8, stop 'X' 'Y', greedy\n" in err


def test_run_json_is_one_object(answer: Run) -> None:
    text = answer("hello", "-n", "6").out
    done = json.loads(answer("hello", "-n", "6", "--json").out)
    assert set(done) == {"model", "text", "tokens", "finish_reason", "usage", "timings"}
    assert done["text"].rstrip("\n") == text.rstrip("\n")
    assert (len(done["tokens"]), done["finish_reason"]) == (6, "length")
    assert set(done["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    timings = {"load_s", "ttft_s", "prompt_tok_s", "decode_tok_s", "drafted", "accepted", "picture_s"}
    assert set(done["timings"]) == timings


def test_run_json_full_has_the_plan_and_the_bill_of_memory_as_well(answer: Run) -> None:
    short = json.loads(answer("-n", "2", "--json", "hello").out)
    full = json.loads(answer("-n", "2", "--json=full", "hello").out)
    assert set(full) - set(short) == {"memory", "streaming", "device_slots", "plan"}
    assert full["text"] == short["text"]
    assert full["plan"]["plans"][0]["stages"][0][0]["backend"] == "reference"
    assert full["memory"]["weights"] > 0
    result = answer("hello", "--json=all")
    assert (result.code, result.out) == (2, "")
    assert "--json=all: take --json, or --json=full" in result.sentence


def test_each_command_says_its_own_default_of_the_temperature(run: Run) -> None:
    for command, default in (("run", "0.8"), ("serve", "1")):
        said = " ".join(run(command, "--help").out.split())
        assert f"always the likeliest token [default: what the model recommends, or {default}]" in said


def test_drafted_tokens_are_counted_in_words() -> None:
    assert accepted(Timings(drafted=14, accepted=1)) == "1 of 14 drafted tokens accepted"
    assert accepted(Timings()) == ""


def test_run_says_what_came_from_disk(answer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(answer("hello", "-n", "2", "--json=full").out)["streaming"] is None
    assert "from disk" not in answer("hello", "-n", "2", "-v").err
    found = Streaming(9, 10**10, 3.1e9, 0.831, 1.7234e9, 2_310_000_000, 1_790_000_000, 1 << 31, 1 << 30)
    monkeypatch.setattr(PlannedModel, "streaming", lambda model: found)
    assert json.loads(answer("hello", "-n", "2", "--json=full").out)["streaming"] == asdict(found)
    assert answer("hello", "-n", "2", "-v").err.splitlines()[-1] == (
        "[from disk: 1.6 GiB a token at 3.10 GB/s, 83 % of the time waiting; "
        "2.2 GiB of 3.8 GiB of the weights in memory]"
    )
    assert answer("hello", "-n", "2").err == ""


def test_run_follows_a_form(answer: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"a": {"enum": [1, true]}}, "required": ["a"]}')
    grammar = tmp_path / "grammar.gbnf"
    grammar.write_text('root ::= "- " [ab]{3} "\\n"\n')
    assert json.loads(answer("hello", "-j", str(schema)).out)["a"] in (1, True)
    assert re.fullmatch("- [ab]{3}\n", answer("hello", "--grammar", str(grammar)).out)
    result = answer("hello", "--regex", "yes|no", "-v")
    assert result.out in ("yes\n", "no\n")
    assert "greedy, regex of 6 characters\n" in result.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-j", '{"type": "nonsense"}'], "nonsense"),
        (["-j", '{"type": "string", "pattern": "("}'], "unclosed group"),
        (["--regex", "("], "unclosed group"),
        (["--grammar", "root ::= nothing"], "nothing"),
    ],
)
def test_a_form_that_cannot_be_is_one_sentence(answer: Run, arguments: list[str], said: str) -> None:
    result = answer("hello", *arguments)
    assert (result.code, result.out) == (2, "")
    assert said in result.sentence


def test_an_answer_with_a_form_that_is_cut_says_so(answer: Run) -> None:
    person = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'
    cut = answer("hello", "-j", person, "-n", "5")
    assert (cut.code, cut.sentence) == (
        0,
        "hetrun: the answer was cut at 5 tokens (-n 5) before it was complete",
    )
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(cut.out.removesuffix("\n"))
    assert "cut at 3 tokens (-n 3), perhaps before" in answer("hello", "--regex", "[ab]+", "-n", "3").sentence
    whole = answer("hello", "--regex", "[ab]{3}", "-n", "3")  # it ends where the limit is
    assert (len(whole.out), whole.err) == (4, "")
    assert answer("hello", "-n", "3").err == ""  # a text says it in its closing line
    assert "/s, cut by -n 2, " in answer("hello", "-v", "-n", "2").err


def test_an_answer_that_the_context_cuts_says_so(answer: Run) -> None:
    cut = answer("hello", "--raw", "-c", "64")
    assert (cut.code, cut.sentence) == (
        0,
        "hetrun: the answer was cut by the end of the context (64 tokens with the prompt); -n sets a limit",
    )
    assert answer("hello", "--raw", "-c", "64", "--json").sentence == cut.sentence
    closing = answer("hello", "--raw", "-c", "64", "-v").err
    assert "/s, cut by the end of the context, " in closing
    assert cut.sentence not in closing


def test_a_schema_that_requires_nothing_is_remarked_on(answer: Run, tmp_path: Path) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "boolean"}}%s}'
    remark = (
        "hetrun: no property of the schema is required, so the model may leave all of them out; "
        'to have them: "required": ["a"]'
    )
    assert answer("hello", "-j", schema % "", "-n", "1").err.splitlines()[0] == remark
    assert remark not in answer("hello", "-j", schema % ', "required": ["a"]', "-n", "1").err
    (tmp_path / "in.txt").write_text("hello\n")
    assert remark not in answer("-f", str(tmp_path / "in.txt"), "-j", schema % "", "-n", "1").err


def test_benchs_help_has_a_quick_form(run: Run) -> None:
    said = " ".join(run("bench", "--help").out.split())
    assert "A quick look: hetrun bench -r 1 -p 64 -n 16" in said
    assert "without it, both are" in said
    assert "-p N tokens" in said
    assert "-n N tokens" in said


def test_a_schema_without_a_word_of_json_schema_is_refused(run: Run) -> None:
    said = run("run", "hi", "-m", "nothere.gguf", "-j", '{"name": "string", "age": 5}').sentence
    assert "json_schema (--json-schema): it has none of JSON Schema's words" in said
    assert said.endswith(
        'did you mean {"type": "object", "properties": {"name": {"type": "string"}, "age": '
        '{"type": "integer"}}, "required": ["name", "age"]}?'
    )


def test_run_json_with_log_probabilities(answer: Run) -> None:
    done = json.loads(answer("hello", "-n", "2", "--json", "--logprobs", "2", "--prompt-logprobs", "0").out)
    assert [entry["id"] for entry in done["logprobs"]] == done["tokens"]
    best = done["logprobs"][0]["top_logprobs"]
    assert best[0]["id"] == done["tokens"][0]  # it was greedy
    assert len(best) == 2
    assert set(best[0]) == {"id", "token", "bytes", "logprob"}
    nothing, *scores = done["prompt_logprobs"]
    assert nothing is None
    assert len(scores) == done["usage"]["prompt_tokens"] - 1
    assert all(entry["logprob"] < 0 and entry["top_logprobs"] == [] for entry in scores)


def test_run_scores_a_prompt_and_writes_nothing(answer: Run) -> None:
    done = json.loads(answer("hello", "--raw", "-n", "0", "--json", "--prompt-logprobs", "1").out)
    assert (done["text"], done["tokens"], done["finish_reason"]) == ("", [], "length")
    assert len(done["prompt_logprobs"]) == done["usage"]["prompt_tokens"]


def test_run_prompts_go_through_the_template_unless_raw(answer: Run) -> None:
    def prompt_tokens(*arguments: str) -> int:
        done = json.loads(answer(*arguments, "-n", "1", "--json").out)
        return int(done["usage"]["prompt_tokens"])

    raw, templated = prompt_tokens("hello", "--raw"), prompt_tokens("hello")
    assert raw < templated < prompt_tokens("hello", "--system", "Be brief.")


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_run_reads_the_prompt_from_stdin(answer: Run, arguments: list[str]) -> None:
    given = answer("hello", "-n", "4")
    assert answer(*arguments, "-n", "4", stdin=b"hello\n").out == given.out
    assert answer(*arguments, "-n", "4", stdin=b"other\n").out != given.out


@pytest.mark.parametrize(("stdin", "said"), [(b"", "is empty"), (b" \n", "is empty"), (b"a\xff", "byte 1")])
def test_run_refuses_a_stdin_that_is_no_prompt(answer: Run, stdin: bytes, said: str) -> None:
    result = answer(stdin=stdin)
    assert result.code == 2
    assert said in result.sentence


def test_run_with_a_seed_repeats_itself(run: Run, tiny: str) -> None:
    def drawn(seed: int) -> str:
        arguments = ("hello", "-m", tiny, "--backend", "reference", "-n", "8", "--temp", "1")
        return run("run", *arguments, "--seed", str(seed)).out

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(4)}) > 1


def endless(tiny: str) -> tuple[str, ...]:
    """Greedy, and known not to end within thousands of tokens."""
    return ("run", "hello", "-m", tiny, "--backend", "reference", "--temp", "0", "--raw")


def test_ctrl_c_stops_and_what_was_written_stays(tiny: str) -> None:
    with start(*endless(tiny)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        before = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait() == 130
        assert before + rest
        assert rest.endswith(b"\n")
        assert b"Traceback" not in process.stderr.read()


# A grammar that is tried out for an hour.
TRIED_FOR_LONG = """
import sys, time
from hetrun.sampling.grammar import token_mask
def try_out(*args): print("it is tried out", file=sys.stderr, flush=True); time.sleep(3600)
token_mask.try_out = try_out
"""


def test_ctrl_c_does_not_wait_for_a_grammar(tiny: str, within: Within) -> None:
    with start(*endless(tiny), "--grammar", 'root ::= "a"\n', code=TRIED_FOR_LONG) as process:
        assert process.stderr is not None
        while b"it is tried out" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        with within(0.5):
            assert process.wait() == 130
        assert process.stderr.read().strip() == b""


def test_a_reader_that_has_seen_enough_is_no_error(tiny: str) -> None:
    with start(*endless(tiny)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait() == 0
        assert process.stderr.read() == b""


def test_a_model_s_escape_sequences_do_not_reach_a_terminal(tiny: str) -> None:
    ours, theirs = pty.openpty()
    arguments = (*endless(tiny), "-n", "300", "--temp", "2", "--seed", "3", "--top-k", "0", "--min-p", "0")
    command = [sys.executable, "-m", "hetrun", *arguments, "--top-p", "1"]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        seen = b"".join(iter(lambda: read_terminal(ours), b""))
        assert process.wait() == 0
    os.close(ours)
    controls = {byte for byte in seen if byte < 32} - set(b"\r\n\t")
    assert not controls
    assert "␛".encode() in seen or "␀".encode()[:2] in seen  # there was something to hide


def read_terminal(descriptor: int) -> bytes:
    """What came; nothing when the other side hung up."""
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how Linux says that no process has the other side open any more
        return b""


# --- plan, inspect, devices


def test_plan(run: Run, tiny: str) -> None:
    plan = json.loads(run("plan", "-m", tiny, "--backend", "reference", "--json").out)
    assert {segment["backend"] for p in plan["plans"] for s in p["stages"] for segment in s} == {"reference"}
    assert "reference" in run("plan", "-m", tiny, "--backend", "reference").out


@pytest.mark.parametrize(("busy", "said"), [(0.0, False), (1.5, True)])
def test_a_plan_says_that_other_programs_run(
    run: Run, tiny: str, busy: float, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetrun.cli.reports.plan.others_running", lambda: busy)
    done = run("plan", tiny)
    assert ("other programs keep" in done.out) == said
    assert done.code == 0


def test_a_printed_plan_can_be_used(run: Run, answer: Run, tiny: str, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text(run("plan", "-m", tiny, "--backend", "reference", "--json").out)
    assert answer("hello", "-n", "4", "--plan", str(saved)).out == answer("hello", "-n", "4").out


def test_inspect(run: Run, tiny: str) -> None:
    facts = json.loads(run("inspect", tiny, "--json").out)
    assert (facts["architecture"], facts["context"], facts["vocabulary"]) == ("llama", TINY.context, 320)
    assert facts["types"]["F32"]["share"] == 1.0
    assert "tensors" not in facts
    assert "llama" in run("inspect", tiny).out
    tensors = json.loads(run("inspect", tiny, "--json", "--tensors").out)["tensors"]
    assert {"token_embd.weight", "blk.0.attn_q.weight"} <= {tensor["name"] for tensor in tensors}
    assert "blk.0.attn_q.weight" in run("inspect", tiny, "--tensors").out


def test_what_a_model_reads_pictures_with(run: Run, tiny: str, tmp_path: Path) -> None:
    pair = towers.write_pair("gemma3", tmp_path / "seeing")
    model, tower = str(pair.text), str(pair.mmproj)
    assert json.loads(run("inspect", tiny, "--json").out)["pictures"] is None
    facts = json.loads(run("inspect", model, "--json").out)["pictures"]
    assert facts == {"file": tower, "projector": "gemma3", "bytes": read_vision(tower).nbytes}
    assert f"with {tower}" in run("inspect", model).out
    plan = json.loads(run("plan", model, "--json").out)["notes"]
    assert any(note.startswith(f"reads pictures with {pair.mmproj.name}, which takes") for note in plan)
    assert run("plan", model, "--mmproj", str(tmp_path)).err.startswith("hetrun: --mmproj")
    pair.mmproj.rename(tmp_path / "elsewhere.gguf")
    assert "there is no mmproj file" in json.loads(run("inspect", model, "--json").out)["pictures"]["missing"]
    notes = json.loads(run("plan", model, "--mmproj", "none", "--json").out)["notes"]
    assert "reads no pictures: --mmproj none: pictures are left out" in notes


def test_devices(run: Run) -> None:
    told = json.loads(run("devices", "--json").out)
    rows = told["backends"]
    reference = next(row for row in rows if row["backend"] == "reference")
    assert reference["available"] is True
    assert "numpy" in reference["detail"]
    assert f"{'':<15} {reference['summary']}" in run("devices").out.splitlines()
    assert not any("peaks" in row for row in rows)
    assert sorted(told["cores"]["cpus"]) == list(this_machine().cpus)
    assert told["cores"]["sets"][-1]["threads"] == this_machine().threads


def test_devices_and_plan_say_where_threads_run(
    run: Run, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = read_topology(of(EPYC))
    monkeypatch.setattr(reports, "this_machine", lambda: tree)
    out = run("devices").out
    assert "48 cores, 96 hardware threads, 2 sockets, 8 NUMA nodes, 16 last-level caches of 3 cores" in out
    assert "  24 threads: all cores of one socket, on CPU 0-23" in out
    seats = ThreadCores(tree)
    monkeypatch.setattr(query_handlers, "this_machine", lambda: tree)
    monkeypatch.setattr(query_handlers, "chosen", lambda: seats)
    options = ("plan", "-m", tiny, "--threads", "16")
    assert "CPU" not in run(*options).out
    seats.choose(next(s for s in core_sets(tree) if s.name == "1 core of each cache"))
    assert "16 threads: 1 core of each cache, CPU 0,3,6,9" in run(*options).out
    (cores,) = json.loads(run(*options, "--json").out)["cores"]
    assert cores["cpus"] == list(range(0, 48, 3))


def test_devices_measures_what_products_reach(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpretingBackend, "peaks", lambda self: {"float32": 2e9})
    known = {name: d for name, d in registry.backends().items() if name == "reference"}
    monkeypatch.setattr(registry, "backends", lambda: known)
    (row,) = json.loads(run("devices", "--json", "--measure").out)["backends"]
    assert row["peaks"] == {"float32": 2e9}
    assert "float32 products: 2 G operations/s" in run("devices", "--measure").out


@pytest.mark.parametrize(("busy", "said"), [(0.0, False), (None, False), (1.5, True)])
def test_speeds_of_a_busy_machine_have_a_remark(
    run: Run, monkeypatch: pytest.MonkeyPatch, busy: float | None, said: bool
) -> None:
    monkeypatch.setattr(OtherPrograms, "look", lambda self, at: busy)
    known = {name: d for name, d in registry.backends().items() if name == "reference"}
    monkeypatch.setattr(registry, "backends", lambda: known)
    assert ("other programs kept about 1.5 cores busy" in run("devices", "--measure").out) == said
    assert json.loads(run("devices", "--json", "--measure").out)["others_busy_cores"] == busy
    assert "busy" not in run("devices").out


def test_measuring_shows_which_backend_is_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    @contextmanager
    def rows(what: str) -> Iterator[Callable[[ProgressRow], None]]:
        yield lambda row: shown.append(f"{what} {row.done} of {row.total} {row.remarks}")

    monkeypatch.setattr(reports, "rows", rows)
    known = {name: d for name, d in registry.backends().items() if name in ("reference", "llamacpp")}
    monkeypatch.setattr(registry, "backends", lambda: known)
    run("devices", "--measure")
    assert shown == ["measuring 0 of 2 llamacpp", "measuring 1 of 2 reference"]


# --- serve and chat


def test_serve_answers_and_cleans_up(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "hetrun.sock"
    options = ("--alias", "gpt-4o,other", "-n", "3", "--seed", "5", "--cors-origin", "localhost")
    with start("serve", "-m", tiny, "--backend", "reference", "--uds", str(path), *options) as process:
        assert process.stderr is not None
        while b"is being loaded" in (first := process.stderr.readline()):
            pass  # on a busy machine
        said = first.decode()
        assert said == f"hetrun: tiny as gpt-4o, other on unix:{path}/v1 (Ctrl-C stops)\n"
        said = process.stderr.readline().decode()
        assert said == "hetrun: chat template: the model's own (tokenizer.chat_template)\n"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as http:
            body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 1.5}
            page = {"origin": "http://localhost:3000"}
            answered = http.post("/v1/chat/completions", json=body, headers=page).json()
            assert (answered["model"], answered["usage"]["completion_tokens"]) == ("gpt-4o", 3)
            params = http.get("/props").json()["default_generation_settings"]["params"]
            assert (params["seed"], params["max_tokens"]) == (5, 3)
            assert http.get("/health").json() == {"status": "ok"}
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
        (logged,) = process.stderr.read().decode().splitlines()  # of GETs none is said without -v
        assert re.fullmatch(r"hetrun: [\d:]{8} socket POST /v1/chat/completions 200 \d+\.\d\d s", logged)
    assert not path.exists()


def test_several_values_in_one_word(run: Run, tiny: str) -> None:
    found = run("serve", "--models", f"{tiny},missing.gguf")
    assert (found.code, found.err.startswith("hetrun: missing.gguf does not exist")) == (2, True)
    found = run("plan", "-m", tiny, "--backend", "reference,xyz")
    assert (found.code, "reference,xyz" in found.err, "xyz" in found.err) == (2, False, True)
    found = run("serve", "-m", tiny, "--models", tiny, "--alias", "a,b")
    assert found.err == "hetrun: --alias names a single model: it does not go with --models\n"


def test_a_server_is_listed_used_and_stopped(run: Run, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "hetrun.sock"
    local = run("run", "hello", "-m", tiny, "--temp", "0", "-n", "6", "--no-server").out
    with start("serve", "-m", tiny, "--uds", str(path)) as process:
        assert process.stderr is not None
        process.stderr.readline()
        assert f"tiny   unix:{path}" in run("ps").out
        there = run("run", "hello", "-m", tiny, "--temp", "0", "-n", "6", "-v")
        assert there.out == local
        assert f"answered by your server on unix:{path}" in there.err
        assert run("stop", "tiny").sentence == f"hetrun: stopped tiny on unix:{path}"
        assert process.wait() == 0
        assert process.stdout is not None
        assert process.stdout.read() == b""
    assert not path.exists()


def test_serve_with_a_template_that_is_none_does_not_begin(tiny: str, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if")
    with start("serve", "-m", tiny, "--port", "0", "--chat-template", str(template)) as process:
        assert process.stderr is not None
        assert process.wait() == 2
        assert b"line 1: unexpected 'end of template'" in process.stderr.read()


def test_serve_with_a_bad_model_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "hetrun.sock"
    with start("serve", "-m", __file__, "--uds", str(path)) as process:
        assert process.stderr is not None
        assert process.wait() == 2
        assert b"is not a GGUF file" in process.stderr.read()
    assert not path.exists()


def test_serve_with_too_little_memory_leaves_nothing(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "hetrun.sock"
    options = ("--backend", "reference", "--ram", "100KiB", "--uds", str(path))
    with start("serve", "-m", tiny, *options) as process:
        assert process.stderr is not None
        assert process.wait() == 2
        (sentence,) = process.stderr.read().decode().splitlines()
        assert sentence.startswith("hetrun: ")
        assert "this model needs at least" in sentence
    assert not path.exists()


def test_chat_needs_a_terminal(run: Run) -> None:
    result = run("chat", stdin=b"")
    assert result.code == 2
    assert "terminal" in result.sentence


def test_chat_in_a_terminal(tiny: str) -> None:
    ours, theirs = pty.openpty()
    arguments = ("chat", "-m", tiny, "--backend", "reference", "-n", "5", "--temp", "0")
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-m", "hetrun", *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        try:
            wait_for(ours, b"tiny")
            os.write(ours, b"hello\r")
            wait_for(ours, b"tokens/s")
            os.write(ours, b"\x11")  # Ctrl+Q
            while read_terminal(ours):
                pass
            assert process.wait() == 0
        finally:
            process.kill()
            os.close(ours)


def wait_for(descriptor: int, text: bytes) -> None:
    """Read the terminal until it shows the text."""
    seen = b""
    while text not in seen:
        more = read_terminal(descriptor)
        assert more, f"never saw {text!r} in {seen[-2000:]!r}"
        seen += more


def test_ctrl_c_while_a_class_is_made_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    def load(arguments: list[str]) -> int:
        type("Made", (), {"member": Stopped()})  # as an Enum in a module that is imported
        return 0

    monkeypatch.setattr(commands, "run_command", load)
    assert hetrun.cli.exit_code(["run", "hi"]) == STOPPED
    assert capsys.readouterr().err == ""
