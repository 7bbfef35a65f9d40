"""What the hottest kernels cost, as far as the compiled code tells without a GPU: instructions for a weight,
how wide loads are, tensor instructions, registers. It says nothing about time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import pytest

from hetrun.backends.cuda import attention_launch, grouped_launch, matmul_launch
from hetrun.backends.cuda.int8 import launch as long_int8
from hetrun.backends.cuda.nvrtc import compiler
from hetrun.backends.cuda.programs import Source
from hetrun.errors import BackendUnavailable
from tests.cuda.sass import TENSOR, Code, Compiled, disassembler, generic, kernels, of_kind
from tests.cuda.test_compiles import ENTRY, REGISTERS, compiled
from tests.support.tiers import exhaustive

# RTX 30, RTX 40, H100. What RTX 40 gets is what RTX 30 gets.
ARCHITECTURES = ["sm_86", pytest.param("sm_89", marks=exhaustive), "sm_90"]
ONE = ["sm_86", *[pytest.param(name, marks=exhaustive) for name in ("sm_89", "sm_90")]]
PROCESSOR_SHARED, BLOCK_SHARED = 100 << 10, 1 << 10  # bytes on sm_86; what each block takes besides
TWO_BLOCKS = 2
HEAD = 128


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    try:
        compiler()
    except BackendUnavailable as e:
        pytest.skip(str(e))
    if disassembler() is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")


@cache
def read(source: Source, architecture: str) -> tuple[Mapping[str, Compiled], Mapping[str, int]]:
    """The kernels of a source, and the registers that a thread of each takes: it needs no more than these."""
    tool = disassembler()
    assert tool
    program, said = compiled(compiler(), source.path, architecture, source.options)
    taken = {name: tuple(map(int, numbers)) for name, *numbers in ENTRY.findall(said)}
    assert not any(stack or spilled for stack, spilled, _ in taken.values())
    return kernels(tool, program), {name: registers for name, (_, _, registers) in taken.items()}


def in_bytes(quant: str) -> Source:
    return matmul_launch.source(quant, int8=True)


def attention(name: str, kv: str = "F16") -> Source:
    return Source(name, (("KV", kv), ("HEAD", str(HEAD))))


def per_product(code: Code) -> float:
    """Instructions for each product of a weight and a number; one instruction multiplies four."""
    return len(code) / (4 * len(of_kind(code, "IDP")))


def loads(code: Code) -> Sequence[int]:
    """Bytes that a lane reads from memory at once."""
    return [i.nbytes for i in of_kind(code, "LDG", "LDGSTS")]


def blocks_at_once(registers: int, threads: int, shared: int = 0) -> int:
    """Blocks that a processor has room for."""
    return min(REGISTERS // (registers * threads), PROCESSOR_SHARED // (shared + BLOCK_SHARED))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_weight_of_q4_k_costs_two_instructions_at_most(architecture: str) -> None:
    found, registers = read(in_bytes("Q4_K"), architecture)
    for name, loops in (("few_1", 1), ("gated_1", 2)):  # gate and up one after the other
        for hot in found[name].loops[:loops]:
            assert len(of_kind(hot, "IDP")) >= 32
            assert per_product(hot) <= 2.0
            assert set(loads(hot)) == {16}
    for tokens, most in ((2, 1.2), (4, 0.9), (8, 0.75)):  # what is unpacked once is multiplied more often
        hot = found[f"few_{tokens}"].hot
        assert per_product(hot) <= most
        assert set(loads(hot)) == {16}
    for name, kernel in found.items():
        assert not list(generic(kernel.code)), name
        assert blocks_at_once(registers[name], matmul_launch.THREADS) >= TWO_BLOCKS, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["sm_86", "sm_89", "sm_90"])
@pytest.mark.parametrize(("quant", "most"), [("Q5_K", 2.5), ("Q6_K", 2.5), ("Q4_0", 3.0), ("Q8_0", 3.5)])
def test_a_weight_of_other_types(quant: str, most: float, architecture: str) -> None:
    found, _ = read(in_bytes(quant), architecture)
    assert per_product(found["few_1"].hot) <= most
    assert not list(generic(found["few_1"].code))


@pytest.mark.parametrize("architecture", ONE)
def test_an_answer_looks_at_rows_by_tensor_instructions_and_wide_loads(architecture: str) -> None:
    found, registers = read(attention("attention"), architecture)
    hot = found["attend_few"].hot
    # Of 16 rows: scores and values, each of 8 columns by 16 at a time.
    assert len(of_kind(hot, *TENSOR)) == 2 * HEAD // 8
    rows = [n for n in loads(hot) if n != 8]  # but for pointers of slabs
    assert rows == [16] * (2 * 16 * 2 * HEAD // (16 * 32))
    assert not list(generic(found["attend_few"].code))
    # What a last block reads of the others comes from the second cache.
    assert {i.nbytes for i in found["attend_few"].code if i.name.startswith("LDG") and "GPU" in i.name} == {
        4,
        8,
        16,
    }
    shared = attention_launch.few_shared(8, HEAD, attention_launch.MOST_SPLITS)
    assert blocks_at_once(registers["attend_few"], attention_launch.THREADS, shared) >= TWO_BLOCKS


@pytest.mark.parametrize("architecture", ONE)
def test_a_prompt_looks_at_rows_by_tensor_instructions_that_copies_run_beside(architecture: str) -> None:
    found, registers = read(attention("attention_tiles"), architecture)
    many = found["attend_many"].code
    assert of_kind(many, *TENSOR)
    assert of_kind(many, "LDSM")
    assert {i.nbytes for i in of_kind(many, "LDGSTS")} == {16}
    assert not list(generic(many))
    shared = attention_launch.many_shared(HEAD)
    assert blocks_at_once(registers["attend_many"], attention_launch.THREADS, shared) >= TWO_BLOCKS


# Sums of 16 by 8 are four numbers of a lane: they become floats, and are multiplied by two scales. Types with
# minima need one more instruction for each, those with scales for 16 columns two products for 32.
OTHERS = [
    (quant, most, arch)
    for quant, most in (("Q6_K", 34), ("Q4_0", 22), ("Q8_0", 22))
    for arch in ("sm_86", "sm_89")
]


@pytest.mark.parametrize(
    ("quant", "most", "architecture"),
    [
        ("Q4_K", 25, "sm_86"),
        *[pytest.param("Q4_K", 25, name, marks=exhaustive) for name in ("sm_89", "sm_90")],
        *[pytest.param(*other, marks=exhaustive) for other in OTHERS],
    ],
)
def test_a_prompt_multiplies_bytes_that_are_unpacked_once(quant: str, most: int, architecture: str) -> None:
    found, registers = read(long_int8.source(quant), architecture)
    for name, kernel in found.items():
        size = int(name.split("_")[1])
        tensor = of_kind(kernel.hot, "IMMA")
        # Of a slab of 64 columns; a warp has half of the tile's tokens and 32 of its rows.
        deep = 16 if quant == "Q6_K" else 32
        assert len(tensor) == (size // 2) * 32 * 64 // (16 * 8 * deep)
        if size == 128:
            assert len(kernel.hot) <= most * 32 * 64 * size // 2 // (16 * 8 * 32), name
        assert of_kind(kernel.hot, "LDSM")
        assert 16 in {i.nbytes for i in of_kind(kernel.hot, "LDGSTS")}  # the next slab comes meanwhile
        if quant == "Q4_K":
            assert set(loads(kernel.hot)) == {16}
        assert not list(generic(kernel.code)), name
        shared = long_int8.shared(size)
        assert blocks_at_once(registers[name], long_int8.threads(size), shared) >= TWO_BLOCKS, name


def multiplying(kernel: Compiled) -> Code:
    """The loop that has the tensor instructions."""
    return next(loop for loop in kernel.loops if of_kind(loop, *TENSOR))


@pytest.mark.parametrize(
    ("quant", "most", "architecture"),
    [
        ("Q4_K", 25, "sm_86"),
        *[pytest.param("Q4_K", 25, name, marks=exhaustive) for name in ("sm_89", "sm_90")],
        *[pytest.param(*other, marks=exhaustive) for other in OTHERS],
    ],
)
def test_experts_of_a_prompt_multiply_bytes_as_all_products_do(
    quant: str, most: int, architecture: str
) -> None:
    found, registers = read(grouped_launch.source(quant, in_bytes=True), architecture)
    size = grouped_launch.TILE
    for name, kernel in found.items():
        hot = multiplying(kernel)
        deep = 16 if quant == "Q6_K" else 32
        assert len(of_kind(hot, "IMMA")) == (size // 2) * 32 * 64 // (16 * 8 * deep)
        # One more for each product than elsewhere: a list says where rows lie.
        assert len(hot) <= (most + 1) * 32 * 64 * size // 2 // (16 * 8 * 32), name
        assert of_kind(hot, "LDSM")
        assert 16 in {i.nbytes for i in of_kind(hot, "LDGSTS")}
        if quant == "Q4_K":
            assert set(loads(hot)) == {16}
        assert not list(generic(kernel.code)), name
        shared = max(grouped_launch.GATED_INT8, grouped_launch.DOWN_INT8)
        assert blocks_at_once(registers[name], grouped_launch.THREADS, shared) >= TWO_BLOCKS, name


@pytest.mark.parametrize("architecture", ONE)
def test_experts_of_a_prompt_read_fragments_from_shared_memory(architecture: str) -> None:
    """In bf16; of a slab of 64 columns a warp has 64 pairs and 32 outputs."""
    found, registers = read(grouped_launch.source("Q4_K"), architecture)
    for name, kernel in found.items():
        hot = multiplying(kernel)
        assert len(of_kind(hot, "HMMA")) == 64 * 32 * 64 // (16 * 8 * 16)
        # Of a product of 16 columns: four fragments of pairs, and two of weights.
        assert len(of_kind(hot, "LDSM")) == 6 * 64 // 16
        assert {i.nbytes for i in of_kind(hot, "LDGSTS")} == {16}  # the input's next slab comes meanwhile
        assert len(hot) <= 800, name
        assert not list(generic(kernel.code)), name
        blocks = blocks_at_once(registers[name], grouped_launch.THREADS, grouped_launch.SHARED)
        assert blocks >= TWO_BLOCKS, name
