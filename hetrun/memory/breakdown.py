"""The bill of memory: a name and its bytes for everything that takes some.

Plans carry it (`PlanSet.memory`), the books write it (`ledger`), and it is printed as a table here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hetrun.system.terminal_text import align_columns

Kind = Literal["anonymous", "file-backed", "shared"]  # as the kernel counts it: RssAnon, RssFile, RssShmem

INTERPRETER = "interpreter"
LIBRARIES = "libraries"
WEIGHTS = "weights"
MTP = "MTP block"
PICTURES = "pictures"  # their encoder, what it works in, and the rows that are kept
WINDOW = "streaming window"
MAPPED = "pages of mapped weights"
EXPERTS = "slots of experts"
KV = "KV"
KV_ONE = "KV of one full sequence"
KV_ALL = "KV of all, at most"
WORK = "graphs and scratch"
BESIDES = "driver, scratch and KV"  # of a device with memory to itself
HELPERS = "helper processes"
RESERVE = "reserve"
LIMIT, LEFT = "limit", "left"
ORDER = (
    INTERPRETER,
    LIBRARIES,
    WEIGHTS,
    MTP,
    PICTURES,
    WINDOW,
    MAPPED,
    EXPERTS,
    KV,
    KV_ONE,
    KV_ALL,
    WORK,
)  # others come behind these
LAST = (HELPERS, RESERVE)
OF_WEIGHTS = (WEIGHTS, WINDOW, MAPPED, EXPERTS)
OF_THE_PROCESS = (INTERPRETER, LIBRARIES, HELPERS, RESERVE)

_KIND_OF: Mapping[str, Kind] = {
    **dict.fromkeys((LIBRARIES, MAPPED), "file-backed"),
    **dict.fromkeys((KV, KV_ONE, KV_ALL), "shared"),
}


def copies_for(backend: str) -> str:
    """The name of what a backend has of weights that another one holds, too."""
    return f"copies for {backend}"


def in_order(bill: Mapping[str, int]) -> dict[str, int]:
    """The same bill as it is read: what is known by name in its place, all else between."""
    places = {name: at for at, name in enumerate(ORDER)}
    places |= {name: len(ORDER) + 1 + at for at, name in enumerate((*LAST, LIMIT, LEFT))}
    return dict(sorted(bill.items(), key=lambda item: places.get(item[0], len(ORDER))))


def total(bill: Mapping[str, int]) -> int:
    """Everything together; one full sequence is part of what all may have."""
    parts = {LIMIT, LEFT} | ({KV_ONE} if KV_ALL in bill else set())
    return sum(size for name, size in bill.items() if name not in parts)


def complete(bill: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """With the limit and what is left of it, which is less than nothing where a bill cannot be paid."""
    whole = {name: size for name, size in bill.items() if name not in (LIMIT, LEFT)}
    if limit is not None:
        whole |= {LIMIT: limit, LEFT: limit - total(whole)}
    return in_order(whole)


def settled(bill: Mapping[str, int]) -> dict[str, int]:
    """The same after something was added: what is left follows from the rest."""
    return complete(bill, bill.get(LIMIT))


def table(bill: Mapping[str, int], device: str = "") -> list[str]:
    """A table for people: what, which kind of memory, how much; the sum against the limit. That of a device
    is of one kind."""
    if not bill:
        return []
    bill = settled(bill)
    rows = [[f"memory of {device}" if device else "memory, full context", "kind", "MiB"]]
    for name, size in bill.items():
        if name in (LIMIT, LEFT) or (name == KV_ONE and KV_ALL in bill):
            continue
        kind = "its own" if device else _KIND_OF.get(name, "anonymous")
        rows.append([f"  {name}", kind, _mib(size)])
        if name == KV_ALL:
            rows.append(["    taken only as texts grow"])
        if name == KV_ALL and KV_ONE in bill:
            rows.append(["    of which one sequence", "", _mib(bill[KV_ONE])])
    rows.append(["  in all", "", _mib(total(bill))])
    rows += [[f"  {name}", "", _mib(bill[name])] for name in (LIMIT, LEFT) if name in bill]
    return align_columns(rows, left={0, 1}, least=(25, 12, 9))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
