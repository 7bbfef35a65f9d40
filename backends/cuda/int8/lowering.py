"""Products of many tokens whose input is rounded to bytes, and whose weights are read as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetrun.backend.fusion import GatedProduct
from hetrun.backends.cuda import matmul_launch
from hetrun.backends.cuda.driver import Address, Argument
from hetrun.backends.cuda.int8 import launch
from hetrun.backends.cuda.int8.launch import Input
from hetrun.backends.cuda.kernel_cache import at, number
from hetrun.backends.cuda.matmul_launch import MatmulOutput
from hetrun.backends.cuda.weights import DeviceWeight
from hetrun.graph import Value

if TYPE_CHECKING:
    from hetrun.backends.cuda.lowering import CudaEmitter


def takes(e: CudaEmitter, weight: DeviceWeight, tokens: int) -> bool:
    """Whether products of this many tokens, which are many, are computed in bytes."""
    return tokens <= e.place.int8_rows and launch.takes(weight.quant.name, tokens, weight.shape[1])


def products(e: CudaEmitter, x: Value, weight: DeviceWeight, outputs: Sequence[MatmulOutput]) -> None:
    """Products of one input with matrices of one type, three at most."""
    n, sizes = e.rows(x), [int(o.rows) for o in outputs]
    size = launch.tile(n, e.place.processors, *sizes)
    blocks = launch.blocks(size, n, *sizes)
    _launch(e, x, weight, f"products_{size}", size, blocks, *matmul_launch.three(outputs))


def gated(e: CudaEmitter, item: GatedProduct, target: Address, act: int) -> None:
    """A gate inside of its products."""
    (gate, *gate_bias), (up, *up_bias) = e.held(item.gate), e.held(item.up)
    x, n, width = item.gate.inputs[0], e.rows(item.act.out), item.act.out.width
    size = launch.tile(n, e.place.processors, width, width)
    blocks = launch.gated_blocks(size, n, width)
    biases = (at(b[0].address if b else 0) for b in (gate_bias, up_bias))
    weights = at(gate.address), at(up.address), *biases
    _launch(e, x, gate, f"gated_{size}", size, blocks, *weights, at(target), number(width), number(act))


def _launch(
    e: CudaEmitter, x: Value, weight: DeviceWeight, name: str, size: int, blocks: int, *given: Argument
) -> None:
    """A kernel that takes its input behind all else."""
    address, cols, _, n = e.in_bytes(x)
    source, threads, shared = launch.source(weight.quant.name), launch.threads(size), launch.shared(size)
    e.do(source, name, (blocks,), threads, *given, Input(address, n, cols), shared=shared)
