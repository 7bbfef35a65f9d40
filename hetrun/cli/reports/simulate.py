"""`hetrun plan --machine`: where a model would run on a machine that is not here, and how fast."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from hetrun import option_types
from hetrun.api.model_path import model_path
from hetrun.config import OPTIONS, Settings
from hetrun.errors import OptionError
from hetrun.graph import Architecture
from hetrun.loader import architectures
from hetrun.loader.architectures import build_graph
from hetrun.loader.open_model import open_model
from hetrun.system.terminal_text import visible
from hetrun.tools.simulate.costs import SimulatedModel, model_of
from hetrun.tools.simulate.machine_files import open_machine
from hetrun.tools.simulate.report import make_report, to_json, to_text
from hetrun.tools.simulate.shapes import shape_of

MOST = 1 << 20  # sequences, and tokens of one: more would be a slip


@dataclass(frozen=True, slots=True)
class SimulationQuestion:
    """The options of `hetrun plan` that ask about another machine; None was not given."""

    machine: str | None
    shape: str | None
    batch: str | None
    prompt: str | None
    generate: str | None

    def given(self) -> list[str]:
        """Those that say nothing without a machine."""
        told = {"shape": self.shape, "batch": self.batch, "prompt": self.prompt, "generate": self.generate}
        return [name for name, value in told.items() if value is not None]


def refuse_what_contradicts(question: SimulationQuestion, given: Mapping[str, object]) -> None:
    """Options that make no sense together; before a model is looked for, which may be a download."""
    if question.machine is None and (alone := question.given()):
        raise OptionError(f"--{alone[0]} is for another machine: name one with --machine")
    if question.shape is not None and given.get("model") is not None:
        raise OptionError("--shape and --model name two models; give one of them")


def print_prediction(question: SimulationQuestion, settings: Settings, as_json: bool) -> None:
    """The prediction for one machine and model."""
    assert question.machine is not None
    for name in settings.origins:
        if name != "model" and settings.origin(name) == "explicit":
            flag = OPTIONS[name].flags[-1]
            raise OptionError(f"{flag} applies to this machine only; leave it out, or leave out --machine")
    numbers = [
        option_types.integer(1, MOST)(value or usual, f"--{name}")
        for name, value, usual in (
            ("batch", question.batch, 1),
            ("prompt", question.prompt, 512),
            ("generate", question.generate, 128),
        )
    ]
    machine = open_machine(question.machine)
    model, name = _model(question.shape, settings)
    report = make_report(machine, model, name, *numbers)
    print(json.dumps(to_json(report), indent=1) if as_json else visible(to_text(report)))


def _model(shape: str | None, settings: Settings) -> tuple[SimulatedModel, str]:
    """A published model's measures, or a model's file; weights are not read."""
    if shape is None:
        source = open_model(model_path(settings))
        return model_of(build_graph(source)), source.name
    found = shape_of(shape)
    return model_of(found.graph(cast(Architecture, architectures.own_model(found.architecture)))), found.name
