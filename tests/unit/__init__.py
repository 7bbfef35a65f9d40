"""Tests that need numpy only: one module each."""
