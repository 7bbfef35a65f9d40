"""Planners decide: which backend runs what, with how many threads, in passes of which size, and why."""
