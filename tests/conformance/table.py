"""What every backend must compute as the reference does: op kinds, quantisation types and shapes.

A row is a case; a new op kind or type is a new row, and every backend that is installed is tested with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hetrun.ops import NONE, Attention, Attrs, RmsNorm, Rope

# Of the result, as a part of its mean square: what rounding the activations to 8 bits, or the KV rows to the
# type, may cost. Float types only round what is multiplied.
EXACT, HALF, ROUNDED = 1e-10, 1e-5, 5e-4
# ggml rounds activations to 8 bits for every quantised type. That costs less than the type itself does, but
# for Q8_0, which rounds weights in the same way: there it costs as much.
_WITH_8_BITS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("TQ1_0", "TQ2_0", "Q1_0", "Q2_0"),
)
QUANT_LIMITS = {"F32": EXACT, "F16": HALF, "BF16": 1e-5, "Q8_0": 6e-5} | dict.fromkeys(_WITH_8_BITS, 2e-4)
TOKENS = (1, 2, 5, 17, 64)


@dataclass(frozen=True, slots=True)
class Company:
    """The sequences of a pass: tokens seen before, tokens now, how many of the last ones are wanted."""

    parts: tuple[tuple[int, int, int], ...]
    forked: bool = False  # the sequences are forks of one parent, whose blocks are scattered

    def __str__(self) -> str:
        return "+".join(f"{now}@{before}w{wanted}" for before, now, wanted in self.parts) + "f" * self.forked


def single(tokens: int) -> Company:
    return Company(((0, tokens, tokens),))


@dataclass(frozen=True, slots=True)
class Case:
    """One op."""

    kind: str
    widths: tuple[int, ...]  # of the inputs
    out: int
    company: Company
    limit: float
    attrs: Attrs = NONE
    weights: tuple[tuple[int, int, str], ...] = ()  # rows, columns, type
    rows: str = "tokens"  # of the first input
    kv_type: str = "F32"
    note: str = field(default="", compare=False)

    def __str__(self) -> str:
        types = "-".join(w[2] for w in self.weights) or self.kv_type
        return f"{self.kind}-{types}-{self.company}{'-' if self.note else ''}{self.note}"


def _products() -> Iterator[Case]:
    for quant, limit in QUANT_LIMITS.items():
        for n in TOKENS:
            # 96 rows are a multiple of every interleaving; 100 are of none.
            for rows in (96, 100):
                yield Case(
                    "linear", (256,), rows, single(n), limit, weights=((rows, 256, quant),), note=f"{rows}"
                )
        yield Case("head", (256,), 320, single(3), limit, weights=((320, 256, quant),))
        yield Case("embed", (), 256, single(7), EXACT, weights=((50, 256, quant),))
    bias = ((64, 128, "F32"), (1, 64, "F32"))
    yield Case("linear", (128,), 64, single(5), EXACT, weights=bias, note="bias")


def _small_ops() -> Iterator[Case]:
    for n in TOKENS:
        yield Case("rms_norm", (96,), 96, single(n), EXACT, RmsNorm(1e-5), ((1, 96, "F32"),))
        yield Case("swiglu", (96, 96), 96, single(n), 1e-6)
        yield Case("add", (96, 96), 96, single(n), EXACT)
    yield Case("rms_norm", (64,), 64, single(3), HALF, RmsNorm(1e-6), ((1, 64, "F16"),))
    for wanted in (1, 4, 9):
        yield Case("select", (64,), 64, Company(((0, 9, wanted),)), EXACT)


def _ropes() -> Iterator[Case]:
    plain = Rope(n_heads=4, head_dim=32, n_rot=32, base=10000.0, interleaved=True)
    variants = {
        "interleaved": plain,
        "halves": Rope(4, 32, 32, 10000.0, interleaved=False),
        "partial": Rope(4, 32, 16, 10000.0, interleaved=True),
        "linear": Rope(4, 32, 32, 10000.0, interleaved=True, freq_scale=0.25),
        "yarn": Rope(4, 32, 32, 10000.0, True, 0.25, ext_factor=1.0, n_ctx_orig=64),
        "yarn-attn": Rope(4, 32, 32, 10000.0, True, 0.25, 1.0, attn_factor=0.7, n_ctx_orig=64),
    }
    for note, attrs in variants.items():
        for company in (single(5), Company(((100, 3, 3), (7, 2, 1)))):
            yield Case("rope", (128,), 128, company, 1e-8, attrs, note=note)
    yield Case("rope", (128,), 128, single(4), 1e-8, plain, ((1, 16, "F32"),), note="factors")


def _attentions() -> Iterator[Case]:
    heads = {"mha": (4, 4, 32), "gqa": (4, 2, 32), "mqa": (4, 1, 64)}
    companies = (
        *(single(n) for n in TOKENS),
        Company(((40, 1, 1),)),
        Company(((600, 1, 1),)),  # long enough for kernels that share one row between threads
        Company(((33, 20, 20),)),
        Company(((33, 20, 2),)),
        Company(((0, 5, 5), (70, 1, 1), (31, 8, 8))),
        Company(((0, 5, 0), (70, 1, 1), (31, 8, 3))),
        Company(((20, 5, 0),)),  # only fills the cache
        Company(((40, 3, 3), (40, 1, 1)), forked=True),
    )
    for note, (n_heads, n_kv, dim) in heads.items():
        attrs = Attention(0, n_heads, n_kv, dim, dim**-0.5)
        widths = (n_heads * dim, n_kv * dim, n_kv * dim)
        for company in companies:
            rows = "tokens" if all(now == wanted for _, now, wanted in company.parts) else "wanted"
            for kv_type, limit in (("F32", 1e-8), ("F16", HALF), ("Q8_0", ROUNDED)):
                yield Case("attention", widths, n_heads * dim, company, limit, attrs, (), rows, kv_type, note)


CASES = [*_products(), *_small_ops(), *_ropes(), *_attentions()]
