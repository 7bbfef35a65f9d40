"""What no program could exceed on this machine: memory gives the bytes, a backend makes the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetrun.bench.cases import Case
from hetrun.bench.demand import Demand
from hetrun.bench.machine import Memory
from hetrun.bench.peak import Peak

Bound = Literal["memory", "products"]


@dataclass(frozen=True, slots=True)
class Limit:
    """What no program could exceed here, or why that is not known."""

    tok_s: float | None
    why: str
    bytes_per_step: float | None = None
    memory: Memory | None = None
    estimated: bool = False  # which experts a step reads, nobody knows before
    bound: Bound | None = None
    demand: Demand | None = None
    peak: Peak | None = None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second that memory gives."""
        return self.memory.rate if self.memory else None

    def reached(self, tok_s: float) -> float | None:
        """Which part of it so many tokens per second are."""
        return tok_s / self.tok_s if self.tok_s else None


def limit_of(case: Case, demand: Demand, memory: Memory, peak: Peak | None) -> Limit:
    """The longer of two times: to read the bytes, and to multiply.

    For a prompt the second must be known; a step without it is as fast as memory.
    """
    reading = demand.nbytes / memory.rate
    made = None if demand.products is None else demand.products + (demand.attention or 0.0)
    multiplying = None if made is None or peak is None else made / peak.rate
    step = case.kind == "decode"
    per_step = demand.nbytes if step else None
    if multiplying is None and not step:
        why = "no limit is known, because how fast products are made here could not be measured"
        return Limit(None, why, None, memory, demand=demand)
    if multiplying is None or reading >= multiplying:
        tok_s = demand.tokens / reading
        why = f"{_reads(case, demand)} and {memory.text}: at most {tok_s:.0f} tokens/s"
        return Limit(tok_s, why, per_step, memory, demand.estimated, "memory", demand, peak)
    assert peak is not None
    tok_s = demand.tokens / multiplying
    why = f"{_takes(case, demand, peak)}: at most {tok_s:.0f} tokens/s"
    # How many experts multiply does not depend on which they are.
    return Limit(tok_s, why, per_step, memory, False, "products", demand, peak)


def _reads(case: Case, demand: Demand) -> str:
    some = ", of experts as many as are to be expected" if demand.estimated else ""
    return (
        f"{_what(case)} reads {demand.nbytes / 1e6:.1f} MB "
        f"({demand.weight_bytes / 1e6:.1f} MB of weights{some}, the rest keys and values)"
    )


def _takes(case: Case, demand: Demand, peak: Peak) -> str:
    return (
        f"{_what(case)} takes {(demand.products or 0) / 1e9:.2f} GFLOP in products and "
        f"{(demand.attention or 0) / 1e9:.2f} in attention, and {peak.name} multiplies large matrices "
        f"at {peak.rate / 1e9:.0f} GFLOP/s with {peak.threads} threads"
    )


def _what(case: Case) -> str:
    if case.kind == "decode":
        return "a step"
    return "the prompt" if case.batch == 1 else f"a batch of {case.batch} prompts"
