"""A server and commands of hetrun with a home of their own, and what they said of themselves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic, sleep
from typing import Any

HANG_S = 900.0  # for an answer or a command: far beyond what anything takes
# What says in a log or an answer that something took too long: nothing does where the machine is only busy.
ALARM = re.compile(
    r"is stuck|no longer stuck|no sign of life|being restarted|Stacks of all threads|and was ended|SIGKILL"
    r"|did not (answer|open|respond|start)|do(es)? not answer|gives no answer|(take[sn]?|took) (too|more)"
    r"|computes for more than|no answer for|not complete (within|after)|had not begun within|queue is full"
    r"|could not be tried|database is locked|untried"
)
Json = dict[str, Any]


class Lost(Exception):
    """A request without its answer, or a command that failed."""


@dataclass
class Answer:
    """What came over HTTP."""

    status: int
    body: bytes
    seconds: float

    @property
    def json(self) -> Json:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found


class Rig:
    """A server, its log, and commands beside it. Texts do not depend on what else is computed."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, model
        self.alarms: list[str] = []
        self.notes: list[str] = []  # figures that nothing is judged by
        self.port = 0
        self._log = folder / "server.log"
        self._server: subprocess.Popen[bytes] | None = None
        self._seen = 0  # bytes of the log that were looked at
        kinds = ("CONFIG", "CACHE", "DATA", "STATE")
        own = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in kinds}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HETRUN_")}
        self.env = kept | own | {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
        # Not by an option: with one, `run` loads the model by itself.
        self.env["HETRUN_DETERMINISTIC"] = "1"

    # --- commands

    def hetrun(self, *arguments: str, code: int | None = 0, env: Mapping[str, str] | None = None) -> str:
        """A command's standard output; what it says on standard error is looked through for alarms."""
        return self.spoken(*arguments, code=code, env=env).stdout

    def spoken(
        self, *arguments: str, code: int | None = 0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command that has ended as it should; `code`: None if any exit code will do."""
        try:
            done = subprocess.run(
                self.command(*arguments),
                env={**self.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=HANG_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Lost(f"hetrun {arguments[0]} did not end within {HANG_S:g} s") from None
        self.look_through(f"hetrun {arguments[0]}", done.stderr)
        if code is not None and done.returncode != code:
            raise Lost(f"hetrun {arguments[0]}: exit code {done.returncode}: {done.stderr.strip()[-300:]}")
        return done

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "hetrun", *arguments]

    def look_through(self, who: str, text: str) -> None:
        """Keep the lines that say that something took too long."""
        self.alarms += [f"{who}: {line.strip()[:300]}" for line in text.splitlines() if ALARM.search(line)]

    # --- the server

    def start(self) -> None:
        """Until it answers."""
        with self._log.open("ab") as log:
            command = self.command("serve", "-m", self.model, "--port", "0", "-v")
            self._server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env
            )
        end = monotonic() + HANG_S
        while not (found := re.search(rb"http://127\.0\.0\.1:(\d+)/v1", self._fresh())):
            if self._server.poll() is not None or monotonic() > end:
                raise Lost(f"the server did not start: {self._fresh()[-300:]!r}")
            sleep(0.1)
        self.port = int(found[1])
        while self.ask("GET", "/health").status != 200:
            sleep(0.1)

    def stop(self) -> None:
        """By the command; its exit code says whether it ended well."""
        assert self._server
        self.hetrun("stop")
        if code := self._server.wait(HANG_S):
            raise Lost(f"the server ended with exit code {code}")
        self._server, self.port = None, 0
        self.look_through("server", self._fresh().decode(errors="replace"))
        self._seen = self._log.stat().st_size

    def end(self) -> None:
        """However it is; afterwards nothing of it is left."""
        if self._server:
            self._server.kill()
            self._server.wait()

    def worker(self) -> list[int]:
        """The pids of the server's own processes: another one has taken the place of one that died."""
        assert self._server
        found = Path(f"/proc/{self._server.pid}/task/{self._server.pid}/children").read_text().split()
        return [pid for pid in map(int, found) if b"worker_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def heed_log(self) -> None:
        """Look through what the server has said since the last time."""
        fresh = self._fresh()
        self.look_through("server", fresh.decode(errors="replace"))
        self._seen += len(fresh)

    def _fresh(self) -> bytes:
        with self._log.open("rb") as file:
            file.seek(self._seen)
            return file.read()

    # --- requests

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        """Any answer; one that does not come is lost."""
        began = monotonic()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            headers = {"content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            said = connection.getresponse()
            return Answer(said.status, said.read(), monotonic() - began)
        except OSError as error:
            raise Lost(f"{method} {path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        """The answer to a request that must be answered."""
        answer = self.ask("POST", path, body)
        if answer.status != 200:
            said = answer.body.decode(errors="replace")
            self.look_through(f"POST {path}", said)
            raise Lost(f"POST {path}: {answer.status}: {said[:300]}")
        return answer.json

    def streamed(self, path: str, body: Mapping[str, object]) -> str:
        """The text of a chat that is streamed; one that breaks off is lost."""
        answer = self.ask("POST", path, {**body, "stream": True})
        lines = [line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: ")]
        if answer.status != 200 or not lines or lines[-1] != "[DONE]":
            raise Lost(f"POST {path}: {answer.status}, the stream breaks off: {answer.body[-300:]!r}")
        choices = [choice for line in lines[:-1] for choice in json.loads(line).get("choices", ())]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


def asking(prompt: str, n: int, **more: object) -> Json:
    """A chat's body."""
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": n, "temperature": 0, **more}


def content(answer: Mapping[str, Any]) -> str:
    """The text of a chat, or its calls of tools."""
    message = answer["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return json.dumps([message.get("content"), calls, answer["choices"][0]["finish_reason"]])


@contextmanager
def rig(folder: Path, model: str) -> Iterator[Rig]:
    """One with its server, which is ended afterwards."""
    found = Rig(folder, model)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield found
    finally:
        found.end()


def lines(texts: Sequence[str]) -> str:
    """A file of prompts as JSON lines."""
    return "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
