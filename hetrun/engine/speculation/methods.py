"""The ways to speculate that a server can be asked for."""

from __future__ import annotations

from hetrun.engine.speculation.acceptance import Acceptance, Shared
from hetrun.engine.speculation.draft_model import Drafted, DraftModel
from hetrun.engine.speculation.interface import Speculation
from hetrun.engine.speculation.prompt_lookup import Lookup


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
