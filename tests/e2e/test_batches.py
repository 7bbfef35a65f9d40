"""`hetrun run -f` as people run it: files of every kind, kills, servers that help, what is no good."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetrun import LLM, SamplingParams
from hetrun.cli import exit_code
from tests.models.tiny import TinyLlama, write_gguf
from tests.support.server_log import next_line
from tests.support.tiers import exhaustive
from tests.tools import batch_kills

pytestmark = pytest.mark.slow

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(TinyLlama("tiny", layers=2, context=512), tmp_path_factory.mktemp("m") / "tiny.gguf")


def hetrun(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "hetrun", "run", *map(str, arguments)]
    return subprocess.run(command, env=os.environ, input=stdin, capture_output=True, check=False)


def rows(data: bytes) -> Rows:
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def test_a_text_gives_the_answers_that_its_lines_get_alone(model: Path, tmp_path: Path) -> None:
    prompts = [f"Say {i} again" for i in range(12)]
    (tmp_path / "in.txt").write_text("\n\n".join(prompts))
    done = hetrun("-m", model, "-f", tmp_path / "in.txt", "-n", "6", "--temp", "0", "--deterministic")
    assert (done.returncode, done.stderr) == (0, b"")
    found = rows(done.stdout)
    assert [row["index"] for row in found] == list(range(12))
    with LLM(model, deterministic=True) as llm:
        params = SamplingParams(max_tokens=6, temperature=0)
        alone = [llm.chat([{"role": "user", "content": prompt}], params).text for prompt in prompts]
    assert [row["text"] for row in found] == alone
    assert len(set(alone)) > 1


def test_openai_requests_of_every_kind_come_back_as_openai_has_them(model: Path, tmp_path: Path) -> None:
    hi = [{"role": "user", "content": "Hi"}]
    lines: Rows = [
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": hi}},
        {"custom_id": "t", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once"}},
        {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": "Hi", "model": "x"}},
        {"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": {"input": "Hi"}},
        {
            "custom_id": "x",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": hi, "top_p": 7},
        },
        {"custom_id": "n", "method": "POST", "url": "/v1/images", "body": {}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    output = tmp_path / "out.jsonl"
    done = hetrun("-m", model, "-f", tmp_path / "in.jsonl", "-o", output, "-n", "4", "--json")
    assert done.returncode == 3
    told = json.loads(done.stdout)
    assert (told["requests"], told["failed"]) == (6, 2)
    found = {str(row["custom_id"]): row for row in rows(output.read_bytes())}
    assert list(found) == ["c", "t", "e", "r", "x", "n"]
    bodies: dict[str, Any] = {
        name: row["response"] and row["response"]["body"] for name, row in found.items()
    }
    assert bodies["c"]["choices"][0]["message"]["role"] == "assistant"
    assert bodies["c"]["usage"]["completion_tokens"] <= 4
    assert bodies["t"]["object"] == "text_completion"
    assert len(bodies["e"]["data"][0]["embedding"]) == 128
    assert bodies["r"]["object"] == "response"
    assert bodies["x"]["error"]["param"] == "top_p"
    assert bodies["n"] is None


def test_what_is_wrong_with_a_line_is_said_in_its_place(model: Path) -> None:
    too_long = json.dumps({"prompt": "word " * 2000})
    lines = [
        '{"prompt": "a"}',
        '{"prompt"',
        too_long,
        '{"prompt": "a", "tmp": 1}',
        '{"prompt": "a", "top_k": -5}',
    ]
    done = hetrun("-m", model, "-f", "-", "-n", "2", stdin="\n".join(lines).encode())
    assert done.returncode == 3
    first, *failed = rows(done.stdout)
    assert first["finish_reason"] in ("stop", "length")
    said = [str(row["error"]["message"]) for row in failed]
    for why, text in zip(
        ("not JSON", "maximum context length", "unknown field 'tmp'", "top_k"), said, strict=True
    ):
        assert why in text
    assert b"4 of 5 failed, the first: line 2: it is not JSON" in done.stderr


def test_inputs_that_are_no_good_are_one_sentence(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    (tmp_path / "out").write_text("mine\n")
    source = ("-m", str(model), "-f", str(tmp_path / "in.txt"))
    for arguments, why in (
        (("-f", str(tmp_path / "none")), "cannot be opened: No such file"),
        (("-f", str(tmp_path)), "is a folder"),
        ((*source, "-o", str(tmp_path / "out")), "exists already: continue it with --resume"),
        ((*source, "-o", str(tmp_path / "out"), "--resume"), "line 1 of .* is not a result of a batch"),
        ((*source, "-o", str(tmp_path / "in.txt"), "--resume"), "is the file with the requests"),
        ((*source, "--resume"), "name it with -o"),
        ((*source, "prompt"), "use only one of them"),
        (("-o", "x", "prompt"), "-o needs -f"),
        (("--workers", "http://h", "-n", "1"), "--workers needs -f"),
        ((*source, "--workers", "ftp://h"), "must be like http://host:8080"),
        ((*source, "--workers", "http://127.0.0.1:9"), "no worker answers"),
        (("-m", str(tmp_path / "in.txt"), "-f", str(tmp_path / "in.txt")), "GGUF"),
    ):
        assert exit_code(["run", *arguments]) == 2, arguments
        out, err = capfd.readouterr()
        assert out == ""
        (sentence,) = [line for line in err.splitlines() if "hetrun will try again" not in line]
        assert re.search(why, sentence), sentence
    assert (tmp_path / "out").read_text() == "mine\n"
    assert not (tmp_path / "out.waiting").exists()


@pytest.mark.parametrize(
    ("kills", "requests", "spread_s"), [(2, 120, 0.1), pytest.param(4, 300, 0.5, marks=exhaustive)]
)
def test_killed_again_and_again_it_ends_with_the_same_bytes(
    kills: int, requests: int, spread_s: float, model: Path, tmp_path: Path
) -> None:
    rng = random.Random(3)
    (tmp_path / "in.txt").write_text(batch_kills.requests(requests, rng))
    case = batch_kills.Case(tmp_path / "in.txt", ("-m", str(model), "-n", "24", "--temp", "1"))
    case.whole(tmp_path / "alone")
    sizes = batch_kills.kill(case, tmp_path / "killed", kills, rng, spread_s)
    assert case.whole(tmp_path / "killed", resume=True) == 3
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "alone").read_bytes()
    assert len(rows((tmp_path / "alone").read_bytes())) == requests
    assert sorted(sizes) == sizes
    assert not (tmp_path / "killed.waiting").exists()


def test_ctrl_c_leaves_whole_lines(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"Say {i}\n" for i in range(5000)))
    case = batch_kills.Case(tmp_path / "in.txt", ("-m", str(model), "-n", "8"))
    for sign in (signal.SIGINT, signal.SIGTERM):
        process = case.begin(tmp_path / "out", resume=sign == signal.SIGTERM)
        size = (tmp_path / "out").stat().st_size if (tmp_path / "out").exists() else 0
        while not (tmp_path / "out").exists() or (tmp_path / "out").stat().st_size <= size:
            time.sleep(0.01)
        process.send_signal(sign)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert re.search(
            rf"stopped: \d+ .*answered and kept in {tmp_path}/out( and \S+\.waiting)?; the same command",
            err.decode(),
        )
        assert err.count(b"\n") <= 2
        found = rows((tmp_path / "out").read_bytes())
        assert [row["index"] for row in found] == list(range(len(found)))


def test_a_file_that_may_not_grow_keeps_whole_lines(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"Say {i}\n" for i in range(60)))
    output = tmp_path / "out"
    # The engine's process, which is there by then, keeps its memory in such files.
    code = """
import resource
from hetrun.tools.batch import runner as batch
from hetrun.cli import main
batch.FULL_S, batch.LOOK_S = 0.3, 0.1
class Batch(batch.BatchRun):
    async def run(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        return await super().run()
batch.BatchRun = Batch
main()
"""
    arguments = ("run", "-m", model, "-f", tmp_path / "in.txt", "-n", "4", "--deterministic", "-o")
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, (*arguments, output))],
        env=os.environ, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert (
        b"File too large. The results before that are complete: free some space, and continue with --resume"
        in done.stderr
    )
    assert 0 < len(rows(output.read_bytes())) < 60
    assert hetrun(*arguments[1:], output, "--resume").returncode == 0
    assert hetrun(*arguments[1:], tmp_path / "alone").returncode == 0
    assert output.read_bytes() == (tmp_path / "alone").read_bytes()


@pytest.fixture
def servers(model: Path, tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Two by their addresses, the first on a socket."""
    path = tmp_path / "s"
    command = [sys.executable, "-m", "hetrun", "serve", "-m", str(model), "--deterministic", "--api-key", "k"]
    begun = [
        subprocess.Popen([*command, *where], env=os.environ, stderr=subprocess.PIPE, text=True)
        for where in (("--uds", str(path)), ("--port", "0"))
    ]
    try:
        found = {}
        for process in begun:
            assert process.stderr is not None
            said = re.search(r" on (\S+)/v1 \(Ctrl-C stops\)", next_line(process.stderr))
            assert said
            found[said[1]] = process
        yield found
    finally:
        for process in begun:
            process.kill()
            process.communicate()


def test_servers_that_help_give_the_same_results_also_when_one_dies(
    model: Path, tmp_path: Path, servers: dict[str, subprocess.Popen[str]]
) -> None:
    (tmp_path / "in.txt").write_text("".join(f"Say {i}\n" for i in range(150)))
    common = ("-f", tmp_path / "in.txt", "-n", "12", "--temp", "0", "--deterministic")
    assert hetrun("-m", model, *common, "-o", tmp_path / "alone").returncode == 0
    refused = hetrun(*common, "--workers", *servers)
    assert (refused.returncode, b"needs a different key" in refused.stderr) == (2, True)
    command = [sys.executable, "-m", "hetrun", "run", *map(str, common), "-o", str(tmp_path / "out")]
    process = subprocess.Popen(
        [*command, "--workers", *servers, "--api-key", "k"], env=os.environ, stderr=subprocess.PIPE
    )
    while not (tmp_path / "out").exists() or (tmp_path / "out").read_bytes().count(b"\n") < 30:
        time.sleep(0.01)
    next(iter(servers.values())).kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    alone, out = (rows((tmp_path / name).read_bytes()) for name in ("alone", "out"))
    assert [row["text"] for row in out] == [row["text"] for row in alone]
