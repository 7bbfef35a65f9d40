"""`hetrun ps` and `hetrun stop`: servers are found, asked and stopped at their control sockets."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hetrun import cli
from hetrun.client import local_servers
from hetrun.client.local_servers import control_socket, running, runtime_folder
from hetrun.server.control import controlled
from tests.cli.test_cli import start


class Standing:
    """A server's control socket in a thread, and whether it was asked to stop."""

    def __init__(self, address: str, *models: str, since: float = 1_800_000_000.0) -> None:
        self.stopped = threading.Event()
        self._up, self._address, self._models, self._since = threading.Event(), address, models, since
        self._ends: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._up.wait(30)

    async def _run(self) -> None:
        stop, over = asyncio.Event(), asyncio.Event()
        self._ends.append((asyncio.get_running_loop(), over))

        def status() -> dict[str, object]:
            state = "stopping" if stop.is_set() else "ready"
            return {
                "models": list(self._models),
                "address": self._address,
                "since": self._since,
                "state": state,
            }

        async with controlled(stop, status):
            self._up.set()
            waiting = [asyncio.ensure_future(event.wait()) for event in (stop, over)]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        if stop.is_set():
            self.stopped.set()

    def end(self) -> None:
        loop, over = self._ends[0]
        if not loop.is_closed():
            loop.call_soon_threadsafe(over.set)
        self._thread.join()


@contextmanager
def standing(*servers: tuple[str, str]) -> Iterator[list[Standing]]:
    with ExitStack() as ends:
        found = []
        for i, (address, model) in enumerate(servers):
            found.append(Standing(address, model, since=1_800_000_000.0 + i))
            ends.callback(found[-1].end)
        yield found


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return (cli.exit_code(list(arguments)), *capsys.readouterr())


TWO = (("http://127.0.0.1:8080", "small"), ("unix:/run/large.sock", "large"))


def test_servers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with standing(*TWO):
        code, out, _ = run(capsys, "ps")
        heading, *rows = out.splitlines()
        assert (code, heading.split()) == (0, ["MODEL", "ADDRESS", "PID", "SINCE"])
        cells = [row.split()[:3] for row in rows]
        assert cells == [[model, address, str(os.getpid())] for address, model in TWO]
        code, out, _ = run(capsys, "ps", "--json")
        first = json.loads(out)[0]
        assert (first["models"], first["state"], first["since"]) == (
            ["small"],
            "ready",
            "2027-01-15T08:00:00+00:00",
        )
    code, out, err = run(capsys, "ps")
    assert (code, out) == (0, "")
    assert "no server of yours is running" in err
    assert run(capsys, "ps", "--json")[1] == "[]\n"


@pytest.mark.parametrize(
    "name",
    [
        "http://127.0.0.1:8080",
        "http://localhost:8080/v1",
        "localhost:8080",
        "unix:/run/large.sock",
        "/run/large.sock",
    ],
)
def test_one_is_stopped_by_its_address(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with standing(*TWO) as (small, large):
        code, out, err = run(capsys, "stop", name)
        assert (code, out) == (0, "")
        chosen, other = (large, small) if "sock" in name else (small, large)
        assert chosen.stopped.wait(20)
        assert not other.stopped.is_set()
        assert err.startswith(f"hetrun: stopped {'large' if chosen is large else 'small'} on ")
        assert len(running()) == 1


def test_the_only_one_is_stopped_without_a_name_and_all_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    with standing(TWO[0]) as (small,):
        assert run(capsys, "stop")[0] == 0
        assert small.stopped.wait(20)
    with standing(*TWO) as both:
        _, out, _ = run(capsys, "stop", "--all", "--json")
        assert [server["address"] for server in json.loads(out)] == [address for address, _ in TWO]
        assert all(server.stopped.wait(20) for server in both)
    assert run(capsys, "stop", "--all")[0] == 0


@pytest.mark.parametrize(
    ("servers", "arguments", "sentence"),
    [
        ((), (), "no server of yours is running"),
        ((), ("8080",), "no server of yours is 8080: none is running"),
        (TWO, (), "several servers run: name one, or give --all: http://127.0.0.1:8080 (pid "),
        (
            TWO,
            ("http://127.0.0.1:8081",),
            "no server of yours is http://127.0.0.1:8081: http://127.0.0.1:8080",
        ),
        (TWO, ("1",), "no server of yours is 1"),
        (TWO, ("localhost",), "no server of yours is localhost"),
        (TWO, ("1", "--all"), "take one of them"),
    ],
)
def test_who_is_not_meant_goes_on(
    capsys: pytest.CaptureFixture[str],
    servers: tuple[tuple[str, str], ...],
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    with standing(*servers) as standings:
        code, out, err = run(capsys, "stop", *arguments)
        assert (code, out) == (2, "")
        assert sentence in err
        assert not any(server.stopped.is_set() for server in standings)


def test_only_the_user_may_ask() -> None:
    runtime_folder().chmod(0o755)  # somebody was careless
    with control_socket():
        folder = runtime_folder()
        (path,) = folder.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(folder.iterdir()) == []


def test_what_a_killed_server_left_is_removed_and_strange_things_are_left_alone() -> None:
    folder = runtime_folder()
    left, strange = folder / "1-abc.sock", folder / "note.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(left))
    strange.write_text("not a socket")
    assert running() == []
    assert not left.exists()
    assert strange.exists()


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"hello\n",
        b"[1]\n",
        b'{"pid": 1}\n',
        b"[" * 100_000 + b"\n",
        b'{"pid": 1, "address": "x", "models": [7], "state": "ready", "since": 0, "version": ""}\n',
    ],
)
def test_a_stranger_at_a_control_socket_is_no_server(reply: bytes) -> None:
    with control_socket() as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        assert running() == []
        thread.join()


def test_one_that_does_not_answer_is_named_by_its_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_servers, "ANSWER_S", 0.05)
    with control_socket():
        code, out, _ = run(capsys, "ps")
        assert code == 0
        assert f"{os.getpid()}" in out
        assert "stuck" in out
        code, _, err = run(capsys, "stop")
        assert code == 2
        assert f"kill -9 {os.getpid()}" in err


def test_a_long_path_and_a_folder_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with standing(TWO[0]):
        assert [server.address for server in running()] == [TWO[0][0]]
    (long / "hetrun").rmdir()
    (long / "hetrun").write_text("in the way")
    with standing(TWO[0]):  # it serves all the same
        pass


def test_a_real_server_is_found_while_it_runs_and_stopped(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("-m", tiny, "--backend", "reference", "--port", "0")
    with start("serve", *options) as process:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        (server,) = running()
        assert (server.pid, server.models, server.state) == (process.pid, ("tiny",), "ready")
        assert f"tiny on {server.address}/v1" in line
        assert run(capsys, "stop", str(process.pid))[0] == 0
        assert process.wait(20) == 0
    assert running() == []
