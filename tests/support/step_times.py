"""Models of which nothing is wanted but what their steps take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetrun.engine.step_time import StepTimes


@dataclass
class Said:
    """Predicts by a function."""

    say: Callable[[Sequence[tuple[int, float]]], float | None]
    plans: object = None
    asked: int = 0

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        self.asked += 1
        return self.say(chunks)


def unpredicted() -> StepTimes:
    """Steps of a model that predicts nothing."""
    return StepTimes(Said(lambda chunks: None))
