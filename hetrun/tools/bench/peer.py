"""The other side of a comparison: a program in a process of its own, told to run one sample at a time."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TypeVar, cast

import numpy as np

from hetrun.backend import Floats
from hetrun.errors import BackendUnavailable, OptionError, UserError
from hetrun.loader.open_model import is_folder
from hetrun.system import entry_points
from hetrun.system.cpu_topology import physical_cores
from hetrun.tools.bench.cases import BenchCase
from hetrun.tools.bench.llamacpp_peer import (
    N_BATCH,
    PACKAGE,
    Logits,
    OpenPeer,
    Order,
    PeerOpened,
    PreparePeerCase,
    RunPeerCase,
)
from hetrun.tools.bench.process import BenchProcess
from hetrun.tools.bench.texts import BenchText, passage_of

PEERS = ("llama.cpp",)
LONG_S = 5.0  # a run that takes longer is tried once with each number of threads
TRIAL_STEPS, TRIAL_PROMPT = 16, 512  # tokens to write and to read that say which number of threads is best
MAPPED_STEPS = 4  # the same where every step waits for the disk
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


@dataclass(frozen=True, slots=True)
class MappedPeer:
    """How it runs in a budget: the weights stay in the file, which is mapped, unless the budget holds all."""

    prefix: Sequence[str]  # of its command, which puts it there
    kv_type: str
    load: str = "mmap"  # or none: copied into memory, where there is room


class Peer:
    """llama.cpp with a model loaded."""

    name = "llama.cpp"

    def __init__(
        self,
        path: Path,
        threads: int | None = None,
        mapped: MappedPeer | None = None,
        text: BenchText | None = None,
    ) -> None:
        """With `threads` threads; None: the number that suits each case best. `mapped`: in little memory. Of
        a text the tokens are read and written."""
        check_peer(self.name, path)
        code = "from hetrun.tools.bench.llamacpp_peer import main; main({pipe})"
        # A process of its own: the libraries and their threads are not ours.
        self._process = BenchProcess(self.name, code, mapped.prefix if mapped else ())
        self._fixed, self._mapped, self._text = threads, mapped, text
        self._threads: dict[BenchCase, int] = {}
        try:
            # A copy of the weights in another layout is memory that cannot be given back.
            self.repacks = (mapped is None or mapped.load != "mmap") and _repacks()
            how = (mapped.kv_type, mapped.load) if mapped else ()
            opened = self._ask(OpenPeer(str(path), self.repacks, *how), PeerOpened)
        except BaseException:
            self.close()
            raise
        self.version, self.n_vocab = opened.version, opened.n_vocab

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def prepare(self, case: BenchCase) -> None:
        """Warm up, and, unless it is fixed, find the number of threads that suits it best: it shall not lose
        by a setting."""
        self._ask(PreparePeerCase(case), type(None))
        cores = len(os.sched_getaffinity(0))
        short = trial(case, MAPPED_STEPS if self._mapped else TRIAL_STEPS)
        if self._fixed is not None:
            self._threads[case] = self._fixed
            self._run(self._fixed, 0, short)
            return
        best = 0.0
        self._run(cores, 0, short)  # what a step stands behind is read now
        for threads in sorted({1, -(-cores // 2), cores}) if self._mapped else thread_counts(cores):
            seed = self._trial_seed(threads)
            start = perf_counter()
            rate = self._run(threads, seed, short)
            if perf_counter() - start < LONG_S:  # of a short run the first one says little
                rate = max(self._run(threads, seed, short) for _ in range(2))
            if rate > best:
                best, self._threads[case] = rate, threads

    def _trial_seed(self, threads: int) -> int:
        """Where experts come from disk, those that the trial before chose are in memory: each number of
        threads has a part of the text to itself. They are counted below those of rounds."""
        return -threads if self._mapped and self._text else 0

    def threads(self, case: BenchCase) -> int:
        """What `prepare` found, or what is fixed."""
        return self._threads[case]

    def sample(self, case: BenchCase, seed: int, tokens: int | None = None) -> float:
        """Tokens per second, once, of the case that was prepared last; or of `tokens` of its tokens."""
        return self._run(self._threads[case], seed, case if tokens is None else replace(case, tokens=tokens))

    def logits(self, tokens: Sequence[int], context: int = 0, ubatch: int = N_BATCH) -> Iterator[Floats]:
        """The logits behind each token, some rows at a time, from a context of that size; read all."""
        room = max(context, len(tokens))
        self._process.send(Logits(tuple(tokens), room, len(os.sched_getaffinity(0)), ubatch))
        left = len(tokens)
        while left:
            rows = np.frombuffer(self._process.receive(bytes), np.float32).reshape(-1, self.n_vocab)
            left -= len(rows)
            yield rows

    def _run(self, threads: int, seed: int, case: BenchCase) -> float:
        return self._ask(RunPeerCase(threads, seed, case, passage_of(self._text, case, seed)), float)

    def _ask(self, order: Order, kind: type[T]) -> T:
        return self._process.ask(order, kind)

    def close(self) -> None:
        """End its process."""
        self._process.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _repacks() -> bool:
    """Whether llama.cpp may use its fastest layouts; where it was compiled wrong they end its process."""
    service = entry_points.named("services", "repacking")
    try:
        return service is None or cast("Callable[[], bool]", service)()
    except BackendUnavailable:  # a version that hetrun does not know, and so has nothing to say about
        return True


def trial(case: BenchCase, steps: int = TRIAL_STEPS) -> BenchCase:
    """What is run to find the best number of threads for a case: as much as tells, however long that is."""
    if case.kind == "prefill":
        return replace(case, tokens=min(case.tokens, TRIAL_PROMPT), batch=1)
    return replace(case, tokens=min(case.tokens, steps))


def default_threads() -> int:
    """As many as llama.cpp takes unless it is told: the cores, of which two hardware threads share one."""
    usable = len(os.sched_getaffinity(0))
    return min(usable, physical_cores() or usable)


def thread_counts(cores: int) -> list[int]:
    """The numbers of threads worth trying: 1, 2, 3, 4, 6, 8, 12, 16, ... and every core."""
    some = {n for power in range(1, 12) for n in (1 << power, 3 << (power - 1))}
    return sorted(n for n in some | {1, 2, 3, 4, cores} if n <= cores)
