"""Mixtures of experts in graphs: products in our own layout, what others compute, and what was chosen."""
