"""One mode, without a control group and in one: the same answer, no kill, no more memory than the budget."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from hetrun.system.subprocesses import ending, python
from hetrun.system.sysfs import lines_of
from hetrun.tools.bench.serving.http_load import ServerEndpoint
from hetrun.tools.bench.serving.servers import ServerProcess
from tests.memory.group import MemoryGroup, limited
from tests.memory.models import ModelFolder

MIB = 1 << 20
LOOK_S = 0.02
MOST_S = 900.0  # for one command: a machine may be busy
LAST_WORDS = 600  # letters of an error that are quoted


class CommandFailed(Exception):
    """A command ended otherwise than with 0; the text says how."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a mode runs its commands with: in the group, if there is one."""

    budget: int
    group: MemoryGroup | None
    models: ModelFolder
    room: Path  # empty, for this run alone
    env: Mapping[str, str]

    @property
    def ram(self) -> tuple[str, str]:
        """The budget as an option."""
        return "--ram", str(self.budget)

    def command(self, words: Sequence[str]) -> list[str]:
        """`hetrun` with these words."""
        whole = python("from hetrun.cli import main; main()", *words)
        return self.group.command(whole) if self.group else whole

    def hetrun(self, *words: str, stdin: str = "") -> str:
        """What the command writes to standard output."""
        return self._output(f"hetrun {words[0]}", self.command(words), stdin)

    def program(self, code: str, *arguments: str) -> str:
        """What a program of Python writes."""
        whole = python(code, *arguments)
        return self._output("the program", self.group.command(whole) if self.group else whole)

    def _output(self, name: str, command: Sequence[str], stdin: str = "") -> str:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            env=self.env,
            timeout=MOST_S,
            check=False,
        )
        if done.returncode:
            raise CommandFailed(f"{name} {ending(done.returncode)}: {done.stderr[-LAST_WORDS:].strip()}")
        return done.stdout

    @contextmanager
    def serve(self, *options: str) -> Iterator[ServerEndpoint]:
        """`hetrun serve` while the block lasts."""
        endpoint = ServerEndpoint(uds=self.room / "hetrun.sock")
        server = ServerProcess(
            self.command(["serve", "--uds", str(endpoint.uds), *options]), endpoint, env=self.env
        )
        try:
            yield endpoint
        finally:
            server.close()


@dataclass(frozen=True, slots=True)
class Mode:
    """One documented way to run. Without `budget` it gets the least that hetrun asks for."""

    name: str
    model: str
    budget: int | None  # MiB
    answer: Callable[[Run], object]
    # Weights that are mapped are pages of files that the kernel may take: they are no part of what is judged.
    is_mapped: bool = False
    missing: Callable[[], str] = lambda: ""  # why it cannot be tried here
    options: tuple[str, ...] = ()  # with which the least budget is asked for


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """What came of a mode; memory in bytes."""

    mode: str
    budget: int
    peak: int = 0  # that counted against the limit, pages of files included
    fixed: int = 0  # of it anonymous, shared and the kernel's own: the most at any time
    mapped: int = 0  # pages of libraries, which may count elsewhere if they were read before
    failures: int = 0
    refaults: int = 0
    kills: int = 0
    seconds: float = 0.0
    seconds_free: float = 0.0  # without a group
    skipped: str = ""
    faults: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


class MemoryWatch(threading.Thread):
    """Looks at a group until it is stopped: the most that was fixed, and mapped by one process."""

    def __init__(self, group: MemoryGroup) -> None:
        super().__init__(daemon=True)
        self.fixed = self.mapped = 0
        self._group = group
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            self.fixed = max(self.fixed, self._group.fixed)
            for pid in lines_of(self._group.folder / "cgroup.procs"):
                self.mapped = max(self.mapped, _mapped(pid))

    def stop(self) -> None:
        self._over.set()
        self.join()


def attempt(mode: Mode, models: ModelFolder, env: Mapping[str, str]) -> MemoryRow:
    """Run it without a limit, then in a group of just its budget."""
    if reason := mode.missing():
        return MemoryRow(mode.name, (mode.budget or 0) * MIB, skipped=reason)
    path = models.find(mode.model)
    budget = mode.budget * MIB if mode.budget else least(path, mode.options, env)
    faults: list[str] = []
    expected, seconds_free = _answer(mode, budget, None, models, env, faults)
    drop_pages(path)
    with limited(budget) as group:
        watch = MemoryWatch(group)
        watch.start()
        got, seconds = _answer(mode, budget, group, models, env, faults)
        watch.stop()
        faults += _judge(mode, budget, group, watch)
        if not faults and got != expected:
            faults.append(f"another answer: {str(got)[:200]!r} instead of {str(expected)[:200]!r}")
        return MemoryRow(
            mode.name,
            budget,
            group.peak,
            watch.fixed,
            watch.mapped,
            group.failures,
            group.refaults,
            group.kills,
            round(seconds, 1),
            round(seconds_free, 1),
            faults=faults,
        )


def _answer(
    mode: Mode,
    budget: int,
    group: MemoryGroup | None,
    models: ModelFolder,
    env: Mapping[str, str],
    faults: list[str],
) -> tuple[object, float]:
    where = "in the group" if group else "without a group"
    begin = time.monotonic()
    with TemporaryDirectory(prefix="hetrun-memory-") as room:
        try:
            answer = mode.answer(Run(budget, group, models, Path(room), env))
        except Exception as error:  # what it is belongs into the report
            faults.append(f"{where}: {error}")
            answer = None
    return answer, time.monotonic() - begin


def _judge(mode: Mode, budget: int, group: MemoryGroup, watch: MemoryWatch) -> Iterator[str]:
    if group.kills:
        yield f"{group.kills} processes were killed for memory"
    held = watch.fixed + (0 if mode.is_mapped else watch.mapped)
    if held > budget:
        yield (
            f"{held / MIB:.1f} MiB ({watch.fixed / MIB:.1f} fixed, {watch.mapped / MIB:.1f} mapped) "
            f"of {budget / MIB:.1f} MiB"
        )


def least(model: Path, options: Sequence[str], env: Mapping[str, str]) -> int:
    """The smallest budget that works, in bytes, as hetrun says when it refuses 1 MiB."""
    words = ["plan", "-m", str(model), "--ram", "1MiB", *options]
    done = subprocess.run(
        python("from hetrun.cli import main; main()", *words),
        capture_output=True,
        text=True,
        env=env,
        timeout=MOST_S,
        check=False,
    )
    _, found, rest = done.stderr.partition("needs at least ")
    if not found:
        raise CommandFailed(f"hetrun plan --ram 1MiB: {done.stderr[-LAST_WORDS:].strip()}")
    number, unit = rest.split()[:2]
    return int(float(number.replace(",", "")) * {"MiB": MIB, "GiB": MIB << 10}[unit])


def drop_pages(path: Path) -> None:
    """Have the kernel forget the pages of a file, so that who reads it next is charged for them."""
    with suppress(OSError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _mapped(pid: str) -> int:
    for line in lines_of(Path("/proc") / pid / "status"):
        if line.startswith("RssFile:"):
            return int(line.split()[1]) << 10
    return 0
