"""From outside: processes in which calls fail, begun anew where one has died, and what became of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from tests.faults.injector import SHARED
from tests.faults.operations import HUB
from tests.loader.hub_stand_in import Repository, running

STATE_BYTES = 4096  # more than faults.c wants
ROOT = Path(__file__).parents[2]
# ggml asks for these and does not look whether it got them: the process ends, and only a new one goes on.
FATAL = ("libggml", "libllama")


@dataclass
class Row:
    """One operation and one kind of call."""

    operation: str
    call: str
    calls: int = 0  # of one run
    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    sites: Counter[str] = field(default_factory=Counter)  # where ggml ended
    faults: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """For a line of JSON."""
        counters = {"outcomes": dict(self.outcomes), "sites": dict(self.sites)}
        return {**self.__dict__, **counters}


@dataclass(frozen=True, slots=True)
class Wish:
    """What to try: `most` numbers of each kind of call, 0 for all, or just those of `nth`; with `lasting` all
    calls from the Nth on fail."""

    operation: str
    calls: Sequence[str]
    most: int = 0
    lasting: bool = False
    nth: Sequence[int] = ()


class _Run:
    """The rows of one operation, as its processes say them."""

    def __init__(self, wish: Wish) -> None:
        self.rows = {call: Row(wish.operation, call) for call in wish.calls}
        self.at = ""  # where the call that fails now comes from
        self.last: tuple[str, int] | None = None
        self.done = False

    def hear(self, said: Mapping[str, Any]) -> None:
        """One line of a process."""
        if "at" in said:
            self.at = said["at"]
            return
        if "done" in said:
            self.done = True
            return
        if "died" in said:
            self._died(said["died"], said["log"])
            return
        row = self.rows[said["call"]]
        if "count" in said:
            row.calls = said["count"]
        elif "begin" in said:
            self.last, self.at = (row.call, said["begin"]), ""
        else:
            row.tried += 1
            faults = said["faults"]
            if (
                row.call == "new"
                and said["site"].startswith(FATAL)
                and said["leaks"]
                and said["leaks"] == faults
            ):
                row.outcomes["lost in ggml"] += 1
                row.sites[said["site"]] += 1
                return
            row.outcomes[said["outcome"]] += 1
            row.faults += [f"call {said['nth']} ({said['site']}): {fault}" for fault in faults]

    def _died(self, code: int, log: str) -> None:
        """The process has ended in the middle of one."""
        assert self.last is not None
        call, nth = self.last
        row = self.rows[call]
        row.tried += 1
        if call in ("malloc", "new") and self.at.startswith(FATAL):
            row.outcomes["ended in ggml"] += 1
            row.sites[self.at] += 1
            return
        row.outcomes["died"] += 1
        row.faults.append(f"call {nth} ({self.at}): the process ended with {code}: {log}")


def attempt(wish: Wish, models: Path, library: Path, environ: Mapping[str, str] = os.environ) -> list[Row]:
    """Everything that was asked for, in a process of its own and its children."""
    run = _Run(wish)
    command = [sys.executable, "-m", "tests.faults.child", str(models), wish.operation, *wish.calls]
    command += ["--most", str(wish.most), *(f"--nth={nth}" for nth in wish.nth)]
    command += ["--lasting"] if wish.lasting else []
    env = {**environ, "LD_PRELOAD": str(library), "PYTHONMALLOC": "malloc", "HETRUN_THREADS": "1"}
    with NamedTemporaryFile(prefix="faults-") as state:
        state.truncate(STATE_BYTES)
        if wish.operation == "worker":
            env[SHARED] = state.name
        with subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            log = _follow(child, run)
    if not run.done:
        raise RuntimeError(f"{wish.operation} ended with {child.returncode}: {log[-2000:]}")
    return list(run.rows.values())


def _follow(child: subprocess.Popen[str], run: _Run) -> str:
    """Hear a process to its end; what it wrote to its log."""
    import threading

    assert child.stdout is not None
    assert child.stderr is not None
    log = list[str]()
    reader = threading.Thread(target=lambda stream: log.extend(stream), args=(child.stderr,))
    reader.start()
    for line in child.stdout:
        with suppress(json.JSONDecodeError):  # what a library prints
            if isinstance(said := json.loads(line), dict):
                run.hear(said)
    reader.join()
    child.wait()
    return "".join(log)


@contextmanager
def hub(models: Path) -> Iterator[str]:
    """A hub with the tiny model, for the operation that downloads."""
    with running() as found:
        files = {"tiny.gguf": (models / "tiny.gguf").read_bytes(), "README.md": b"tiny"}
        found.repositories["o/r"] = Repository(files)
        yield found.url


def with_hub(url: str) -> dict[str, str]:
    """The environment of a process that downloads from there."""
    return {**os.environ, HUB: url}


def table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = [f"{'operation':<12} {'call':<7} {'calls':>6} {'tried':>6}  outcomes"]
    for row in rows:
        if row.calls:
            said = ", ".join(f"{n} {what}" for what, n in sorted(row.outcomes.items()))
            wrong = f"; {len(row.faults)} FAULTS" if row.faults else ""
            lines.append(f"{row.operation:<12} {row.call:<7} {row.calls:>6} {row.tried:>6}  {said}{wrong}")
    return "\n".join(lines)
