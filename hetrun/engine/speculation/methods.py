"""The ways to speculate that a server can be asked for."""

from __future__ import annotations

from hetrun.engine.speculation.acceptance import Acceptance, SharedAcceptance
from hetrun.engine.speculation.combined import CombinedGuesser, SharedGuessers
from hetrun.engine.speculation.draft_model import DraftModel
from hetrun.engine.speculation.interface import Speculation
from hetrun.engine.speculation.mtp import REACH, Predictions
from hetrun.engine.speculation.prompt_lookup import PromptLookup
from hetrun.executor.mtp import Predictor


def lookup(exact: bool) -> Speculation:
    """Guesses from each sequence's own tokens."""
    shared = SharedAcceptance()
    return Speculation(lambda tokens, n_prompt: PromptLookup(tokens, n_prompt, Acceptance(shared)), exact)


def drafted(model: DraftModel, exact: bool) -> Speculation:
    """The same, and where a text says nothing of how it goes on, from a model."""
    return _combined(model, exact)


def predicted(block: Predictor, exact: bool, keeps: bool = True) -> Speculation:
    """The same from the block inside the model's file. `keeps`: hidden states can be had of more tokens than
    logits; else it begins with a prompt's last."""
    return _combined(Predictions(block), exact, REACH if keeps else 1)


def _combined(guessing: SharedGuessers, exact: bool, reach: int = 0) -> Speculation:
    own = lookup(exact).proposer
    return Speculation(
        lambda tokens, n_prompt: CombinedGuesser(own(tokens, n_prompt), tokens, guessing),
        exact,
        guessing.close,
        reach,
    )
