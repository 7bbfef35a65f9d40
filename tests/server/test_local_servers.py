"""This user's servers, found by their private sockets; what `hetrun run` asks of them; ps and stop."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun import cli
from hetrun.client import local_servers
from hetrun.client.engine_client import LocalClient
from hetrun.client.event_json import event_as_json, event_of, request_as_json, request_of
from hetrun.client.events import Event, GenerateRequest, ModelInfo, Timings, TokenLogprob, Usage
from hetrun.client.interface import ChatClient, Health
from hetrun.client.local_servers import PrivateClient, alike, running_servers
from hetrun.client.model_catalog import CatalogModel, identity
from hetrun.client.model_pool import ModelPool
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings, runtime_dir
from hetrun.errors import (
    BudgetError,
    ContextFull,
    EngineStopped,
    HetrunError,
    ModelFileError,
    Overloaded,
    UserError,
)
from hetrun.loader.hub import stores
from hetrun.server import listen
from hetrun.server.private_socket import private_app
from tests.support.fakes import INFO, FakeEngine

ADDRESS = "http://127.0.0.1:8080"


class LoadingClient(LocalClient):
    """Loads until a request waits for it."""

    def __init__(self, engine: FakeEngine, error: HetrunError | None = None) -> None:
        super().__init__(engine)
        self._error = error
        self._is_loaded = False

    @property
    def health(self) -> Health:
        return super().health if self._is_loaded else Health("loading", 0.4)

    async def info(self) -> ModelInfo:
        if self._error:
            raise self._error
        self._is_loaded = True
        return await super().info()


class Server:
    """A server over fake engines, in a thread of its own."""

    def __init__(
        self,
        *models: Path,
        settings: Settings | None = None,
        address: str = ADDRESS,
        client: Callable[[FakeEngine], ChatClient] = LocalClient,
    ) -> None:
        self.models, self.address, self.client = models, address, client
        self.settings = settings or Settings.resolve()
        self.engines: list[FakeEngine] = []
        self.stopped = threading.Event()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    def _start(self, found: CatalogModel, ram: int | None) -> ChatClient:
        fake = FakeEngine()
        fake.info = replace(INFO, path=str(found.path))
        self.engines.append(fake)
        return self.client(fake)

    async def _serve(self) -> None:
        shelf = ModelPool([CatalogModel(path.stem, path, 1) for path in self.models], self._start)
        if shelf.only:
            shelf.only.begin()
            if self.client is LocalClient:
                await shelf.only.info()
        with local_servers.private_socket() as bound:
            options = alike(self.settings)
            app = private_app(shelf, self._stop, address=self.address, needs_key=False, options=options)
            async with listen.served(app, bound):
                self._ready.set()
                await self._stop.wait()
                await shelf.close()
        self.stopped.set()

    def close(self) -> None:
        if not self.stopped.is_set():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@contextmanager
def serving(*models: Path, **more: object) -> Iterator[Server]:
    server = Server(*models, **more)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF of a fake")
    return path


def run(*arguments: str) -> int:
    return cli.exit_code(list(arguments))


# --- what is found


def test_a_server_is_listed_while_it_runs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(model):
        [path] = runtime_dir().iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(runtime_dir().stat().st_mode) == 0o700
        assert run("ps") == 0
        head, row = capsys.readouterr().out.splitlines()
        assert head.split() == ["MODEL", "ADDRESS", "MEMORY", "SINCE", "REQUESTS", "PID"]
        name, where, *memory, _, unit, requests, pid = row.split()
        assert (name, where, memory, unit) == ("small", ADDRESS, ["200", "MiB"], "s")
        assert (requests, pid) == ("2", str(os.getpid()))
        assert run("ps", "--json") == 0
        [said] = json.loads(capsys.readouterr().out)
        assert (said["pid"], said["address"], said["needs_key"]) == (os.getpid(), ADDRESS, False)
        assert said["models"][0]["status"] == "loaded"
    assert list(runtime_dir().iterdir()) == []
    assert run("ps") == 0
    out, err = capsys.readouterr()
    assert (out, "no server of yours is running" in err) == ("", True)


def test_what_a_killed_server_left_is_removed_and_nothing_else(model: Path) -> None:
    with serving(model):
        folder = runtime_dir()
        stale = folder / "1-abc.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(stale))
        for name in ("2-def.sock", "notes.txt"):
            (folder / name).write_text("mine")
        [server] = running_servers()
        assert server.pid == os.getpid()
        assert not stale.exists()
        assert sorted(p.name for p in folder.iterdir() if p != server.socket) == ["2-def.sock", "notes.txt"]


@pytest.mark.parametrize("body", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"])
def test_one_that_says_nonsense_is_listed_and_not_stopped(
    body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    def nonsense(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                if connection.recv(1 << 16):
                    connection.sendall(body)

    with local_servers.private_socket() as listener:
        thread = threading.Thread(target=nonsense, args=(listener,), daemon=True)
        thread.start()
        [server] = running_servers()
        assert server.facts is None
        assert server.why_not
        assert run("ps") == 0
        assert str(os.getpid()) in capsys.readouterr().out
        assert run("stop") == 2
        assert f"to end it: kill {os.getpid()}" in capsys.readouterr().err
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_folder_that_others_may_open_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    runtime_dir().mkdir()
    runtime_dir().chmod(0o755)
    assert run("ps") == 2
    assert "only you own and can open" in capsys.readouterr().err
    with pytest.raises(UserError, match="chmod 700"), local_servers.private_socket():
        pass


# --- stop


def test_a_server_is_stopped_by_model_address_or_pid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [tmp_path / f"{name}.gguf" for name in ("a", "b", "c")]
    with ExitStack() as ends:
        found = [
            ends.enter_context(serving(m, address=f"http://127.0.0.1:{8080 + i}"))
            for i, m in enumerate(models)
        ]
        assert run("stop") == 2
        assert "3 servers match: give an address, a pid or --all" in capsys.readouterr().err
        assert run("stop", "absent") == 2
        assert "no server of yours is called absent. Running: a on" in capsys.readouterr().err
        assert run("stop", "b") == 0
        assert "stopped b on http://127.0.0.1:8081" in capsys.readouterr().err
        assert found[1].stopped.wait(10)
        assert [s.facts and s.facts.models[0].name for s in running_servers()] == ["a", "c"]
        assert run("stop", "localhost:8080") == 0
        assert run("stop") == 0  # the only one
        assert found[0].stopped.wait(10)
        assert found[2].stopped.wait(10)
    capsys.readouterr()
    assert run("stop") == 2
    assert capsys.readouterr().err == "hetrun: no server of yours is running\n"


@pytest.mark.parametrize("way", ["smollm2", "demo", "the path", "a link", "the path of a file that is gone"])
def test_a_server_is_stopped_by_every_name_that_run_takes(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo, other = tmp_path / "SmolLM2-135M.Q4_1.gguf", tmp_path / "other.gguf"
    demo.write_bytes(b"GGUF of a fake")
    other.write_bytes(b"GGUF of another")
    (tmp_path / "link.gguf").symlink_to(demo)
    monkeypatch.setattr(stores, "demo_model", lambda: demo)
    name = {"a link": str(tmp_path / "link.gguf")}.get(way, str(demo) if "path" in way else way)
    with serving(demo) as server, serving(other, address="http://127.0.0.1:8081"):
        if "gone" in way:
            demo.unlink()
            monkeypatch.setattr(stores, "demo_model", lambda: None)
        assert run("stop", name) == 0
        assert server.stopped.wait(10)
        assert f"stopped SmolLM2-135M.Q4_1 on {ADDRESS}" in capsys.readouterr().err
        assert run("stop", name) == 2
        assert f"no server of yours is called {name}" in capsys.readouterr().err


def test_of_several_models_none_stands_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (demo := tmp_path / "SmolLM2-135M.Q4_1.gguf").write_bytes(b"GGUF of a fake")
    monkeypatch.setattr(stores, "demo_model", lambda: demo)
    with serving(demo, tmp_path / "b.gguf") as server:
        assert run("stop", "smollm2") == 2
        assert "smollm2 is one of 2 models, which stop together" in capsys.readouterr().err
        assert not server.stopped.is_set()


def test_all_are_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path / "a.gguf") as one, serving(tmp_path / "b.gguf", tmp_path / "c.gguf") as two:
        assert run("stop", "b") == 2
        assert (
            f"b is one of 2 models, which stop together: hetrun stop {os.getpid()}" in capsys.readouterr().err
        )
        assert run("ps") == 0
        assert "2 models" in capsys.readouterr().out
        assert run("stop", "--all") == 0
        assert one.stopped.wait(10)
        assert two.stopped.wait(10)


# --- run


def test_run_uses_a_server_that_has_the_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(model) as server:
        assert run("run", "say hello world", "-m", str(model), "--temp", "0.5", "--top-k", "7", "-v") == 0
        out, err = capsys.readouterr()
        assert out == "hello world\n"
        assert f"answered by your server on {ADDRESS}" in err
        [request] = server.engines[0].requests
        assert (request.params.temperature, request.params.top_k, request.params.top_p) == (0.5, 7, 0.95)
        assert run("run", "say hello world", "-m", str(model), "--json", "--logprobs", "1") == 0
        out, err = capsys.readouterr()
        said = json.loads(out)
        assert (said["text"], said["tokens"], said["server"]) == ("hello world", [1, 2], ADDRESS)
        assert [score["id"] for score in said["logprobs"]][:2] == [1, 2]
        assert err == ""  # no terminal, no remarks


def test_run_waits_for_a_server_that_loads_the_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(model, client=LoadingClient) as server:
        assert run("ps") == 0
        assert "loading 40%" in capsys.readouterr().out
        assert run("run", "say hello world", "-m", str(model), "-v") == 0
        out, err = capsys.readouterr()
        assert out == "hello world\n"
        assert f"your server on {ADDRESS} is loading the model" in err
        assert len(server.engines[0].requests) == 1
    error = BudgetError("--ram is too small")
    with serving(model, client=lambda engine: LoadingClient(engine, error)):
        assert run("run", "say hello world", "-m", str(model), "-v") == 2  # tried here: the file is no model
        err = capsys.readouterr().err
        assert "does not answer: --ram is too small" in err
        assert "small.gguf" in err


def test_run_asks_no_engine_what_it_uses(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in a long step."""
    with serving(model) as server:
        asked: list[object] = []
        monkeypatch.setattr(FakeEngine, "ask", lambda _, question: asked.append(question))
        assert run("run", "say hello world", "-m", str(model)) == 0
        assert len(server.engines[0].requests) == 1
    assert asked == []


@pytest.mark.parametrize(
    "own",
    [["--no-server"], ["--ram", "1GiB"], ["-c", "64"], ["--threads", "1"], ["--backend", "reference"]],
    ids=" ".join,
)
def test_run_loads_the_model_itself_where_options_are_for_that(
    model: Path, own: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(model) as server:
        assert run("run", "say hello", "-m", str(model), *own) == 2  # the file is no model
        assert server.engines[0].requests == []
    assert "small.gguf" in capsys.readouterr().err


def test_run_takes_no_server_with_other_files_or_options(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other := tmp_path / "other.gguf").write_bytes(model.read_bytes())
    with serving(model, settings=Settings.resolve(kv_type="q8_0")) as server:
        assert run("run", "say hello", "-m", str(model)) == 2
        monkeypatch.setenv("HETRUN_KV_TYPE", "q8_0")  # the same by other means
        assert run("run", "say hello", "-m", str(model)) == 0
        assert run("run", "say hello", "-m", str(other)) == 2
        (link := tmp_path / "link.gguf").symlink_to(model)
        assert run("run", "say hello", "-m", str(link)) == 0
        model.write_bytes(b"GGUF of another one")
        assert run("run", "say hello", "-m", str(model)) == 2
        assert len(server.engines[0].requests) == 2


def test_run_hears_what_is_wrong_from_the_server(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(model):
        assert run("run", "unfit regex", "-m", str(model), "--regex", "(") == 2
        err = capsys.readouterr().err
        assert "regex" in err
        assert "small.gguf" not in err
        # What only the server cannot do is tried here, where the file turns out to be no model.
        assert run("run", "refuse", "-m", str(model), "-v") == 2
        err = capsys.readouterr().err
        assert "does not answer: the prompt has 5000 tokens" in err
        assert "small.gguf" in err
        assert run("run", "fail", "-m", str(model)) == 1  # in the middle: it is not begun again
        assert capsys.readouterr().out == "one two \n"


def test_leaving_an_answer_cancels_it(model: Path) -> None:
    async def leave(path: Path) -> None:
        request = GenerateRequest(SamplingParams(), messages=({"role": "user", "content": "forever"},))
        stream = PrivateClient(path).generate("small", request)
        assert (await anext(stream)).text == "ha "
        await stream.aclose()

    # The fake engine's model is called as its file.
    with serving(model) as server:
        [found] = running_servers()
        assert found.facts
        assert found.facts.models[0].name == "small"
        asyncio.run(leave(found.socket))
        assert server.engines[0].idle.wait(5)
        assert server.engines[0].cancelled == [1]


# --- nothing is lost on the way

SCORE = TokenLogprob(0, float("-inf"), ((3, -0.5), (4, float("-inf"))), b"\xff\x00", (b"\xc3", b""))


@pytest.mark.parametrize(
    "event",
    [
        Event("token", "x", 0, SCORE, opened="<think>"),
        Event("token", "", 7),
        Event("prompt", prompt_logprobs=(SCORE, SCORE), echo=(b"\xe2", b"\x82")),
        Event("done", "end", None, None, "length", Usage(1, 2, 3), Timings(0.5, 0.1, 2.5, 3.5, 4, 5)),
    ],
    ids=lambda event: event.kind,
)
def test_events_cross_as_they_are(event: Event) -> None:
    assert event_of(json.loads(json.dumps(event_as_json(event), allow_nan=False))) == event


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ContextFull("long"), ContextFull),
        (BudgetError("much"), BudgetError),
        (Overloaded("busy", 3.0), Overloaded),
        (ModelFileError("/x", "bad"), UserError),
        (ZeroDivisionError("oops"), EngineStopped),
    ],
    ids=str,
)
def test_errors_cross_by_their_class(error: Exception, kind: type[Exception]) -> None:
    found = event_of(json.loads(json.dumps(event_as_json(Event("error", error=error))))).error
    assert type(found) is kind
    assert str(found) == str(error)


def test_requests_cross_as_they_are() -> None:
    params = SamplingParams(
        *(7, 0.25), stop=("a", "\n"), logit_bias={5: float("-inf"), 6: 1.0}, seed=3, regex="a+", logprobs=2
    )
    for request in (
        GenerateRequest(params, messages=({"role": "user", "content": "x"},)),
        GenerateRequest(params, text="y", echo=True),
        GenerateRequest(params, tokens=(1, 2)),
    ):
        assert request_of(json.loads(json.dumps(request_as_json(request), allow_nan=False))) == request


@pytest.mark.parametrize(
    "said",
    [{}, {"params": {}}, {"params": {"nonsense": 1}, "text": "x"}, {"params": 7, "text": "x"}],
    ids=str,
)
def test_what_is_no_request_is_refused(said: dict[str, object]) -> None:
    with pytest.raises((ValueError, UserError)):
        request_of(said)


def test_the_identity_of_a_model_is_that_of_all_its_files(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    before = identity(parts[0])
    assert before == identity(parts[0])
    parts[1].write_bytes(b"GGUF changed")
    assert identity(parts[0]) not in ("", before)
    assert identity(tmp_path / "missing.gguf") == ""
