"""Where things lie and who computes what, as the papers decide it and as hetrun may.

Each policy is a function of a clock, which knows the question and the costs; what it decides is a
`PolicyPlacement`, and all of them are timed by that one clock. None is worse off for the kernels that its
paper had.
"""

from __future__ import annotations

from hetrun.tools.simulate.evaluator import StepCosts
from hetrun.tools.simulate.policies.flexgen import streaming
from hetrun.tools.simulate.policies.hetrun import ours
from hetrun.tools.simulate.policies.layer_split import layer_split, processor_only
from hetrun.tools.simulate.policies.lia import lia
from hetrun.tools.simulate.policies.twinpilots import twinpilots
from hetrun.tools.simulate.types import Prediction


def compare(clock: StepCosts) -> list[Prediction]:
    """Every policy's prediction; a policy that finds no placement that fits is left out."""
    if clock.machine.gpu is None:
        found = [processor_only(clock)]
    else:
        found = [processor_only(clock), streaming(clock), layer_split(clock), twinpilots(clock), lia(clock)]
    others = [p for p in found if p is not None]
    mine = ours(clock, others)
    return others + ([mine] if mine else [])
