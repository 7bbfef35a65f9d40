"""What a cell of the table says, and by which bar: docs/adr/0074-truth.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tests.models.tiny import F32
from tests.support.closeness import CLOSE, kl_of_each

Kind = Literal["bits", "tokens", "close"]
Divergences = NDArray[np.float64]
Indexes = NDArray[np.intp]
Verdict = Literal["identical", "close", "does not apply", "FAILS"]


class NotApplicable(Exception):
    """This placement does not exist for this model; the message says why."""


@dataclass(frozen=True)
class Said:
    """What a model said: greedy answers, and the logits behind each token of a text."""

    answers: tuple[tuple[int, ...], ...]
    logits: F32 | None = None


@dataclass(frozen=True)
class Bar:
    """What is asked of a comparison.

    bits: the same tokens, and the same logits to the last bit.
    tokens: the same tokens, also where each is given the text so far, ties left out; logits no further apart
        than `limit`.
    close: along the same text another best token only where the two best are within `gap`, and a mean KL
        divergence of at most `limit`. `flips`: the share of the tokens, the worst ones, that are left out,
        since a last bit may choose other experts for them.
    """

    kind: Kind
    limit: float = 0.0
    gap: float = CLOSE  # between the two best, within which another one is as good
    flips: float = 0.0


BITS = Bar("bits")


@dataclass(frozen=True)
class Check:
    """One comparison: of which weights, with what, and how it came out."""

    weights: str
    against: str
    bar: Bar
    same_bits: bool
    same_tokens: bool
    difference: float | None = None  # the largest of two logits
    kl: float | None = None  # of the tokens that are not left out
    worst: float | None = None  # of any token
    faults: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        if self.faults:
            return "FAILS"
        return "close" if self.bar.kind == "close" else "identical"

    def as_json(self) -> dict[str, Any]:
        return {
            "weights": self.weights, "against": self.against, "asked": self.bar.kind, "limit": self.bar.limit,
            "same_bits": self.same_bits, "same_tokens": self.same_tokens, "max_difference": self.difference,
            "mean_kl": self.kl, "worst_kl": self.worst, "faults": list(self.faults),
        }  # fmt: skip


def compare(weights: str, against: str, bar: Bar, *, expected: Said, found: Said) -> Check:
    """Judge what was said; the expected answers may be more than the found ones."""
    wanted = expected.answers[: len(found.answers)]
    parted = [i for i, (a, b) in enumerate(zip(wanted, found.answers, strict=True)) if a != b]
    bits, difference, kl, worst, faults = True, None, None, None, list[str]()
    if expected.logits is not None and found.logits is not None:
        bits = np.array_equal(expected.logits, found.logits)
        difference = float(np.abs(expected.logits - found.logits).max())
        each = kl_of_each(expected.logits, found.logits)
        kl, worst = max(0.0, float(each[typical(each, bar)].mean())), float(each.max())
        faults += faults_of(bar, expected.logits, found.logits)
    if bar.kind != "close" and parted:
        i = parted[0]
        at = next(
            (n for n, (a, b) in enumerate(zip(wanted[i], found.answers[i], strict=False)) if a != b), -1
        )
        faults.append(f"answer {i + 1} is another one from its token {at + 1} on")
    return Check(weights, against, bar, bits and not parted, not parted, difference, kl, worst, tuple(faults))


def faults_of(bar: Bar, expected: F32, found: F32) -> list[str]:
    """What is wrong with logits, in words."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return ["logits are of another shape, or not finite"]
    best, chosen = expected.argmax(-1), found.argmax(-1)
    differs = best != chosen
    apart = float(np.abs(expected - found).max())
    if bar.kind == "bits":
        rows = int((expected != found).any(-1).sum())
        return [f"{rows} of {len(found)} rows have other bits, {apart:.2g} apart"] if rows else []
    if bar.kind == "tokens":
        out = [f"logits are {apart:.2g} apart, more than {bar.limit:g}"] if not apart < bar.limit else []
        differs &= leads(expected) > 2 * bar.limit
        return out + ([f"{int(differs.sum())} best tokens are others"] if differs.any() else [])
    each = kl_of_each(expected, found)
    kept = typical(each, bar)
    gap = float(leads(expected)[kept][differs[kept]].max(initial=0.0))
    kl = float(each[kept].mean())
    out = [f"another best token where the best one leads by {gap:.2g}"] if gap > bar.gap else []
    return out + ([f"mean KL {kl:.2g}, more than {bar.limit:g}"] if not kl <= bar.limit else [])


def typical(each: Divergences, bar: Bar) -> Indexes:
    """The tokens that are judged, by the divergence of each: all but the worst, where some may be flips."""
    return np.argsort(each, kind="stable")[: len(each) - int(bar.flips * len(each))]


def leads(rows: F32) -> F32:
    """How far the best of each row is before the second."""
    two: F32 = np.partition(rows, -2, axis=-1)[:, -2:]
    found: F32 = two.max(-1) - two.min(-1)
    return found


@dataclass(frozen=True)
class Cell:
    """A row's model in one placement."""

    placement: str
    checks: tuple[Check, ...] = ()
    note: str = ""  # why it does not apply, or what was raised
    failed: bool = False
    seconds: float = field(default=0.0, compare=False)

    @property
    def verdict(self) -> Verdict:
        if self.failed or any(check.faults for check in self.checks):
            return "FAILS"
        if not self.checks:
            return "does not apply"
        return "close" if any(c.verdict == "close" for c in self.checks) else "identical"

    @property
    def faults(self) -> list[str]:
        found = [f"{c.weights} against {c.against}: {fault}" for c in self.checks for fault in c.faults]
        return [*found, self.note] if self.failed else found

    def as_json(self) -> dict[str, Any]:
        return {
            "placement": self.placement, "verdict": self.verdict, "note": self.note,
            "seconds": round(self.seconds, 2), "checks": [check.as_json() for check in self.checks],
        }  # fmt: skip

    def in_short(self) -> str:
        """The cell as a table has it."""
        if self.verdict == "FAILS":
            return "FAILS"
        if self.verdict == "does not apply":
            return "-"
        if self.verdict == "close":
            return f"~{max(c.kl or 0.0 for c in self.checks if c.verdict == 'close'):.0e}"
        apart = max((c.difference or 0.0 for c in self.checks), default=0.0)
        return f"={apart:.0e}" if apart else "="
