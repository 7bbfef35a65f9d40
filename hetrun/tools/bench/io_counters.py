"""What is counted while a budgeted model runs: by the kernel, and by hetrun itself where it streams weights.

The only place that knows how a running model tells its streaming.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from hetrun.engine.loaded_model import LoadedModel
from hetrun.executor.planned_model import PlannedModel
from hetrun.prefetch.expert_trace import HitShares

KIB = 1024


@dataclass(frozen=True, slots=True)
class Counters:
    """What was counted at a moment; everything only grows."""

    at: float = 0.0  # seconds
    passes: int = 0
    streamed: int = 0  # bytes of weights that our own readers brought
    read: int = 0  # bytes that the kernel fetched from disks for this process


def count(loaded: LoadedModel) -> Counters:
    """Now; on the engine's thread."""
    now, streaming = perf_counter(), loaded.model.streaming()
    read = disk_bytes(os.getpid())
    if streaming is None:
        return Counters(now, 0, 0, read)
    return Counters(now, streaming.passes, streaming.bytes_read, read)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a model takes, and what it reads for each pass because it may not take more."""

    locked: int  # bytes of weights in memory
    streamed: int  # bytes of weights that every pass reads
    waiting: float  # the share of the last passes that was spent waiting for the disk
    least: int | None  # the smallest budget that would do; None: not asked for
    peak: int | None  # the most memory that the process had at once, its shared libraries included
    memory: int | None = None  # what it has now


def held(loaded: LoadedModel, weights: int) -> ModelMemory:
    """Now; `weights` are all of the model's, in bytes. On the engine's thread."""
    streaming, pid = loaded.model.streaming(), os.getpid()
    peak, now = peak_memory(pid), memory(pid)
    if streaming is None:
        return ModelMemory(weights, 0, 0.0, None, peak, now)
    return ModelMemory(
        streaming.locked_bytes, streaming.streamed_bytes, streaming.waiting, streaming.least, peak, now
    )


def experts_kept(loaded: LoadedModel) -> HitShares | None:
    """How well experts were kept that do not all fit; on the engine's thread."""
    model = loaded.model
    return model.experts_kept() if isinstance(model, PlannedModel) else None


def disk_bytes(pid: int) -> int:
    """Bytes that the kernel fetched from disks for a process, also because of pages that it touched; 0 where
    the kernel does not say."""
    return _field(Path(f"/proc/{pid}/io"), "read_bytes") or 0


def peak_memory(pid: int) -> int | None:
    """The most memory that a process had at once."""
    return _status(pid, "VmHWM")


def memory(pid: int) -> int | None:
    """What a process has in memory now."""
    return _status(pid, "VmRSS")


def _status(pid: int, name: str) -> int | None:
    found = _field(Path(f"/proc/{pid}/status"), name)
    return None if found is None else found * KIB


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
