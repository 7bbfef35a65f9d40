"""How well times are predicted that are known exactly, and what remembering one costs.

    python -m tests.tools.forecast_accuracy

Four kinds of work, measured everywhere or at six sizes only, with noise of 5 % and with one run in twenty 30
times slower. Errors are relative, inside the measured range, over 20 random seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import mean
from timeit import repeat

from hetrun.planner.costmodel import OpWork, WorkTimes

WORK = OpWork("attn", "any", 2)
SEEDS, QUESTIONS, RUNS = 20, 50, 5
Truth = Callable[[float, float], float]
Sizes = Sequence[tuple[int, float]]
TRUTHS: dict[str, Truth] = {
    "attention": lambda n, d: 2e-4 + 1e-5 * n + 1e-8 * n * d,
    "mostly keys": lambda n, d: 1e-4 + 2e-6 * n + 4e-8 * n * d,
    "batches pay less": lambda n, d: 3e-4 + 1e-5 * n + 1e-7 * n**0.6 * d,
    "no keys": lambda n, d: 5e-4 + 2e-5 * n,
}
FULL: Sizes = [(1, d) for d in (40, 300, 1000, 3500)] + [
    (n, seen + (n + 1) / 2) for n in (2, 4, 8, 16, 32, 64, 128, 256, 512) for seen in (0, 512, 2048, 4096)
]
FEW: Sizes = [(1, 20), (1, 1000), (8, 30), (64, 50), (512, 256), (512, 1300)]


def taught(truth: Truth, sizes: Sizes, noise: float, wild: float, chance: random.Random) -> WorkTimes:
    """A forecast that has seen some runs of each size."""
    forecast = WorkTimes()
    for tokens, depth in sizes:
        for _ in range(RUNS):
            seconds = truth(tokens, depth) * max(0.5, chance.gauss(1, noise))
            forecast.learn(WORK, tokens, depth, seconds * (30 if chance.random() < wild else 1))
    return forecast


def errors(truth: Truth, sizes: Sizes, noise: float, wild: float) -> list[float]:
    """Of random questions, ascending."""
    found, deepest = [], max(d for _, d in sizes)
    for seed in range(SEEDS):
        chance = random.Random(seed)
        forecast = taught(truth, sizes, noise, wild, chance)
        for _ in range(QUESTIONS):
            tokens = round(2 ** chance.uniform(0, 9))
            depth = max((tokens + 1) / 2, deepest ** chance.uniform(0.3, 1))
            predicted = forecast.seconds(WORK, tokens, depth)
            assert predicted is not None
            found.append(abs(predicted / truth(tokens, depth) - 1))
    return sorted(found)


def microseconds(work: Callable[[], object], runs: int) -> float:
    """The best of some rounds."""
    return 1e6 * min(repeat(work, number=runs, repeat=7)) / runs


def main() -> None:
    print(f"{'work':<18} {'sizes':<6} {'noise':>6} {'wild':>6} {'mean':>7} {'95 %':>7} {'worst':>7}")
    for name, truth in TRUTHS.items():
        for where, sizes in (("all", FULL), ("six", FEW)):
            for noise, wild in ((0.0, 0.0), (0.05, 0.0), (0.05, 0.05)):
                e = errors(truth, sizes, noise, wild)
                few = f"{mean(e):7.1%} {e[int(0.95 * len(e))]:7.1%} {e[-1]:7.1%}"
                print(f"{name:<18} {where:<6} {noise:>6.0%} {wild:>6.0%} {few}")
    forecast = taught(TRUTHS["attention"], FULL, 0.05, 0.0, random.Random(1))
    cell, measured = forecast.cell(WORK, 1, 300.0), forecast.measured(WORK)

    def ask_anew() -> None:
        cell.add(1, 300.0, 2e-4)
        forecast.seconds(WORK, 100, 700.0)

    costs: dict[str, tuple[Callable[[], object], int]] = {
        "one more run into a cell that is held": (lambda: cell.add(1, 300.0, 2e-4), 100_000),
        "into work that is held": (lambda: measured.add(1, 300.0, 2e-4), 100_000),
        "into the forecast": (lambda: forecast.learn(WORK, 1, 300.0, 2e-4), 100_000),
        "a prediction": (lambda: forecast.seconds(WORK, 100, 700.0), 2_000),
        "a prediction behind a new run": (ask_anew, 200),
    }
    for name, (work, runs) in costs.items():
        print(f"{microseconds(work, runs):8.2f} us  {name}")


if __name__ == "__main__":
    main()
