"""Layers with states of a fixed size: a short convolution over time, and the gated delta rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetrun.backends.cuda.driver import Argument
from hetrun.backends.cuda.kernel_cache import at, long, number, real
from hetrun.backends.cuda.states import launch
from hetrun.graph import Op
from hetrun.graph.ops import CausalConv, DeltaNet

if TYPE_CHECKING:
    from hetrun.backends.cuda.lowering import CudaEmitter


def causal_conv(e: CudaEmitter, op: Op) -> None:
    """A short convolution over time, all spans of all sequences at once."""
    a, states = op.attrs, e.place.states
    assert isinstance(a, CausalConv)
    assert states is not None
    threads = launch.CONVOLVING
    weight, *bias = e.held(op)
    weights = at(weight.address), at(bias[0].address if bias else 0)
    pointers = at(e.at[op.inputs[0]]), *weights, at(e.make(op.out))
    told = e.told("parts"), e.told("spans"), e.told("writes"), long(states.at[a.layer, op.kind])
    grid = -(-a.width // threads), e.given.spans
    e.do(
        launch.CONVOLUTION,
        op.kind,
        grid,
        threads,
        *pointers,
        *told,
        number(a.width),
        number(a.kernel),
        number(a.silu),
    )


def delta_net(e: CudaEmitter, op: Op) -> None:
    """The gated delta rule, some rows of a head of a sequence in a block."""
    a, states = op.attrs, e.place.states
    assert isinstance(a, DeltaNet)
    assert states is not None
    weights = [w.address for w in e.held(op)]
    pointers = [at(p) for p in (*[e.at[v] for v in op.inputs], *weights, *([] if a.mamba else [0]))]
    told = e.told("parts"), e.told("writes"), long(states.at[a.layer, op.kind])
    sizes = number(a.k_heads), number(a.v_heads), number(a.k_dim), number(a.v_dim)
    columns = [number(column) for column in a.columns]
    facts: tuple[Argument, ...] = (
        *sizes,
        *columns,
        number(a.tiled),
        number(a.log),
        number(a.mamba),
        real(a.eps),
    )
    grid = -(-a.v_dim // launch.delta_rows(a.k_dim)), a.v_heads, len(e.shape.parts)
    e.do(
        launch.delta_net(a.k_dim),
        op.kind,
        grid,
        launch.THREADS,
        *pointers,
        at(e.make(op.out)),
        *told,
        *facts,
        shared=launch.delta_shared(a.k_dim),
    )
