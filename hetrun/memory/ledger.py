"""The books of `--ram`: everything that hetrun holds in memory, so that no part takes what is not there.

What we allocate is booked before it is allocated, and refused where there is no room. What will be needed
later is promised, and no other account gets it. What no allocator of ours sees (the interpreter and its
libraries, a backend's work buffers) is measured: the books are brought in line with what the kernel counts.
Anonymous, file-backed and shared memory are booked apart, as the kernel counts them apart, so that the books
can be held against its figures.

Only the engine's thread has them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from hetrun.errors import BudgetError
from hetrun.memory import breakdown as bill
from hetrun.memory.breakdown import Kind
from hetrun.system.memory_info import free_memory
from hetrun.system.sysfs import line_of, lines_of
from hetrun.system.units import format_bytes, format_minimum

KINDS: tuple[Kind, ...] = ("anonymous", "file-backed", "shared")
# Never booked out: what comes and goes between two looks at the books (objects of Python, a page of a file
# that is read, page tables), and what the kernel's own counting is behind.
RESERVE = 24 << 20
# Helpers that take longer than this to count are left alone for 500 times as long.
QUICK_S, HELPERS_REST = 1e-3, 500
MARGIN = 0.15  # of the memory that is free, which hetrun leaves to others

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Figures:
    """What the kernel counts of a process, in bytes; zeros where it does not say."""

    anonymous: int = 0
    file_backed: int = 0
    shared: int = 0
    peak: int = 0  # the most that all three were at once

    @property
    def total(self) -> int:
        """What lies in memory now."""
        return self.anonymous + self.file_backed + self.shared

    def of(self, kind: Kind) -> int:
        """One kind."""
        return {"anonymous": self.anonymous, "file-backed": self.file_backed, "shared": self.shared}[kind]


def kernel_figures(process: Path = Path("/proc/self")) -> Figures:
    """The memory of a process as the kernel counts it."""
    found = _kilobytes(process / "status")
    return Figures(*(1024 * found.get(name, 0) for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")))


# Processes that this one has started for something else, as the peer of a benchmark: they, and what they
# start, are no helpers.
strangers: set[int] = set()


def helper_bytes(processes: Path = Path("/proc")) -> int:
    """Memory of the processes that this one has started, and of those that they have. Pages that several
    share count for each in part."""
    found = _descendants(processes / str(os.getpid()))
    return sum(1024 * _kilobytes(p / "smaps_rollup").get("Pss", 0) or kernel_figures(p).total for p in found)


def _descendants(process: Path) -> list[Path]:
    found: list[Path] = []
    new = [process]
    while new:
        names = [
            name
            for p in new
            for task in (p / "task").glob("*")
            for name in line_of(task / "children").split()
            if int(name) not in strangers
        ]
        new = [process.parent / name for name in names]
        found += new
    return found


def _kilobytes(path: Path) -> dict[str, int]:
    words = [line.split() for line in lines_of(path)]
    return {w[0].rstrip(":"): int(w[1]) for w in words if len(w) == 3 and w[2] == "kB" and w[1].isdecimal()}


@dataclass(frozen=True, slots=True)
class MemoryGrant:
    """What may be taken, and by whose leave, in words that an error begins with."""

    nbytes: int
    words: str

    def below_use(self, needed: int, mend: str) -> BudgetError:
        """Why the limit of a running model cannot become so low, and what to do instead."""
        return BudgetError(
            f"the memory limit cannot be lowered to {format_bytes(self.nbytes)} while the model runs: "
            f"{format_minimum(needed)} are in use, including room for one answer as long as "
            f"the context. {mend}"
        )

    @property
    def as_option(self) -> str:
        """As it is typed."""
        return f"--ram {self.nbytes >> 20}MiB"


def granted(ram: int | None, margin: float = MARGIN, root: Path = Path("/")) -> MemoryGrant:
    """What --ram allows, as far as a container's limit does; without it what this process has and what is
    free, less a part that is left to others."""
    own, free = kernel_figures().total, free_memory(root)
    if ram is None:
        nbytes = own + int(free.nbytes * (1 - margin))
        return MemoryGrant(
            nbytes, f"{format_bytes(nbytes)}, with {1 - margin:.0%} of what is free of {free.of},"
        )
    if free.limit is not None:  # the system ends who takes more than that
        # Pages of libraries may count against another group, which read them first.
        most = min(own + free.nbytes, free.limit)
        if ram > most:
            return MemoryGrant(most, f"what is left of {free.of}, {format_bytes(most)} (--ram allows more),")
    return MemoryGrant(ram, f"--ram {format_bytes(ram)}")


class Books:
    """Accounts by kind of memory, under one limit."""

    def __init__(
        self,
        granted: MemoryGrant,
        reserve: int = RESERVE,
        figures: Callable[[], Figures] = kernel_figures,
        helpers: Callable[[], int] = helper_bytes,
    ) -> None:
        """`figures` and `helpers` say what is counted of this process, and of those that it has started."""
        self.granted = granted  # which may be replaced: who gives up what is above it, others say
        self._figures, self._helpers = figures, helpers
        self._booked: dict[tuple[str, Kind], int] = {(bill.RESERVE, "anonymous"): reserve}
        self._promised: dict[str, int] = {}
        # What every account held when they were last brought in line, without the reserve, which no account
        # has; another mapping each time, so that any thread may look.
        self.seen: Mapping[str, int] = {}
        self._helpers_due = 0.0

    @property
    def limit(self) -> int:
        """What may be held in all."""
        return self.granted.nbytes

    @property
    def total(self) -> int:
        """Everything that is booked or promised."""
        return sum(self._booked.values()) + sum(self._promised.values())

    @property
    def free(self) -> int:
        """What may still be taken; below zero: so much must be given up."""
        return self.limit - self.total

    def booked(self, account: str | None = None, kind: Kind | None = None) -> int:
        """Bytes of an account, of a kind, or of both."""
        return sum(n for (a, k), n in self._booked.items() if account in (None, a) and kind in (None, k))

    def book(self, account: str, kind: Kind, nbytes: int) -> None:
        """Take so much more; BudgetError, and nothing is booked, where there is less."""
        if nbytes > max(0, self.free):
            raise BudgetError(
                f"{self.granted.words} is too little: {account} needs {format_bytes(nbytes)} more, but only "
                f"{format_bytes(max(0, self.free))} are left beside {self._in_words()}; "
                f"at least {format_minimum(self.total + nbytes)} are needed in all"
            )
        self.found(account, kind, nbytes)

    def release(self, account: str, kind: Kind, nbytes: int) -> None:
        """Give so much of an account back."""
        if nbytes > (held := self.booked(account, kind)):
            raise ValueError(f"{account} holds {held} bytes of {kind} memory, not {nbytes}")
        self.found(account, kind, -nbytes)

    def keep_at(self, account: str, kind: Kind, nbytes: int) -> None:
        """An account holds exactly so much from now on; BudgetError where that is more than there is."""
        if (more := nbytes - self.booked(account, kind)) > 0:
            self.book(account, kind, more)
        else:
            self.release(account, kind, -more)

    def promise(self, account: str, nbytes: int) -> None:
        """An account will take `nbytes` more than it has: no other account gets them."""
        self._promised[account] = nbytes

    def found(self, account: str, kind: Kind, nbytes: int) -> None:
        """Book what is held already, whether there was room or not: the next who asks hears of it."""
        self._booked[account, kind] = self._booked.get((account, kind), 0) + nbytes

    def holds(self, account: str, kind: Kind, nbytes: int) -> None:
        """An account has exactly so much, whether there was room or not."""
        self.found(account, kind, nbytes - self.booked(account, kind))

    def forget_weights(self) -> None:
        """All that weights took was given back."""
        for account, kind in self._booked:
            if account in bill.OF_WEIGHTS:
                self._booked[account, kind] = 0
        self._promised = {
            account: n for account, n in self._promised.items() if account not in bill.OF_WEIGHTS
        }

    def grows(self, account: str, kind: Kind, nbytes: int, most: int) -> None:
        """An account has so much, and was promised that it may come to so much in all."""
        self.holds(account, kind, nbytes)
        self.promise(account, max(0, most - nbytes))

    def take(self, account: str, kind: Kind, nbytes: int, allocate: Callable[[], T]) -> T:
        """What `allocate` gives, which takes so much: booked first, and not at all if that raises."""
        self.book(account, kind, nbytes)
        try:
            return allocate()
        except BaseException:
            self.release(account, kind, nbytes)
            raise

    # --- what is measured

    def opened(self) -> None:
        """Book what this process has by now besides what is booked: the interpreter and the libraries."""
        figures = self._figures()
        for account, kinds in ((bill.LIBRARIES, KINDS[1:]), (bill.INTERPRETER, KINDS[:1])):
            for kind in kinds:
                self.found(account, kind, max(0, figures.of(kind) - self._seen(kind)))

    def reconcile(self) -> None:
        """Have the books agree with the kernel: what it counts more or less of anonymous memory is graphs and
        scratch, of file-backed memory libraries; and helpers take what they take now.

        Keys and values stay as they are booked: of what several sequences share the kernel counts a page as
        often as it is seen.
        """
        off = self.difference()
        others: tuple[tuple[str, Kind], ...] = ((bill.WORK, "anonymous"), (bill.LIBRARIES, "file-backed"))
        for account, kind in others:
            self.holds(account, kind, max(0, self.booked(account, kind) + off[kind]))
        self._count_helpers()
        accounts = dict.fromkeys(account for account, _ in self._booked if account != bill.RESERVE)
        self.seen = bill.in_order({account: self.booked(account) for account in accounts})

    def _count_helpers(self) -> None:
        """Seldom where it takes long: the kernel goes through all that a process has mapped."""
        start = perf_counter()
        if start >= self._helpers_due:
            self.holds(bill.HELPERS, "anonymous", self._helpers())
            took = perf_counter() - start
            self._helpers_due = start + took * HELPERS_REST if took > QUICK_S else 0.0

    def difference(self) -> dict[Kind, int]:
        """By how much the kernel counts more of each kind than the books do; helpers have their own count."""
        figures = self._figures()
        return {kind: figures.of(kind) - self._seen(kind) for kind in KINDS}

    def _seen(self, kind: Kind) -> int:
        """What is booked of a kind that lies in this process."""
        others = (bill.RESERVE, bill.HELPERS)
        return sum(n for (account, k), n in self._booked.items() if k == kind and account not in others)

    # --- what people read

    def bill(self) -> dict[str, int]:
        """Every account with what it was promised, the limit and what is left, in the order of
        `hetrun.memory.breakdown`."""
        accounts = dict.fromkeys([account for account, _ in self._booked] + list(self._promised))
        sizes = {account: self.booked(account) + self._promised.get(account, 0) for account in accounts}
        return bill.complete({account: n for account, n in sizes.items() if n}, self.limit)

    def _in_words(self) -> str:
        return _list({a: n for a, n in self.bill().items() if a not in (bill.LIMIT, bill.LEFT)})


def _list(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
