"""Planners, from times that tests make up: plans, probes, what lies on which device."""
