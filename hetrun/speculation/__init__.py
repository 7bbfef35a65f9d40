"""Several tokens a pass: guesses are verified together, where that is faster than one by one (ADR 0034)."""

from hetrun.speculation.acceptance import Acceptance, Shared
from hetrun.speculation.draftmodel import Drafted, DraftModel
from hetrun.speculation.lookup import Lookup
from hetrun.speculation.roles import Proposer, Speculation

__all__ = ["DraftModel", "Proposer", "Speculation", "drafted", "lookup"]


def lookup(exact: bool) -> Speculation:
    """Guesses from each sequence's own tokens."""
    shared = Shared()
    return Speculation(lambda tokens, n_prompt: Lookup(tokens, n_prompt, Acceptance(shared)), exact)


def drafted(model: DraftModel, exact: bool) -> Speculation:
    """The same, and where a text says nothing of how it goes on, from a model."""
    own = lookup(exact).proposer
    return Speculation(
        lambda tokens, n_prompt: Drafted(own(tokens, n_prompt), tokens, model), exact, model.close
    )
