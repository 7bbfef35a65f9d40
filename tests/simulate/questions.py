"""Small machines and models to ask about."""

from __future__ import annotations

from functools import cache
from typing import cast

from hetrun.graph import Architecture
from hetrun.graph.quant import by_name
from hetrun.loader import architectures
from hetrun.tools.simulate.costs import SimulatedModel, model_of
from hetrun.tools.simulate.evaluator import StepCosts
from hetrun.tools.simulate.machine import SimulatedDevice, SimulatedDisk, SimulatedLink, SimulatedMachine
from hetrun.tools.simulate.shapes import ModelShape, shape_of
from hetrun.tools.simulate.types import SimulatedSetting

GB = 10**9

MIXTURE = ModelShape(
    "mixture",
    "llama",
    4,
    {
        "vocab_size": 1000,
        "context_length": 4096,
        "embedding_length": 512,
        "feed_forward_length": 1024,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "expert_count": 8,
        "expert_used_count": 2,
    },
    biases=False,
    own_head=True,
    quant=by_name("F16"),
)


@cache
def model(name: str) -> SimulatedModel:
    """A published model's measures, or `mixture`."""
    shape = MIXTURE if name == "mixture" else shape_of(name)
    return model_of(shape.graph(cast(Architecture, architectures.own_model(shape.architecture))))


def cpu(**changes: float) -> SimulatedDevice:
    """100 GB/s, 2 TFLOP/s, nothing for a launch."""
    facts = {"memory": 512 * GB, "bandwidth": 100e9, "bf16": 2e12, "int8": 0.0}
    facts |= {"half_tokens": 0.0, "vector": 1e9, "launch": 0.0, **changes}
    return SimulatedDevice("a processor", "cpu", **facts)  # type: ignore[arg-type]


def gpu(**changes: float) -> SimulatedDevice:
    """1000 GB/s, 100 TFLOP/s, nothing for a launch."""
    facts = {"memory": 24 * GB, "bandwidth": 1000e9, "bf16": 100e12, "int8": 0.0}
    facts |= {"half_tokens": 0.0, "vector": 1e9, "launch": 0.0, **changes}
    return SimulatedDevice("a GPU", "gpu", **facts)  # type: ignore[arg-type]


def machine(link: float = 10e9, latency: float = 0.0, **gpu_changes: float) -> SimulatedMachine:
    """With both, and a link of 10 GB/s."""
    disk = SimulatedDisk(2000 * GB, 2e9)
    return SimulatedMachine(
        "made up", "for a test", cpu(), gpu(**gpu_changes), SimulatedLink(link, latency), disk
    )


def clock(
    name: str, on: SimulatedMachine | None = None, batch: int = 1, prompt: int = 64, generate: int = 16
) -> StepCosts:
    """A question."""
    return StepCosts(SimulatedSetting(on or machine(), model(name), batch, prompt, generate))
