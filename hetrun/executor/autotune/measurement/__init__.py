"""Measures what backends take for the parts of a model, alone, in turn and beside other programs."""
