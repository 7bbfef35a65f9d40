"""Weights that do not stay on the device: from the host's memory, or from their files, for each pass."""
