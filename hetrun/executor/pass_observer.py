"""What sees passes before and after they run."""

from __future__ import annotations

from hetrun.backend import Pass
from hetrun.executor.compiled_plan import PassTiming


class PassObserver:
    """Sees every pass. This one has the forecast learn the times of all of them."""

    def prepare(self, work: Pass) -> None:
        """Before a pass runs: it may be asked for more than its results."""

    def observe(self, ran: PassTiming) -> None:
        """After a pass: whether anything is learnt from it is decided here."""
        ran.learn()
