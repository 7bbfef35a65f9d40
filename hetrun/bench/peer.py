"""The other side of a comparison: a program in a process of its own, told to run one sample at a time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TypeVar, cast

import numpy as np

from hetrun import child, registry
from hetrun.backend import Floats
from hetrun.bench.cases import Case
from hetrun.bench.llamacpp import N_BATCH, PACKAGE, Begin, Logits, Open, Opened, Order, Run
from hetrun.errors import BackendUnavailable, HetrunError, OptionError, UserError
from hetrun.source import is_folder

PEERS = ("llama.cpp",)
GRACE_S = 5.0
LONG_S = 5.0  # a run that takes longer is tried once with each number of threads
TRIAL_STEPS, TRIAL_PROMPT = 16, 512  # tokens to write and to read that say which number of threads is best
T = TypeVar("T")


def check_peer(name: str, path: Path | None = None) -> None:
    """Refuse a peer that does not exist or is not installed, or that cannot read this model."""
    if name not in PEERS:
        raise OptionError(f"there is no {name!r} to compare with; there is {', '.join(PEERS)}")
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            "llama.cpp is not installed, so there is nothing to compare with: pip install llama-cpp-python "
            "(it needs a C++ compiler and about three minutes)"
        )
    if path is not None and is_folder(path):
        raise UserError(f"{path}: {name} reads GGUF files only; write one with hetrun convert {path} -q f16")


class Peer:
    """llama.cpp with a model loaded."""

    name = "llama.cpp"

    def __init__(self, path: Path, threads: int | None = None) -> None:
        """With so many threads; None: the number that suits each case best."""
        check_peer(self.name, path)
        # A process of its own: the libraries and their threads are not ours. It ends when its pipe does.
        self._process, ours = child.begin(
            "from hetrun.bench.llamacpp import main; main({pipe})", out=2, own_session=True
        )
        self._pipe = Connection(ours.detach())
        self._fixed = threads
        self._threads: dict[Case, int] = {}
        try:
            self.repacks = _repacks()
            opened = self._ask(Open(str(path), self.repacks), Opened)
        except BaseException:
            self.close()
            raise
        self.version, self.n_vocab = opened.version, opened.n_vocab

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def prepare(self, case: Case) -> None:
        """Warm up, and, unless it is fixed, find the number of threads that suits it best: it shall not lose
        by a setting."""
        self._ask(Begin(case), type(None))
        if self._fixed is not None:
            self._threads[case] = self._fixed
            self._run(self._fixed, 0, trial(case))
            return
        best, short = 0.0, trial(case)
        self._run(len(os.sched_getaffinity(0)), 0, short)  # what a step stands behind is read now
        for threads in thread_counts(len(os.sched_getaffinity(0))):
            start = perf_counter()
            rate = self._run(threads, 0, short)
            if perf_counter() - start < LONG_S:  # of a short run the first one says little
                rate = max(self._run(threads, 0, short) for _ in range(2))
            if rate > best:
                best, self._threads[case] = rate, threads

    def threads(self, case: Case) -> int:
        """What `prepare` found, or what is fixed."""
        return self._threads[case]

    def sample(self, case: Case, seed: int) -> float:
        """Tokens per second, once; of the case that was prepared last."""
        return self._run(self._threads[case], seed)

    def logits(self, tokens: Sequence[int], context: int = 0, ubatch: int = N_BATCH) -> Iterator[Floats]:
        """The logits behind each token, some rows at a time, from a context of that size; read all."""
        room = max(context, len(tokens))
        self._send(Logits(tuple(tokens), room, len(os.sched_getaffinity(0)), ubatch))
        left = len(tokens)
        while left:
            rows = np.frombuffer(self._receive(bytes), np.float32).reshape(-1, self.n_vocab)
            left -= len(rows)
            yield rows

    def _run(self, threads: int, seed: int, case: Case | None = None) -> float:
        return self._ask(Run(threads, seed, case), float)

    def _ask(self, order: Order, kind: type[T]) -> T:
        self._send(order)
        return self._receive(kind)

    def _send(self, order: Order) -> None:
        try:
            self._pipe.send(order)
        except OSError:
            raise self._death() from None

    def _receive(self, kind: type[T]) -> T:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(answer, Exception):
            raise answer
        if not isinstance(answer, kind):
            raise HetrunError(f"{self.name} answered {answer!r}")
        return answer

    def _death(self) -> HetrunError:
        code = self._process.wait()
        return HetrunError(f"the process of {self.name} {child.ending(code)} in the middle of its work")

    def close(self) -> None:
        """End its process."""
        self._pipe.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _repacks() -> bool:
    """Whether llama.cpp may use its fastest layouts; where it was compiled wrong they end its process."""
    service = registry.named("services", "repacking")
    try:
        return service is None or cast("Callable[[], bool]", service)()
    except BackendUnavailable:  # a version that hetrun does not know, and so has nothing to say about
        return True


def trial(case: Case) -> Case:
    """What is run to find the best number of threads for a case: as much as tells, however long that is."""
    if case.kind == "prefill":
        return replace(case, tokens=min(case.tokens, TRIAL_PROMPT), batch=1)
    return replace(case, tokens=min(case.tokens, TRIAL_STEPS))


def default_threads() -> int:
    """As many as llama.cpp takes unless it is told: the cores, of which two hardware threads share one."""
    import psutil  # on use: it takes a while

    usable = len(os.sched_getaffinity(0))
    return min(usable, psutil.cpu_count(logical=False) or usable)


def thread_counts(cores: int) -> list[int]:
    """The numbers of threads worth trying: 1, 2, 3, 4, 6, 8, 12, 16, ... and every core."""
    some = {n for power in range(1, 12) for n in (1 << power, 3 << (power - 1))}
    return sorted(n for n in some | {1, 2, 3, 4, cores} if n <= cores)
