"""Runs plans: opens a model within its budget, computes steps, and keeps the plan good."""
