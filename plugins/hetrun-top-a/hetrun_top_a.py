"""Top-a sampling: a token stays if its probability is at least `top_a` times the square of the best one's.

If the model is sure (the best has 0.9), few tokens but the best stay; if it is not (0.1), nearly all do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from hetrun.client.sampler_plugins import Link, Parameter
from hetrun.sampling.candidates import Candidates, Past, Rule
from hetrun.sampling.chain import Setting


def top_a(c: Candidates, past: Past, *, a: float) -> Candidates:
    """Keep tokens with a probability of at least a * p(best)²."""
    best = 1.0 / float(c.weights().sum())  # weights are in units of the best one's
    kept = np.flatnonzero(c.logits >= c.peak + math.log(a * best))
    return c.pick(kept) if len(kept) < len(c.logits) else c


def rules(setting: Setting) -> Sequence[Rule]:
    """The rule, unless it is off."""
    a = setting.params.more.get("top_a", 0.0)
    return [partial(top_a, a=a)] if a > 0 else []


link = Link(
    (Parameter("top_a", 0.0, 0.0, 1.0, "at least N times the best one's share squared", "0: off"),), rules
)
