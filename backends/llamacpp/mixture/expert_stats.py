"""Which experts the rows of small passes have chosen: kept to the end of a run, for who wants to know."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from hetrun.backends.llamacpp import ggml_api
from hetrun.graph import Op

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter

MOST_ROWS = 16  # of larger passes the numbers would take memory, and say less


def keep(e: GgmlEmitter, op: Op, chosen: int) -> None:
    """Do not use the memory of the numbers again; they are a view of all experts in their order."""
    e.lib.ggml_set_output(ggml_api.tensor_at(chosen).view_src or chosen)
    e.inputs.chosen[op.weights[0].name] = chosen


def views(chosen: Mapping[str, int]) -> dict[str, NDArray[np.int32]]:
    """Where the numbers stand after a run; ggml has given the graph its memory."""
    return {router: _view(tensor) for router, tensor in chosen.items()}


def _view(tensor: int) -> NDArray[np.int32]:
    fields = ggml_api.tensor_at(tensor)
    (used, rows), stride = fields.ne[:2], fields.nb[1]
    memory = (ctypes.c_int32 * (stride // 4 * (rows - 1) + used)).from_address(fields.data)
    return as_strided(np.ctypeslib.as_array(memory), (rows, used), (stride, 4))
