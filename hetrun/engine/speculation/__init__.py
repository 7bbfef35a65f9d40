"""Several tokens a pass: guesses are verified together, where that is faster than one by one (ADR 0034)."""
