"""What a machine is to a prediction: a processor, at most one GPU, the link between them, and a disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["cpu", "gpu"]

# Of each memory: for the system or the driver, and for what no bill counts.
RESERVE = 0.08


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """One device; rates are bytes and operations per second, `launch` is seconds for each op."""

    name: str
    kind: Kind
    memory: int
    bandwidth: float
    bf16: float
    int8: float  # 0: no faster way for weights in blocks
    half_tokens: float  # with this many tokens in a product, half of the peak is reached
    vector: float  # what is reached without matrix units, also with one token
    launch: float

    @property
    def usable(self) -> int:
        """Bytes that a plan may fill."""
        return int(self.memory * (1 - RESERVE))

    def rate(self, tokens: float, blocks: bool) -> float:
        """Operations per second in a product of `tokens` tokens; `blocks`: the weights are quantised."""
        peak = max(self.bf16, self.int8) if blocks else self.bf16
        return max(self.vector, peak * tokens / (tokens + self.half_tokens))


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """What lies between processor and GPU: bytes per second one way, seconds until a copy has begun."""

    bandwidth: float
    latency: float

    def seconds(self, nbytes: float) -> float:
        """For one copy that is waited for; nothing to copy takes no time."""
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


@dataclass(frozen=True, slots=True)
class SimulatedDisk:
    """Where weights lie that no memory holds."""

    size: int
    read: float


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """A machine as its file describes it; with a GPU comes a link."""

    name: str
    about: str
    cpu: SimulatedDevice
    gpu: SimulatedDevice | None = None
    link: SimulatedLink | None = None
    disk: SimulatedDisk | None = None


def sides(machine: SimulatedMachine) -> tuple[SimulatedDevice, SimulatedDevice, SimulatedLink]:
    """Processor, GPU and link of a machine that has them."""
    if machine.gpu is None or machine.link is None:
        raise ValueError(f"{machine.name} has no GPU")
    return machine.cpu, machine.gpu, machine.link
