"""Rules of packages: watched, because what they do wrong must be said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hetrun.client import sampler_plugins
from hetrun.errors import OptionError
from hetrun.sampling.candidates import Candidates, Past, Rule
from hetrun.system import entry_points
from hetrun.system.entry_points import PluginPoint

if TYPE_CHECKING:  # it asks for these
    from hetrun.sampling.chain import Setting


def brought(name: str, setting: Setting) -> Sequence[Rule]:
    """The rules of a link that a package brought."""
    link, point = sampler_plugins.link(name), entry_points.find(sampler_plugins.GROUP, name)
    if link is None or point is None:
        raise OptionError(f"the sampler {name!r} is no longer available")
    with entry_points.blamed(
        lambda e: entry_points.leave_out(point, f"it cannot make its rules: {entry_points.in_words(e)}", e)
    ):
        return [WatchedRule(rule, point) for rule in link.rules(setting)]


@dataclass(frozen=True, slots=True)
class WatchedRule:
    """A stranger's rule: an answer that it spoils ends with a sentence, and it gets no other one."""

    rule: Rule
    point: PluginPoint

    def __call__(self, c: Candidates, past: Past) -> Candidates:
        try:
            left: object = self.rule(c, past)
        except entry_points.FAILURES as e:
            raise entry_points.leave_out(self.point, f"its rule fails: {entry_points.in_words(e)}", e) from e
        if not isinstance(left, Candidates) or not len(left.logits):
            raise entry_points.leave_out(self.point, "its rule leaves no candidates")
        if not np.isfinite(left.peak):
            raise entry_points.leave_out(self.point, "its rule leaves only impossible tokens")
        return left
