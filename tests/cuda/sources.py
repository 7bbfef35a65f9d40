"""Every CUDA source with every word that it is compiled with."""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.backends.cuda import attention_launch, grouped_launch, matmul_launch
from hetrun.backends.cuda.int8 import launch as int8
from hetrun.backends.cuda.matmul_launch import INT8_TYPES
from hetrun.backends.cuda.programs import Source
from hetrun.backends.cuda.states import launch
from hetrun.backends.cuda.weights import READ
from tests.cuda.emulated.kernels import names

KV_TYPES = "F32", "F16", "BF16", "Q8_0"
HEADS = 32, 64, 96, 128, 256
WIDE_HEADS = 512, 576  # Gemma 4's, and latent rows
WIDEST = 16, 64, 96, 128, 256, 512  # k_dim of delta nets, as 32 columns to 512
PLAIN = Source("small"), Source("rows"), Source("grouping"), launch.CONVOLUTION
PRODUCTS = tuple(Source("products", (("QUANT", quant),)) for quant in sorted(READ))
INT8_PRODUCTS = tuple(matmul_launch.source(quant, int8=True) for quant in sorted(INT8_TYPES))
TILES = tuple(Source("tiles", (("QUANT", quant),)) for quant in sorted(READ))
INT8_EXPERTS = tuple(grouped_launch.source(quant, in_bytes=True) for quant in sorted(int8.TYPES))
INT8 = tuple(int8.source(quant) for quant in sorted(int8.TYPES))
ATTENTION = tuple(Source("attention", (("KV", kv), ("HEAD", str(head)))) for kv in KV_TYPES for head in HEADS)
WIDE = tuple(Source("attention", (("KV", kv), ("HEAD", str(head)))) for kv in KV_TYPES for head in WIDE_HEADS)
ATTENTION_TILES = tuple(Source("attention_tiles", source.defines) for source in ATTENTION)
DELTA_NETS = tuple(launch.delta_net(k_dim) for k_dim in WIDEST)
SOURCES = (
    *(*PLAIN, *PRODUCTS, *INT8_PRODUCTS, *TILES, *INT8, *INT8_EXPERTS),
    *(*ATTENTION, *ATTENTION_TILES, *WIDE, *DELTA_NETS),
)


def kernels_of(source: Source) -> Sequence[str]:
    """The names of its kernels."""
    return names(source.path.read_text())


def shared_of(source: Source, name: str) -> int:
    """The most shared memory that a kernel is given, where that is more than any kernel may have."""
    if name == "attend_many":
        return attention_launch.many_shared(int(dict(source.defines)["HEAD"]))
    if source.name == "int8_products":
        return int8.shared(int(name.split("_")[1]))
    if source.name == "int8_experts":
        return max(grouped_launch.GATED_INT8, grouped_launch.DOWN_INT8)
    return grouped_launch.SHARED if source.name == "tiles" else 0
