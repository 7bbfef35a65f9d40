"""Models that a library runs as a whole, without a plan of ours."""
