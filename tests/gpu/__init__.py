"""Tests that run kernels on a CUDA device."""
