"""Predictions for machines that are not here."""
