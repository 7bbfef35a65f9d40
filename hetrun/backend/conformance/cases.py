"""What every backend must compute as the reference does: op kinds, quantisation types and shapes.

A row is a case; a new op kind or type is a new row, and every backend is tried with it: by the tests, by
`hetrun devices --conformance`, and what a model needs of it before a model runs on a stranger's backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetrun.graph.ops import (
    BY_ROUTER,
    MIXTURE,
    NONE,
    Attention,
    Attrs,
    CausalConv,
    DeltaNet,
    EverySecond,
    Gelu,
    Grow,
    LayerNorm,
    Moe,
    MoreWeight,
    PerHead,
    Positions,
    RmsNorm,
    Rope,
    Scale,
    Softcap,
)
from hetrun.graph.quant import by_name

# Of the result, as a part of its mean square: what rounding the activations to 8 bits, or the KV rows to the
# type, may cost. Float types only round what is multiplied.
EXACT, HALF, ROUNDED = 1e-10, 1e-5, 5e-4
# Twice what it costs on average: a row alone, and one of few numbers, is as unlucky as that.
# ggml rounds activations to 8 bits for every quantised type. That costs less than the type itself does, but
# for Q8_0, which rounds weights in the same way: there it costs as much.
_WITH_8_BITS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("TQ1_0", "TQ2_0", "Q1_0", "Q2_0"),
)
QUANT_LIMITS = {"F32": EXACT, "F16": HALF, "BF16": 1e-5, "Q8_0": 8e-5} | dict.fromkeys(_WITH_8_BITS, 2e-4)
# Backends that say what arithmetic their products are in get as much as it costs, whatever the weights are.
# bf16 keeps 8 bits: rounding costs 1.3e-6 of a mean square, at worst four times that, and it is done
# to both factors and to the result; in attention to the shares of the values as well. Chunks of a delta net
# are five products that follow each other, and what they leave in the state has the same error.
# int8 keeps 7 bits of the largest number of a row.
_BF16 = {
    "linear": 2e-5, "head": 2e-5, "per_head": 2e-5, "moe": 6e-5, "attention": 3e-5, "delta_net": 6e-5
}  # fmt: skip
FLOORS: Mapping[str, Mapping[str, float]] = {
    "": {},
    "bf16": _BF16,
    "int8": _BF16 | {"linear": 3e-4, "head": 3e-4, "moe": 1.2e-3},
}
TOKENS = (1, 2, 5, 17, 64)
# Those whose weights are matrices, of any type. The others have vectors, matrices of heads, or none.
MATRICES = ("linear", "head", "embed", "positions", "moe")


ELSEWHERE = "elsewhere"  # where the router of a mixture looks


def variant_of(attrs: Attrs, inputs: int) -> tuple[str, ...]:
    """In what an op is another computation than others of its kind."""
    return attrs.variant + ((ELSEWHERE,) if isinstance(attrs, Moe) and inputs > 1 else ())


@dataclass(frozen=True, slots=True)
class Company:
    """The sequences of a pass: tokens seen before, tokens now, how many of the last ones are wanted."""

    parts: tuple[tuple[int, int, int], ...]
    forked: bool = False  # the sequences are forks of one parent, whose blocks are scattered

    def __str__(self) -> str:
        return "+".join(f"{now}@{before}w{wanted}" for before, now, wanted in self.parts) + "f" * self.forked


def single(tokens: int) -> Company:
    return Company(((0, tokens, tokens),))


# Wanted rows of several sequences, all of them and none.
SOME_WANTED = (Company(((100, 3, 1), (7, 2, 2), (0, 4, 1))), single(3), Company(((20, 5, 0),)))


@dataclass(frozen=True, slots=True)
class OpCase:
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

    @property
    def quant(self) -> str:
        """The type that it is about: of its matrix (of the experts' first), or of the KV rows, or none."""
        if self.kind in MATRICES:
            return self.weights[1 if self.kind == "moe" else 0][2]
        return self.kv_type if self.kind == "attention" else ""

    @property
    def variant(self) -> tuple[str, ...]:
        """In what it is another computation than usual."""
        return variant_of(self.attrs, len(self.widths))

    def of_types(self, types: Sequence[str]) -> OpCase | None:
        """The same op with weights of other types; None where a row of such a type cannot be so long."""
        if any(cols % by_name(t).block for (_, cols, _), t in zip(self.weights, types, strict=True)):
            return None
        weights = tuple((r, c, t) for (r, c, _), t in zip(self.weights, types, strict=True))
        return replace(self, weights=weights, limit=limit_of(self.kind, types, self.limit))


def limit_of(kind: str, types: Sequence[str], other: float) -> float:
    """What products of weights of these types may cost; `other` is for ops that have none."""
    if kind in ("linear", "head", "per_head"):
        return QUANT_LIMITS[types[0]]
    # The errors of three products meet, and fewer numbers average them.
    return 4 * max(QUANT_LIMITS[t] for t in types[1:MIXTURE]) if kind == "moe" else other


def _products() -> Iterator[OpCase]:
    for quant, limit in QUANT_LIMITS.items():
        for n in TOKENS:
            # 96 rows are a multiple of every interleaving; 100 are of none.
            for rows in (96, 100):
                yield OpCase(
                    "linear", (256,), rows, single(n), limit, weights=((rows, 256, quant),), note=f"{rows}"
                )
        yield OpCase("head", (256,), 320, single(3), limit, weights=((320, 256, quant),))
        yield OpCase("embed", (), 256, single(7), EXACT, weights=((50, 256, quant),))
    for quant in ("Q4_0", "Q4_1", "Q8_0"):  # a row that is a single block
        shape = ((96, 32, quant),)
        yield OpCase("linear", (32,), 96, single(40), QUANT_LIMITS[quant], weights=shape, note="one block")
    for kind in ("linear", "head"):
        for bias, limit in (("F32", EXACT), ("BF16", EXACT), ("Q8_0", EXACT)):
            shapes = ((64, 256, "F32"), (1, 64, bias))
            for n in (1, 5):
                yield OpCase(kind, (256,), 64, single(n), limit, weights=shapes, note="bias")
    for offset in (0, 2):
        for quant in ("F32", "F16", "Q4_0"):
            for company in SOME_WANTED:
                table = ((130, 256, quant),)
                yield OpCase("positions", (), 256, company, EXACT, Positions(offset), table, note=f"{offset}")


def _products_of_heads() -> Iterator[OpCase]:
    """Matrices of single heads, with and without what they leave of one."""
    for quant in ("F32", "F16", "BF16", "Q4_0", "Q8_0"):
        for n in TOKENS:
            for note, attrs, left in (
                ("all", PerHead(3), 0),
                ("passed", PerHead(3, passed=True), 32),
                ("dropped", PerHead(3, 16), 16),
            ):
                passed = left if attrs.passed else 0
                yield OpCase(
                    "per_head", (3 * (64 + left),), 3 * (40 + passed), single(n), QUANT_LIMITS[quant], attrs,
                    ((3 * 40, 64, quant),), note=note,
                )  # fmt: skip
    wide = ((2 * 40, 256, "Q4_K"),)
    for company in SOME_WANTED:
        yield OpCase(
            "per_head", (576,), 144, company, QUANT_LIMITS["Q4_K"], PerHead(2, passed=True), wide, "wanted"
        )


def _small_ops() -> Iterator[OpCase]:
    for n in TOKENS:
        yield OpCase("rms_norm", (96,), 96, single(n), EXACT, RmsNorm(1e-5), ((1, 96, "F32"),))
        yield OpCase("add", (96, 96), 96, single(n), EXACT)
        yield OpCase("concat", (96, 32), 128, single(n), EXACT)
        yield OpCase("concat", (8, 1, 64), 73, single(n), EXACT, note="three")
        for first in (0, 1):
            yield OpCase("every_second", (192,), 96, single(n), EXACT, EverySecond(3, first), note=f"{first}")
        yield OpCase("every_second", (34,), 17, single(n), EXACT, EverySecond(1, 1), note="one")
        yield OpCase("swiglu", (96, 96), 96, single(n), 1e-6)
        yield OpCase("sigmoid_gate", (96, 96), 96, single(n), EXACT)
        yield OpCase("sigmoid_gate", (1, 96), 96, single(n), EXACT, note="one")
        yield OpCase("multiply", (96, 96), 96, single(n), EXACT)
        yield OpCase("relu", (96,), 96, single(n), EXACT)
        yield OpCase("scale", (96,), 96, single(n), EXACT, Scale(1.7))
        yield OpCase("scale", (96,), 96, single(n), EXACT, Scale(1.0), ((1, 1, "F32"),), note="weight")
        yield OpCase("grow", (96,), 96, single(n), EXACT, Grow(0.1, 3))
        yield OpCase("softcap", (96,), 96, single(n), 1e-8, Softcap(0.8))
        # ggml looks the tanh form up in a table of float16.
        for exact, limit in ((True, 1e-8), (False, 1e-6)):
            note = "exact" if exact else "tanh"
            yield OpCase("gelu", (96,), 96, single(n), limit, Gelu(exact), note=note)
            yield OpCase("geglu", (96, 96), 96, single(n), limit, Gelu(exact), note=note)
    yield OpCase("rms_norm", (64,), 64, single(3), HALF, RmsNorm(1e-6), ((1, 64, "F16"),))
    for company in SOME_WANTED:
        norms = {"offset": (RmsNorm(1e-6, 1.0), 96), "heads": (RmsNorm(1e-6, 0.0, 3), 32)}
        norms["both"] = (RmsNorm(1e-6, 1.0, 6), 16)
        for note, (attrs, n) in norms.items():
            yield OpCase("rms_norm", (96,), 96, company, EXACT, attrs, ((1, n, "F32"),), "wanted", note=note)
        for n_weights in range(3):
            vectors = ((1, 96, "F32"),) * n_weights
            yield OpCase("layer_norm", (96,), 96, company, EXACT, LayerNorm(1e-5), vectors, "wanted")
    yield OpCase("grow", (96,), 96, Company(((100, 3, 3), (7, 2, 1))), EXACT, Grow(0.3, 2), note="two")
    yield OpCase("grow", (96,), 96, Company(((100, 9, 2),)), EXACT, Grow(0.3, 4), (), "wanted", note="wanted")
    for wanted in (1, 4, 9):
        yield OpCase("select", (64,), 64, Company(((0, 9, wanted),)), EXACT)


def _ropes() -> Iterator[OpCase]:
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
            yield OpCase("rope", (128,), 128, company, 1e-8, attrs, note=note)
    yield OpCase("rope", (128,), 128, single(4), 1e-8, plain, ((1, 16, "F32"),), note="factors")


def _mixtures() -> Iterator[OpCase]:
    """The router stays float32, as in every GGUF file: with rounded scores other experts would be right."""
    types = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
    usual = Moe(8, 2, 256, normalise=True)
    routings = {
        "16x4": Moe(16, 4, 256, False, 2.5),
        "4x1": Moe(4, 1, 256, False),
        "5x4n": Moe(5, 4, 256, True, 0.5),
    }
    for quant in types:
        for company in (*(single(n) for n in (1, 2, 17, 64)), *SOME_WANTED):
            yield _mixture(usual, 256, quant, quant, company, "8x2n")
        for note, attrs in routings.items():
            for company in (single(3), SOME_WANTED[0]):
                yield _mixture(attrs, 256, quant, quant, company, note)
    # Shares: the whole router, and the weights of some experts.
    for note, attrs in {
        "first": Moe(8, 2, 256, True, held=3),
        "middle": Moe(8, 3, 256, False, 2.5, first=3, held=2),
        "last": Moe(8, 2, 256, True, first=7, held=1),
    }.items():
        for company in (single(1), single(17), SOME_WANTED[0]):
            for quant in ("F32", "Q4_0"):
                yield _mixture(attrs, 256, quant, quant, company, note)
    # Shares with all weights, which leave the part of some experts to others; of all that a row chose, maybe.
    for note, attrs in {
        "without-some": Moe(8, 2, 256, True, without=(1, 2, 6)),
        "without-half": Moe(8, 4, 256, False, 2.5, without=(0, 1, 5, 6)),
        "without-any": Moe(4, 1, 256, True, without=(0, 1, 2, 3)),
    }.items():
        for company in (single(1), single(17), SOME_WANTED[0]):
            for quant in ("F32", "Q4_0", "Q4_K"):
                yield _mixture(attrs, 256, quant, quant, company, note)
    for note, attrs in _other_mixtures(256).items():
        for company in (single(1), single(17), SOME_WANTED[0]):
            for quant in ("F32", "Q4_0", "MXFP4"):
                yield _mixture(attrs, 256, quant, quant, company, note)
        for share, part in _shares(attrs).items():
            for quant in ("F32", "Q4_0"):
                yield _mixture(part, 256, quant, quant, single(5), f"{note}-{share}")
    for company in (single(1), single(17), SOME_WANTED[0]):
        for quant in ("F32", "Q4_0"):
            yield _mixture(usual, 256, quant, quant, company, "8x2n-looks-elsewhere", inputs=2)
    for company in (single(1), single(17)):
        # Rows that no interleaving divides; one expert, which is a matrix of two dimensions; all experts.
        yield _mixture(Moe(4, 2, 100, True), 36, "F32", "F16", company, "odd")
        yield _mixture(Moe(4, 2, 96, False), 32, "Q4_0", "Q8_0", company, "odd")
        yield _mixture(Moe(1, 1, 64, False), 64, "Q4_0", "Q4_0", company, "one")
        yield _mixture(Moe(6, 6, 64, True), 64, "Q4_0", "Q4_1", company, "all")
    for quant in QUANT_LIMITS:
        if quant not in types:
            yield next(c for c in small_mixtures((quant, quant)) if c.company == single(5))


def _other_mixtures(n_ff: int) -> Mapping[str, Moe]:
    """Other ways to choose experts, and to go through them."""
    usual = Moe(8, 2, n_ff, normalise=True)
    grouped = replace(usual, n_used=3, groups=4, groups_used=2, more=("choice_bias",))
    biases: tuple[MoreWeight, ...] = ("gate_bias", "up_bias", "down_bias")
    return {
        "clamped": replace(usual, activation="clamped", more=("router_bias", *biases)),
        "gelu": replace(usual, activation="gelu", more=("expert_scale",)),
        "sigmoid": replace(usual, scores="sigmoid", scale=2.5, more=("choice_bias",)),
        "sigmoid-plain": replace(usual, scores="sigmoid", normalise=False),
        "choice": replace(usual, more=("choice_bias",)),
        "groups": replace(grouped, scores="sigmoid", scale=2.5),
        "groups-best": replace(grouped, group_best=1, normalise=False, more=()),
    }


def _shares(whole: Moe) -> Mapping[str, Moe]:
    """One with some of the experts, and one with all that leaves some to others."""
    return {"some": replace(whole, first=1, held=2), "without": replace(whole, without=(1, 2))}


def small_mixtures(types: Sequence[str], variant: Sequence[str] = ()) -> Iterator[OpCase]:
    """So small that they take milliseconds: a mixture of this variant, and shares of it. `types`: of gate, up
    and down, or of the first two and of the last."""
    n = max(64, *(by_name(t).block for t in types))
    known = {"4x2n": Moe(4, 2, n, normalise=True), **_other_mixtures(n)}
    inputs = 1 + (ELSEWHERE in variant)
    for note, whole in known.items():
        if variant_of(whole, inputs) != tuple(variant):
            continue
        for company in (single(1), single(5), SOME_WANTED[0]):
            yield _mixture(whole, n, types[0], types[-1], company, note, inputs)
        for share, attrs in _shares(whole).items():
            for company in (single(1), single(5)):
                yield _mixture(attrs, n, types[0], types[-1], company, f"{note}-{share}", inputs)


def _mixture(
    a: Moe, width: int, inner: str, down: str, company: Company, note: str, inputs: int = 1
) -> OpCase:
    weights: tuple[tuple[int, int, str], ...] = (
        (a.n_experts, width, "F32"),
        (a.matrices * a.n_ff, width, inner),
        (a.matrices * a.n_ff, width, inner),
        (a.matrices * width, a.n_ff, down),
    )
    each = {"gate_bias": a.n_ff, "up_bias": a.n_ff, "down_bias": width}
    more = [(a.n_experts, 1) if name in BY_ROUTER else (a.matrices, each[name]) for name in a.more]
    weights += tuple((*shape, "F32") for shape in more)
    limit = limit_of("moe", ("F32", inner, down), 0.0)
    if a.activation == "gelu":  # which ggml looks up in a table of float16
        limit = max(limit, 1e-6)
    return OpCase("moe", (width,) * inputs, width, company, limit, a, weights, "wanted", note=note)


def _attentions() -> Iterator[OpCase]:
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
        # Enough rows in some of the sequences that kernels take several at a time.
        Company(((20, 40, 40), (70, 1, 1), (31, 8, 8))),
        Company(((20, 64, 50), (70, 1, 1), (31, 40, 20))),
        Company(((40, 40, 40), (40, 20, 20)), forked=True),
    )
    for note, (n_heads, n_kv, dim) in heads.items():
        attrs = Attention(0, n_heads, n_kv, dim, dim**-0.5)
        for company in companies:
            yield from _attention(attrs, company, note)
    for window in (1, 40):
        attrs = Attention(0, 4, 2, 32, 0.2, window)
        for company in (
            *(single(n) for n in TOKENS),
            Company(((600, 1, 1),)),  # the window has moved
            Company(((600, 20, 20),)),
            Company(((33, 20, 2),)),  # it begins to move within these
            Company(((0, 5, 5), (300, 1, 1), (31, 64, 64))),
            Company(((0, 5, 0), (300, 1, 1), (31, 64, 3))),
            Company(((200, 5, 0),)),
            Company(((40, 3, 3), (140, 1, 1)), forked=True),
        ):
            yield from _attention(attrs, company, f"window{window}")
    for window in (0, 40):
        # A share: its columns of the KV rows lie behind those of other heads.
        attrs = Attention(0, 4, 2, 32, 0.2, window, first=3)
        for company in (
            single(1),
            single(17),
            Company(((600, 1, 1),)),
            Company(((0, 5, 0), (70, 1, 1), (31, 8, 3))),
            Company(((40, 3, 3), (40, 1, 1)), forked=True),
        ):
            yield from _attention(attrs, company, f"share-window{window}")
    for window in (0, 40):
        attrs = Attention(0, 4, 2, 32, 2.0, window, softcap=1.5)
        for company in (single(1), Company(((100, 1, 1),)), single(64), Company(((100, 5, 5), (7, 40, 2)))):
            yield from _attention(attrs, company, f"softcap-window{window}")
    yield from _attentions_with_sinks()
    yield from _borrowed()
    yield from _latent()


def _attentions_with_sinks() -> Iterator[OpCase]:
    sinks = ((1, 4, "F32"),)
    for window in (0, 40):
        attrs = Attention(0, 4, 2, 32, 0.2, window)
        for company in (
            *(single(n) for n in TOKENS),
            Company(((600, 1, 1),)),
            Company(((0, 5, 0), (300, 1, 1), (31, 64, 3))),
            Company(((40, 40, 40), (40, 20, 20)), forked=True),
        ):
            yield from _attention(attrs, company, f"sinks-window{window}", sinks)
    share = Attention(0, 4, 2, 32, 0.2, first=3)
    yield from _attention(share, Company(((31, 8, 8),)), "sinks-share", sinks)


def _borrowed() -> Iterator[OpCase]:
    """Attention that only reads what another layer has written."""
    for window, note in ((0, "borrows"), (40, "borrows-window40")):
        attrs = Attention(0, 4, 2, 32, 0.2, window, sharing="borrows")
        for company in (
            Company(((40, 1, 1),)),
            Company(((600, 1, 1),)),
            Company(((33, 20, 2),)),
            Company(((20, 64, 50), (70, 1, 1), (31, 40, 20))),
            Company(((40, 3, 3), (40, 1, 1)), forked=True),
            Company(((20, 5, 0),)),
        ):
            yield from _attention(attrs, company, note)


def _latent() -> Iterator[OpCase]:
    """Attention whose keys are the values as well: many heads look at one."""
    companies = (
        *(single(n) for n in TOKENS),
        Company(((600, 1, 1),)),
        Company(((20, 64, 50), (70, 1, 1), (31, 40, 20))),
        Company(((40, 3, 3), (40, 1, 1)), forked=True),
        Company(((20, 5, 0),)),
    )
    for note, n_heads, dim in (("latent", 5, 96), ("latent-wide", 16, 576)):
        attrs = Attention(0, n_heads, 1, dim, dim**-0.5, sharing="latent")
        for company in companies:
            yield from _attention(attrs, company, note)


def _attention(
    attrs: Attention, company: Company, note: str, weights: tuple[tuple[int, int, str], ...] = ()
) -> Iterator[OpCase]:
    """With KV rows of each type."""
    width, kv_width = attrs.n_heads * attrs.head_dim, attrs.n_kv_heads * attrs.head_dim
    rows = "tokens" if all(now == wanted for _, now, wanted in company.parts) else "wanted"
    for kv_type, limit in (("F32", 1e-8), ("F16", HALF), ("Q8_0", ROUNDED)):
        widths = (width, kv_width, kv_width)[: attrs.n_inputs]
        yield OpCase("attention", widths, width, company, limit, attrs, weights, rows, kv_type, note)


def _recurrences() -> Iterator[OpCase]:
    """Layers with states of a fixed size."""
    companies = (
        *(single(n) for n in TOKENS),
        Company(((40, 1, 1),)),
        Company(((33, 20, 20),)),
        Company(((2, 1, 1), (1, 2, 2), (3, 3, 3))),  # less than a convolution looks back, and as much
        Company(((0, 5, 5), (70, 1, 1), (31, 8, 8))),
        Company(((0, 5, 0), (70, 40, 40), (31, 8, 3))),  # every row is computed, whatever is wanted
        Company(((40, 3, 3), (40, 1, 1)), forked=True),
    )
    for note, kernel, width in (("4", 4, 96), ("3-odd", 3, 37), ("2", 2, 16)):
        attrs, weights = CausalConv(0, kernel, width), ((width, kernel, "F32"),)
        for company in companies:
            yield OpCase("causal_conv", (width,), width, company, EXACT, attrs, weights, note=note)
            biased = (*weights, (width, 1, "F32"))
            yield OpCase("causal_conv", (width,), width, company, EXACT, attrs, biased, note=f"{note}-bias")
            linear = replace(attrs, silu=False)
            yield OpCase(
                "causal_conv", (width,), width, company, EXACT, linear, weights, note=f"{note}-linear"
            )
    for note, net in {
        "alike": DeltaNet(0, 4, 4, 32, 32, log=True),
        "neighbours": DeltaNet(0, 2, 4, 32, 16, log=True),
        "tiled": DeltaNet(0, 2, 4, 16, 32, tiled=True, log=True),
        "odd": DeltaNet(0, 1, 3, 32, 20, log=True, eps=1e-5),
        "wide": DeltaNet(0, 1, 2, 128, 128, log=True),
        "mamba": DeltaNet(0, 2, 4, 32, 16, log=True, mamba=True),
        "mamba-wide": DeltaNet(0, 1, 4, 128, 64, log=True, mamba=True),
        "mamba-odd": DeltaNet(0, 1, 3, 32, 20, log=True, mamba=True),
    }.items():
        for company in companies:
            yield _delta_net(net, company, note)
    # Rows of a state that are filled up: only of sequences that begin, as the filling stays zeros.
    padded = DeltaNet(0, 1, 3, 24, 16, log=True)
    for company in (*(single(n) for n in TOKENS), Company(((0, 2, 2), (0, 5, 1)))):
        yield _delta_net(padded, company, "padded")
    # Some decays are positive then, as weights are random: what is known grows, so there are few tokens.
    for company in (single(1), single(2), single(5), Company(((7, 2, 2), (0, 3, 3)))):
        yield _delta_net(DeltaNet(0, 2, 4, 32, 32), company, "no-log")


def _delta_net(a: DeltaNet, company: Company, note: str) -> OpCase:
    widths, vector = (2 * a.k_width + a.v_width, a.v_heads, a.v_heads), (1, a.v_heads, "F32")
    weights = (vector,) * (3 if a.mamba else 2)
    return OpCase("delta_net", widths, a.v_width, company, EXACT, a, weights, note=note)


CASES = [
    *_products(),
    *_products_of_heads(),
    *_small_ops(),
    *_ropes(),
    *_mixtures(),
    *_attentions(),
    *_recurrences(),
]
