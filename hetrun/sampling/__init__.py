"""From a row of logits to a token.

`SamplingParams` says how, `make_sampler` turns it into a `Sampler`, one for each sequence. The rules, their
order and their meaning are llama.cpp's (ADR 0015): `chain.py` puts them together, `sampler.py` runs them.
"""

from hetrun.sampling.logprobs import of_prompt
from hetrun.sampling.roles import Choice, Constraint, Sampler
from hetrun.sampling.sampler import DEFAULT_TEMPERATURE, make_sampler, random_seed
from hetrun.sampling.together import choose

__all__ = [
    "DEFAULT_TEMPERATURE",
    "Choice",
    "Constraint",
    "Sampler",
    "choose",
    "make_sampler",
    "of_prompt",
    "random_seed",
]
