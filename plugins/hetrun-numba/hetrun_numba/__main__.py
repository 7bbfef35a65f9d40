"""Compile the kernels now, and not when a model is first loaded: `python -m hetrun_numba`."""

from __future__ import annotations

from time import perf_counter

from hetrun_numba import create

begun = perf_counter()
create().start()
print(f"the kernels are there, after {perf_counter() - begun:.1f} s")
