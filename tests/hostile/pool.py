"""Processes that try mutated models, watched from outside: one that dies or hangs is replaced."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from hetrun.system import subprocesses
from tests.hostile.mutations import Case
from tests.hostile.seeds import seeds
from tests.hostile.trial import Outcome

HANG_S = 5.0  # of processor time, and on the clock, where others use the machine too:
HANG_WALL_S = 30.0
START_S = 60.0

# Hears of a case, how it ended, and its files, which stay until it returns.
Done = Callable[[Case, Outcome, Path], None]


def write_case(case: Case, folder: Path) -> Path:
    """Write a case's files; the path that is opened."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, raw in case.files().items():
        (folder / name).write_bytes(raw)
    return folder / case.seed.opened


class Child:
    """One process, and the case that it has in hand."""

    def __init__(self, room: Path) -> None:
        self.model = room / "model"
        self.case: Case | None = None
        self.stage = ""
        self._room = room
        self._log = room / "stderr"
        self._said = b""
        self._process = self._spawn()

    def start(self, case: Case, check: bool) -> None:
        """Write a case's files and hand them to the process."""
        path = write_case(case, self.model)
        self.case = case
        self.ask(path, check)

    def ask(self, path: Path, check: bool) -> None:
        """Hand a model to the process."""
        self.stage = "start"
        self._begin, self._cpu = time.monotonic(), self._cpu_seconds()
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"path": str(path), "check": check}).encode() + b"\n")

    def wait(self, seconds: float) -> Outcome | None:
        """How the case ended, if it does within `seconds`."""
        assert self._process.stdout
        end = time.monotonic() + seconds
        while True:
            while b"\n" in self._said:
                line, _, self._said = self._said.partition(b"\n")
                said = json.loads(line)
                if set(said) != {"stage"}:
                    self.case = None
                    return Outcome(**said)
                self.stage = said["stage"]
            if not select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                return self._overdue()
            got = os.read(self._process.stdout.fileno(), 1 << 16)
            if not got:
                return self._replaced("")
            self._said += got

    def finish(self) -> Outcome:
        """How the case ended."""
        while not (found := self.wait(0.5)):
            pass
        return found

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def fileno(self) -> int:
        """For select."""
        assert self._process.stdout
        return self._process.stdout.fileno()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def _overdue(self) -> Outcome | None:
        cpu, wall = self._cpu_seconds() - self._cpu, time.monotonic() - self._begin
        if cpu < HANG_S and wall < HANG_WALL_S:
            return None
        self._process.send_signal(signal.SIGABRT)  # faulthandler writes where it is
        return self._replaced("hangs")

    def _replaced(self, how: str) -> Outcome:
        """A finding: the process has died, or is about to; another takes its place."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        words = self._log.read_bytes()[-8000:].decode(errors="replace")
        self.close()
        how = how or (f"exit code {code}" if code >= 0 else signal.Signals(-code).name)
        outcome = Outcome("finding", self.stage, f"{how} in {_innermost(words)}", words)
        self._said, self.case, self._process = b"", None, self._spawn()
        return outcome

    def _cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _spawn(self) -> subprocess.Popen[bytes]:
        """A process that has imported everything, and tried two models as they should be."""
        home = self._room / "home"
        home.mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HETRUN_", "XDG_"))}
        good = [s for s in seeds() if s.name in ("gguf-tiny-f32", "hf-llama")]
        paths = [write_case(Case(s), self._room / s.name) for s in good]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                subprocesses.python("from tests.hostile.trial import main; main()", *map(str, paths)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env={**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        assert process.stdout
        if not select.select([process.stdout], [], [], START_S)[0] or not process.stdout.readline():
            process.kill()
            raise RuntimeError(f"the process does not start: {self._log.read_text()[-2000:]}")
        return process


class Pool:
    """Some processes; who submits a case waits until one of them is free."""

    def __init__(self, room: Path, jobs: int, done: Done) -> None:
        rooms = [room / str(i) for i in range(jobs)]
        for each in rooms:
            each.mkdir()
        self._children = [Child(each) for each in rooms]
        self._done = done

    def submit(self, case: Case, check: bool = False) -> None:
        """Begin a case; `check` compares with what `hetrun check` says, which takes longer."""
        while not (free := next((c for c in self._children if c.case is None), None)):
            self._collect()
        free.start(case, check)

    def drain(self) -> None:
        """Wait for what is under way."""
        while any(c.case for c in self._children):
            self._collect()

    def _collect(self) -> None:
        busy = [c for c in self._children if c.case]
        ready = select.select(busy, [], [], 0.5)[0]
        for child_ in ready or busy:
            case = child_.case
            if case and (outcome := child_.wait(0)):
                self._done(case, outcome, child_.model)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._children:
            each.close()


def _innermost(words: str) -> str:
    """The innermost line of ours in the stack that faulthandler wrote, or what an assertion said."""
    lines = [line.strip() for line in words.splitlines()]
    said = [
        line for line in lines if "GGML_ASSERT" in line or "terminate called" in line or "what():" in line
    ]
    frames = [line for line in lines if line.startswith('File "') and "/lib/python" not in line]
    ours = [line for line in frames if "/tests/hostile/" not in line]
    place = (ours or frames or ["no stack"])[0].rpartition("/hetrun/")[2]
    return f"{place.replace(chr(34), '')} {said[-1][-120:] if said else ''}".strip()
