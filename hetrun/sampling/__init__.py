"""From a row of logits to a token.

`SamplingParams` says how, `make_sampler` turns it into a `Sampler`, one for each sequence. The rules, their
order and their meaning are llama.cpp's (ADR 0015): `chain.py` puts them together, `sampler.py` runs them.
"""
