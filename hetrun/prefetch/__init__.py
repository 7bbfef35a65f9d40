"""Models bigger than memory: which pieces of the weights stay, and how the others come from disk in time."""
