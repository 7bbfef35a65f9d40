"""What a planner is told: the machine, and what the user fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetrun.backend import Precision
from hetrun.loader.vision import NoVision, Vision
from hetrun.planner.plugin_planners import OWN
from hetrun.system import core_sets, cpu_topology


@dataclass(frozen=True, slots=True)
class PlannerMachine:
    """What a planner knows of the machine."""

    cores: int  # threads that may run at once
    counts: tuple[int, ...] = ()  # numbers of threads worth measuring
    wide: tuple[int, ...] = ()  # of these the ones that leave no core idle


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user fixed; None is for the planner to choose."""

    threads: int | None = None
    ubatch: int | None = None
    plan: Path | None = None
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """How a model is to be run; None is for hetrun to choose."""

    wishes: Wishes
    backends: tuple[str, ...] | None = None
    ctx: int | None = None
    kv_type: str = "f16"
    ram: int | None = None
    vram: int | None = None  # of each device that has memory to itself; 0: none of these is used
    precision: Precision = "exact"
    planner: str = "measured"  # or static, or a package's
    streaming: str = "balanced"  # what stays in memory where not all weights can, and how the others come
    # Bring in, before the first request, whatever pays in the long run; None: only if devices have memory of
    # their own for it.
    eager: bool | None = False
    # Whether the block that predicts one more token comes in, where a file has one; auto: unless it is what
    # would make weights come from disk.
    mtp: Literal["off", "auto", "on"] = "off"
    vision: Vision | NoVision | None = None  # what it reads pictures with, or why it reads none
    spatial: bool = False  # tokens may have positions in height and width, as those of pictures do
    whole: bool = False  # rows of a picture see each other, in a pass of their own
    front: int = 0  # bytes of the process that started this one, which the limit is for as well
    besides: Mapping[str, int] | None = None  # what is held besides a model; None: what the process has now

    @property
    def measures(self) -> bool:
        """Whether plans follow from what this machine was measured to take."""
        return self.planner == "measured"

    @property
    def rule(self) -> str:
        """The package's planner that decides, if one does."""
        return "" if self.planner in OWN else self.planner


def this_machine() -> PlannerMachine:
    """What this process may use of it, within a container's limits."""
    tree = cpu_topology.this_machine()
    return PlannerMachine(tree.threads, core_sets.counts(tree), core_sets.wide(tree))
