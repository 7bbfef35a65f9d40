"""Experts of a mixture that come to the GPU and leave it while the model runs."""
