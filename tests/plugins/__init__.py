"""Packages of strangers: what they can do, and what they cannot break."""
