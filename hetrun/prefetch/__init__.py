"""Models bigger than memory: which pieces of the weights stay, and how the others come from disk in time.

`residency_policy` says what stays, `streamed_weights` holds it within the budget and `streamer` brings
the rest, through a `ring_buffer` that C threads fill (`ring_reader.c`), in the order of a pass and as far
ahead as `lookahead` finds worth it. `disk_probe` measures how the disk is read fastest; `mapped_weights`
is for weights that stay in their file.
"""
