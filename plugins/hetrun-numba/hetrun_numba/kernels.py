"""Everything that is compiled. To import this is what takes time."""

from __future__ import annotations

from collections.abc import Mapping

import numba

from hetrun.backend.interpreter import OpFunction
from hetrun_numba import rows
from hetrun_numba.attention import attention
from hetrun_numba.products import product as product

MOST = numba.get_num_threads()  # as many as NUMBA_NUM_THREADS says, or as there are cores


def set_threads(threads: int) -> None:
    """For the kernels that this thread calls from now on."""
    numba.set_num_threads(max(1, min(threads, MOST)))


TABLE: Mapping[str, OpFunction] = {
    "rms_norm": rows.rms_norm,
    "swiglu": rows.swiglu,
    "add": rows.add,
    "rope": rows.rope,
    "attention": attention,
    "select": rows.select,
}
