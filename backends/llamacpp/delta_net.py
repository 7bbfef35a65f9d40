"""Layers with states of a fixed size, by kernels of our own: one node for all sequences of a pass.

What a node has to know of a pass is patched before each run: which slots of the states are read and written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hetrun.backend import Floats, Ints, Pass
from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.graph_builder import FLOAT, TensorRef
from hetrun.backends.llamacpp.kernels.delta_net import FIELDS, Convolution, DeltaNets, DeltaRule, PassStates
from hetrun.graph import Op
from hetrun.graph.ops import CausalConv, DeltaNet

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter

ALL_THREADS = -1
COUNTERS = 2  # of a node, in memory of its own: nodes run one after the other, but each ends by itself


@dataclass(frozen=True, slots=True)
class StateNode:
    """A node of a kernel: its structure, and the tensors whose addresses go into it once they are known."""

    call: Convolution | DeltaRule
    tensors: dict[str, int]


@dataclass(slots=True)
class StateNodes:
    """The nodes of a graph, and what they have in common."""

    nodes: list[StateNode] = field(default_factory=list)
    pass_states: PassStates = field(default_factory=PassStates)
    row: int = 0  # of the widest matrices
    slots: int = 0  # threads that take part


def causal_conv(e: GgmlEmitter, op: Op) -> None:
    """A short convolution over time."""
    a, lib = op.attrs, e.delta_nets
    assert isinstance(a, CausalConv)
    assert lib is not None
    x, states = e.values[op.inputs[0]], e.kv.state(a.layer, op.kind)
    weights = dict(zip(("kernel", "bias"), e.weights(op), strict=False))
    call = Convolution(
        **_states(e, states),
        x_stride=x.stride // FLOAT,
        out_stride=a.width,
        width=a.width,
        taps=a.kernel,
        silu=a.silu,
        level=lib.level,
    )
    _node(e, op, call, lib.convolve_address, {"x": e.w.plain(x), **weights})


def delta_net(e: GgmlEmitter, op: Op) -> None:
    """The gated delta rule, or Mamba 2's."""
    a, lib = op.attrs, e.delta_nets
    assert isinstance(a, DeltaNet)
    assert lib is not None
    x, decay, rate = (e.values[value] for value in op.inputs)
    weights = dict(zip(("decays", "biases", "skips"), e.weights(op), strict=False))
    q_at, k_at, v_at = a.columns
    common = e.inputs.states
    common.row, common.slots = max(common.row, a.row), e.slots
    call = DeltaRule(
        **_states(e, e.kv.state(a.layer, op.kind)),
        x_stride=x.stride // FLOAT,
        decay_stride=decay.stride // FLOAT,
        rate_stride=rate.stride // FLOAT,
        out_stride=a.v_width,
        k_heads=a.k_heads,
        v_heads=a.v_heads,
        k_dim=a.k_dim,
        v_dim=a.v_dim,
        q_at=q_at,
        k_at=k_at,
        v_at=v_at,
        row=a.row,
        tiled=a.tiled,
        log=a.log,
        mamba=a.mamba,
        level=lib.level,
        slots=e.slots,
        eps=a.eps,
    )
    plain = {"x": x, "decay": decay, "rate": rate}
    tensors = {name: e.w.plain(ref) for name, ref in plain.items()} | weights
    _node(e, op, call, lib.remember_address, tensors)


def _states(e: GgmlEmitter, table: Floats) -> dict[str, object]:
    """What both kinds know of the states."""
    return {
        "pass_states": ctypes.pointer(e.inputs.states.pass_states),
        "states": table.ctypes.data,
        "stride": table.strides[0] // FLOAT,
    }


def _node(
    e: GgmlEmitter, op: Op, call: Convolution | DeltaRule, function: int, tensors: dict[str, int]
) -> None:
    rows, width = e.shape.tokens, op.out.width
    sources = (c_void_p * len(tensors))(*tensors.values())
    given = (function, ALL_THREADS, ctypes.addressof(call))
    result = e.lib.ggml_custom_4d(e.ctx, ggml_api.F32, width, rows, 1, 1, sources, len(tensors), *given)
    made: TensorRef = e.w.result(result, width, rows)
    e.w.expand(result)  # it writes states, even if nothing reads its result
    e.inputs.states.nodes.append(StateNode(call, {**tensors, "out": result}))
    e.values[op.out] = made


class PassSlots:
    """The memory of a graph's nodes with states, and which slots a pass has for them."""

    def __init__(self, lib: DeltaNets | None, common: StateNodes, shape: Sequence[tuple[int, int]]) -> None:
        self._used = bool(common.nodes)
        self._sequences: Ints = np.zeros((len(shape), FIELDS), np.int64)
        ends = np.cumsum([n for n, _ in shape])
        self._sequences[:, 0], self._sequences[:, 1] = ends - [n for n, _ in shape], ends
        self._write: Ints = np.zeros(int(ends[-1]) if len(ends) else 0, np.int64)
        part = common.pass_states
        part.n = len(shape)
        part.sequences, part.write = self._sequences.ctypes.data, self._write.ctypes.data
        size = lib.scratch(common.row) if lib and self._used else 0
        self._scratch = np.empty(size * common.slots, np.float32)
        self._counters = np.zeros((len(common.nodes), COUNTERS), np.int32)
        for node, counters in zip(common.nodes, self._counters, strict=True):
            for name, tensor in node.tensors.items():
                setattr(node.call, name, ggml_api.tensor_at(tensor).data)
            if isinstance(node.call, DeltaRule):
                node.call.scratch, node.call.scratch_size = self._scratch.ctypes.data, size
                node.call.counters = counters.ctypes.data

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return self._scratch.nbytes

    def patch(self, work: Pass) -> None:
        """Before a run."""
        if not self._used:
            return
        for i, part in enumerate(work.parts):
            assert part.states is not None
            self._sequences[i, 2] = part.states.read
            self._write[part.a : part.b] = part.states.write
