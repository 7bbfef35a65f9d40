"""Starting an agent: its files, its process, and its exit code."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hetrun.config import dirs
from hetrun.errors import UserError
from hetrun.tools.launch.agents import Agent, Start

SECRET = "$HETRUN_API_KEY"  # is printed instead of the key
KILLED = 128  # what shells add to the number of a signal


def folder_of(agent: Agent) -> Path:
    """Where files for an agent are."""
    return dirs().cache / "launch" / agent.name


def program(agent: Agent) -> str | None:
    """Where its program is; None if it is not installed."""
    return shutil.which(agent.name)


def write(files: Mapping[Path, str]) -> None:
    """Write files that only their owner can read: a key may be in them."""
    for path, content in files.items():
        begun = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(content)
            begun.rename(path)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None


def as_shell(start: Start, secret: str = "") -> str:
    """The command with its environment, as a shell takes it; `secret` is shown as a variable."""

    def quoted(text: str) -> str:
        if not secret or secret not in text:
            return shlex.quote(text)
        return f'"{SECRET}"'.join(shlex.quote(part) if part else "" for part in text.split(secret))

    env = [f"{name}={quoted(value)}" for name, value in start.env.items()]
    return " ".join([*env, *map(quoted, start.command)])


def run(agent: Agent, start: Start) -> int:
    """Run it in the foreground, and return its exit code. Ctrl-C is for the agent alone; a polite end of this
    process is passed on to it."""
    path = program(agent)
    if path is None:
        raise UserError(f"{agent.title} is not installed: {agent.install}")
    write(start.files)
    with _signals_of_the_agent() as running:
        try:
            process = subprocess.Popen([path, *start.command[1:]], env={**os.environ, **start.env})
        except OSError as error:
            raise UserError(f"{path} cannot be started: {error.strerror}") from None
        running.append(process)
        code = process.wait()
    return code if code >= 0 else KILLED - code


@contextmanager
def _signals_of_the_agent() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Handlers, and not SIG_IGN, which the agent would inherit."""
    running: list[subprocess.Popen[bytes]] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        for process in running:
            process.send_signal(signum)

    def leave(signum: int, frame: FrameType | None) -> None:
        pass  # the terminal sends it to the agent, too

    before = {
        signum: signal.signal(signum, handler)
        for signum, handler in (
            (signal.SIGINT, leave),
            (signal.SIGQUIT, leave),
            (signal.SIGTERM, pass_on),
            (signal.SIGHUP, pass_on),
        )
    }
    try:
        yield running
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
