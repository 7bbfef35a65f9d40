"""How often the experts that tokens choose would be found in the slots of a device, by several rules.

    python -m tests.tools.slot_rules choices.npz --slots 0.33

The file has what was chosen, [tokens, layers, experts of a token], as `chosen`, and `experts`. Rules begin
with what the first half of the tokens chose most, and are counted on the second. Printed are what part of the
choices was found, how many experts were brought for each token, and the experts' bytes that the host moves
for a token: one for each that it computes itself, four for each that it brings (read from the file, written
for the device, and read again by the copy).
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetrun.executor.device_experts import STAGED
from hetrun.executor.slot_rule import SlotRule
from hetrun.prefetch.expert_trace import best

MOVES = 4  # of an expert's bytes, when it is brought
LATE = 2  # passes until one that is asked for is there

Choices = NDArray[np.integer]
Sets = Sequence[Sequence[int]]  # by layer


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule came to."""

    rule: str
    found: float  # part of the choices
    brought: float  # experts for each token

    def moved(self, chosen: int) -> float:
        """Experts' bytes that the host moves for a token of `chosen` choices."""
        return (1 - self.found) * chosen + MOVES * self.brought


def most_chosen(chosen: Choices, experts: int, slots: int) -> list[list[int]]:
    """Of each layer."""
    counts = [np.bincount(chosen[:, i].reshape(-1), minlength=experts) for i in range(chosen.shape[1])]
    return [np.argsort(-c, kind="stable")[:slots].tolist() for c in counts]


def fixed(rule: str, chosen: Choices, there: Sets) -> Found:
    """What lies there stays."""
    hits = sum(int(np.isin(chosen[:, i], there[i]).sum()) for i in range(chosen.shape[1]))
    return Found(rule, hits / chosen.size, 0.0)


def lru(chosen: Choices, there: Sets) -> Found:
    """Whatever was chosen last is there, at once."""
    hits = brought = 0
    for i in range(chosen.shape[1]):
        held = OrderedDict.fromkeys(there[i])
        for expert in chosen[:, i].reshape(-1).tolist():
            if expert in held:
                hits += 1
            else:
                brought += 1
                held.popitem(last=False)
            held[expert] = None
            held.move_to_end(expert)
    return Found("LRU", hits / chosen.size, brought / len(chosen))


def belady(chosen: Choices, slots: int) -> Found:
    """A rule that knows what comes. What it brings is not counted."""
    layers = [chosen[:, i].reshape(-1).tolist() for i in range(chosen.shape[1])]
    return Found("Belady", sum(sum(best(each, slots)) for each in layers) / chosen.size, float("nan"))


def counted(name: str, rule: SlotRule, chosen: Choices, there: Sets) -> Found:
    """A rule that counts, as the executor follows it: some are on their way at once, and there when two more
    passes have ended."""
    tokens, layers, _ = chosen.shape
    lies = np.zeros(rule.counts.shape, np.bool_)
    for i, experts in enumerate(there):
        lies[i, experts] = True
    coming, under_way = np.zeros_like(lies), list[tuple[int, int, int]]()
    hits = brought = 0
    for t in range(tokens):
        for item in [item for item in under_way if item[0] <= t]:
            under_way.remove(item)
            lies[item[1:]], coming[item[1:]] = True, False
        rule.age(1)
        for i in range(layers):
            hits += int(lies[i, chosen[t, i]].sum())
            rule.observe(i, chosen[t, i])
        for change in rule.changes(lies, ~lies & ~coming, STAGED - len(under_way)):
            lies[change.mixture, change.goes], coming[change.mixture, change.comes] = False, True
            under_way.append((t + LATE, change.mixture, change.comes))
            brought += 1
    return Found(name, hits / chosen.size, brought / tokens)


def compared(chosen: Choices, experts: int, slots: int) -> Iterator[Found]:
    """All rules, on the second half."""
    warm, text = np.split(chosen, [len(chosen) // 2])
    there, size = most_chosen(warm, experts, slots), (chosen.shape[1], experts)
    yield fixed("what was chosen most before", text, there)
    yield fixed("what this text chooses most", text, most_chosen(text, experts, slots))
    yield lru(text, there)
    yield counted("LFU", SlotRule(*size, half_life=1e9, margin=0.0), text, there)
    for half_life in (64.0, 128.0, 256.0, 1024.0):
        for margin in (0.0, 4.0):
            rule = SlotRule(*size, half_life, margin)
            yield counted(f"half after {half_life:.0f} tokens, margin {margin:.0f}", rule, text, there)
    yield counted("ours", SlotRule(*size), text, there)
    yield belady(text, slots)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What rules would find in slots of a device.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--slots", type=float, default=0.33, help="part of a layer's experts")
    parser.add_argument("--tokens", type=int, default=1 << 30)
    args = parser.parse_args(argv)
    with np.load(args.file) as data:
        chosen, experts = data["chosen"][: args.tokens].astype(np.int64), int(data["experts"])
    slots, each = max(1, int(args.slots * experts)), chosen.shape[1] * chosen.shape[2]
    used, layers = chosen.shape[2], chosen.shape[1]
    print(f"{len(chosen):,} tokens, {layers} layers, {used} of {experts} experts, {slots} slots")
    for found in compared(chosen, experts, slots):
        print(
            f"{found.rule:<36} {found.found:6.1%} {found.brought:8.2f} {found.moved(each):8.2f}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
