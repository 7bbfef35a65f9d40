"""What is asked, what a policy decides, and what that would take: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetrun.tools.simulate.costs import SimulatedModel, StepCase, decode, prefill
from hetrun.tools.simulate.machine import SimulatedMachine

Shares = Mapping[str, float]  # part -> how much of it: 0 is none, 1 all


@dataclass(frozen=True, slots=True)
class SimulatedSetting:
    """A question: a model on a machine, a batch of prompts and of answers."""

    machine: SimulatedMachine
    model: SimulatedModel
    batch: int
    prompt: int
    generate: int

    @property
    def prefill(self) -> StepCase:
        """All prompts in one pass."""
        return prefill(self.batch, self.prompt)

    @property
    def decode(self) -> StepCase:
        """A step in the middle of the answers."""
        return decode(self.batch, self.prompt + max(1, self.generate // 2))

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt + self.generate


@dataclass(frozen=True, slots=True)
class Band:
    """Neighbouring layers with the same homes: which share of each part's weights (or KV) the GPU holds."""

    layers: int
    there: Shares


@dataclass(frozen=True, slots=True)
class ComputeShares:
    """Who computes in one kind of step: the GPU's share of each part, for each band, and of the output."""

    bands: tuple[Shares, ...]
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyPlacement:
    """What a policy decided: where everything lies, and who computes what in prefill and in decode."""

    policy: str
    bands: tuple[Band, ...]
    after: bool  # the output's weights lie on the GPU
    prefill: ComputeShares
    decode: ComputeShares
    batches: int = 1  # turns in which the batch goes through a layer, whose weights come once
    serial: bool = False  # copies are waited for
    pass_tokens: int = 0  # weights come again after this many tokens; 0: once
    rereads: bool = False  # with too little memory every weight comes from disk again
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What one step takes, and the bytes that cross the link in it."""

    seconds: float
    copied: float


@dataclass(frozen=True, slots=True)
class Bill:
    """Bytes on each side; `disk` are weights that no memory holds."""

    gpu: Mapping[str, int]
    cpu: Mapping[str, int]
    disk: int
    problem: str = ""  # why it cannot be, "" if it can


@dataclass(frozen=True, slots=True)
class Prediction:
    """A placement with what it would take; without a problem it can be."""

    placing: PolicyPlacement
    bill: Bill
    prefill: SimulatedStep
    decode: SimulatedStep
    setting: SimulatedSetting = field(repr=False)

    @property
    def seconds(self) -> float:
        """From the prompts to the last token; the first token comes with the prompts."""
        return self.prefill.seconds + (self.setting.generate - 1) * self.decode.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of decoding alone, all sequences together."""
        return self.setting.batch / self.decode.seconds

    @property
    def throughput(self) -> float:
        """Generated tokens per second, the time of the prompts included."""
        return self.setting.batch * self.setting.generate / self.seconds
