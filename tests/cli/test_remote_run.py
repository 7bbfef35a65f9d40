"""`hetrun run --url`: a prompt that a running server answers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetrun import cli
from hetrun.client.engine_client import LocalClient
from hetrun.server import listen
from tests.support.fakes import FakeEngine
from tests.support.served import served


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture(params=["tcp", "unix"])
def url(request: pytest.FixtureRequest, engine: FakeEngine, tmp_path: Path) -> Iterator[str]:
    place = listen.Address(port=0) if request.param == "tcp" else listen.Address(uds=tmp_path / "hetrun.sock")
    with served(LocalClient(engine), place) as found:
        yield found.removeprefix("unix:")  # a socket's path is enough


@pytest.fixture
def one(engine: FakeEngine) -> Iterator[str]:
    with served(LocalClient(engine), listen.Address(port=0), api_key="secret") as found:
        yield found


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ran:
    code = cli.exit_code(["run", *arguments])
    return Ran(code, *capsys.readouterr())


def test_a_running_server_answers(url: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("-n", "9", "--temp", "0.25", "--top-k", "7", "--seed", "3", "--system", "Be kind.")
    ran = run(capsys, "say hello world", "--url", url, *options, "--json-schema", '{"type": "object"}')
    assert (ran.code, ran.out, ran.err) == (0, "hello world\n", "")
    (request,) = engine.requests
    assert request.messages is not None
    assert [m["role"] for m in request.messages] == ["system", "user"]
    p = request.params
    assert (p.max_tokens, p.temperature, p.top_k, p.seed) == (9, 0.25, 7, 3)
    assert json.loads(str(p.json_schema)) == {"type": "object"}


def test_a_prompt_from_stdin_and_in_json(
    one: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"say hello world\n")))
    ran = run(capsys, "--url", one, "--api-key", "secret", "--json", "--logprobs", "2", "-n", "5")
    said = json.loads(ran.out)
    assert (said["text"], said["finish_reason"], said["model"]) == ("hello world", "stop", "fake")
    assert said["usage"]["completion_tokens"] == 2
    first, second = said["logprobs"]
    assert (first["token"], first["id"], len(first["top_logprobs"])) == ("hello ", None, 2)
    assert second["logprob"] == -0.5


def test_a_text_goes_on_to_its_end(one: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "say " + " ".join(map(str, range(40)))
    ran = run(capsys, prompt, "--raw", "--url", one, "--api-key", "secret", "--json", "--logprobs", "1")
    said = json.loads(ran.out)
    assert said["text"] == prompt.removeprefix("say ")
    assert len(said["logprobs"]) == 40
    assert (engine.requests[0].text, engine.requests[0].params.max_tokens) == (prompt, 2048)


def test_more_on_stderr(one: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run(capsys, "say hello", "--url", one, "--api-key", "secret", "--temp", "0", "-v")
    assert ran.out == "hello\n"
    assert f"model: fake at {one}" in ran.err
    assert "7 prompt tokens" in ran.err
    assert "greedy]" in ran.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ram", "2GiB"], "--ram does not go with --url"),
        (["--backend", "amx"], "--backend does not go with --url"),
        (["--deterministic"], "--deterministic does not go with --url"),
        (["--chat-template", "x"], "--chat-template does not go with --url"),
        (["--prompt-logprobs", "1", "--json"], "--prompt-logprobs does not go with --url"),
        (["--logprobs", "1"], "add it"),
        (["-f", "x"], "--workers URL"),
        (["-m", "other"], "has no model other; it has: fake"),
        (["--api-key", "wrong"], "Incorrect API key"),
    ],
)
def test_what_is_refused(
    one: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    prompt = [] if "-f" in arguments else ["say hello"]
    key = [] if "--api-key" in arguments else ["--api-key", "secret"]
    ran = run(capsys, *prompt, "--url", one, *key, *arguments)
    assert (ran.code, ran.out) == (2, "")
    (line,) = ran.err.splitlines()
    assert sentence in line
    assert engine.requests == []


def test_a_server_that_fails_or_is_not_there(
    one: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(capsys, "fail", "--url", one, "--api-key", "secret")
    assert (ran.code, ran.out) == (2, "one two \n")
    assert "the fake backend failed" in ran.err
    ran = run(capsys, "hi", "--url", str(tmp_path / "none.sock"))
    assert ran.code == 2
    assert "cannot be reached" in ran.err


def test_a_key_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    ran = run(capsys, "hi", "--api-key", "secret")
    assert ran.code == 2
    assert "--api-key goes with -f or --url" in ran.err


def test_ctrl_c_stops_the_server_too(
    one: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enough(io.StringIO):
        def write(self, text: str) -> int:
            if self.getvalue().startswith("ha ha"):
                raise KeyboardInterrupt
            return super().write(text)

    monkeypatch.setattr("sys.stdout", Enough())
    assert cli.exit_code(["run", "forever", "--url", one, "--api-key", "secret"]) == 130
    assert engine.idle.wait(20)
    assert engine.cancelled == [1]
