"""The roofline: what a case demands of a machine, and what no program could exceed there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetrun.executor.library.plan import needs
from hetrun.graph import Graph, Rows, kv_shapes, states_of
from hetrun.graph.ops import Attention, Moe, flops
from hetrun.graph.quant import by_name
from hetrun.loader import expert_names
from hetrun.loader.architectures import build_graph, is_known
from hetrun.loader.open_model import open_model
from hetrun.loader.source import ModelSource
from hetrun.memory.kv.cache import token_bytes
from hetrun.memory.kv.states import state_bytes
from hetrun.system.units import counted, format_bytes
from hetrun.tools.bench.cases import BenchCase
from hetrun.tools.bench.matmul_peak import Peak
from hetrun.tools.bench.memory_bandwidth import MemoryBandwidth


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The experts of one layer, of which each token reads some."""

    nbytes: int
    n: int
    n_used: int

    def read_by(self, tokens: int) -> float:
        """Bytes that `tokens` tokens are expected to read if they choose independently of each other."""
        return self.nbytes * (1 - (1 - self.n_used / self.n) ** tokens)


@dataclass(frozen=True, slots=True)
class ReadBytes:
    """What must be read."""

    weights: int  # each once, whatever the batch; of the embedding only a row
    kv: tuple[tuple[int, int], ...]  # of each layer: bytes of a token, and its window or 0
    experts: tuple[LayerExperts, ...] = ()  # they are not among the weights above
    state: int = 0  # bytes that a step reads and writes of a sequence, however much it has seen

    def weight_bytes(self, tokens: int) -> float:
        """Weights that a step of `tokens` tokens reads; an estimate where there are experts."""
        return self.weights + sum(e.read_by(tokens) for e in self.experts)

    def kv_bytes(self, seen: float) -> float:
        """Keys and values of the tokens that a sequence has seen, and its states; a layer with a window reads
        no more."""
        return self.state + sum(size * min(seen, window or seen) for size, window in self.kv)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What attention of one layer computes."""

    flops: int  # of a token, for each token that it sees
    window: int  # that many at most, unless 0
    rows: Rows

    def per_prompt(self, tokens: int) -> int:
        """Of a whole prompt, whose tokens see each other; of its last layer only the last token counts."""
        most = min(self.window or tokens, tokens)
        if self.rows == "wanted":
            return self.flops * most
        return self.flops * (most * (most + 1) // 2 + (tokens - most) * most)

    def per_step(self, seen: float) -> float:
        """Of one token that sees `seen` others."""
        return self.flops * min(seen, self.window or seen)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Multiplications and additions of a model. Norms and the like are bound by memory and count as none."""

    per_token: int  # in products
    per_wanted: int  # in products, for a token whose logits are asked for
    attention: tuple[LayerAttention, ...]


@dataclass(frozen=True, slots=True)
class RooflineDemand:
    """What one prompt of a case, or one step, takes on any machine."""

    tokens: int  # that it gives
    weight_bytes: float
    kv_bytes: float
    products: float | None  # multiplications and additions; None: this model's graph is unknown
    attention: float | None
    estimated: bool = False  # which experts are read is not known before
    resting: float = 0.0  # bytes of experts that are not read this time, and may be the next

    @property
    def block(self) -> float:
        """All that the next ones may read: it decides whether a cache can hold it."""
        return self.nbytes + self.resting

    @property
    def nbytes(self) -> float:
        """All that must be read, or written for the first time."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class Demands:
    """What a model takes, whatever is measured."""

    traffic: ReadBytes
    arithmetic: Arithmetic | None

    def of(self, case: BenchCase) -> RooflineDemand:
        """For one prompt (in each sequence) or one step in the middle of a case."""
        n, seen = case.batch, _seen(case)
        tokens = n * case.tokens if case.kind == "prefill" else n
        weights, kv = self.traffic.weight_bytes(tokens), n * self.traffic.kv_bytes(seen)
        a, products, attention = self.arithmetic, None, None
        if a and case.kind == "prefill":
            products = float(tokens * a.per_token + n * a.per_wanted)
            attention = float(n * sum(s.per_prompt(case.tokens) for s in a.attention))
        elif a:
            products = float(n * (a.per_token + a.per_wanted))
            attention = n * sum(s.per_step(seen) for s in a.attention)
        experts = self.traffic.experts
        resting = self.traffic.weights + sum(e.nbytes for e in experts) - weights
        return RooflineDemand(tokens, weights, kv, products, attention, bool(experts), resting)


def _seen(case: BenchCase) -> float:
    """Tokens that a sequence holds: at the end of a prompt, or in the middle of an answer."""
    return case.tokens if case.kind == "prefill" else case.prompt + (case.tokens + 1) / 2


def demands(path: Path, kv_type: str) -> Demands:
    """From the file's header."""
    return demands_of(open_model(path), kv_type)


def demands_of(source: ModelSource, kv_type: str) -> Demands:
    """The same of a model whose header has been read."""
    if not is_known(source):
        return Demands(_traffic_of_file(source, kv_type), None)
    graph = build_graph(source)
    return Demands(traffic(graph, kv_type), arithmetic(graph))


def traffic(graph: Graph, kv_type: str) -> ReadBytes:
    """The bytes of a model."""
    quant, experts = by_name(kv_type.upper()), _experts(graph)
    weights = {w: w.nbytes for op in graph.ops if op.kind != "embed" for w in op.weights}
    kv = tuple((token_bytes(shape, quant), shape.window) for shape in kv_shapes(graph).values())
    states = 2 * state_bytes(states_of(graph.ops))
    return ReadBytes(sum(weights.values()) - sum(e.nbytes for e in experts), kv, experts, states)


def arithmetic(graph: Graph) -> Arithmetic:
    """The multiplications of a model."""
    per_row: dict[Rows, int] = {"tokens": 0, "wanted": 0}
    seeing = []
    for op in graph.ops:
        per_row[op.rows] += flops(op.kind, op.attrs, [w.shape for w in op.weights], 1)
        if isinstance(op.attrs, Attention):
            # A query times each key, and each score times a value.
            seeing.append(LayerAttention(4 * op.attrs.n_heads * op.attrs.head_dim, op.attrs.window, op.rows))
    return Arithmetic(per_row["tokens"], per_row["wanted"], tuple(seeing))


def _experts(graph: Graph) -> tuple[LayerExperts, ...]:
    found = ((op.attrs, op.weights[1:]) for op in graph.ops if isinstance(op.attrs, Moe))  # behind the router
    return tuple(LayerExperts(sum(w.nbytes for w in ws), a.n_experts, a.n_used) for a, ws in found)


def _traffic_of_file(source: ModelSource, kv_type: str) -> ReadBytes:
    """For a model that hetrun has no graph of: by the names of its tensors."""
    named = {w.name: w.nbytes for w in source.weights()}
    looked_up = named.get("token_embd.weight", 0) if "output.weight" in named else 0
    n = source.get_int("expert_count", 0, 0, 1 << 16)
    chosen = (size for name, size in named.items() if "_exps." in name or expert_names.of_one(name))
    size = sum(chosen) if n else 0
    experts = (LayerExperts(size, n, source.get_int("expert_used_count", n, 1, n)),) if size else ()
    kv = ((needs(source, kv_type, 1).per_token, 0),)
    return ReadBytes(sum(named.values()) - looked_up - size, kv, experts)


Bound = Literal["memory", "products"]


@dataclass(frozen=True, slots=True)
class Limit:
    """What no program could exceed here, or why that is not known."""

    tok_s: float | None
    why: str
    bytes_per_step: float | None = None
    memory: MemoryBandwidth | None = None
    estimated: bool = False  # which experts a step reads is not known before
    bound: Bound | None = None
    demand: RooflineDemand | None = None
    peak: Peak | None = None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second that memory gives."""
        return self.memory.rate if self.memory else None

    def reached(self, tok_s: float) -> float | None:
        """Which part of it `tok_s` tokens per second are."""
        return tok_s / self.tok_s if self.tok_s else None


def limit_of(case: BenchCase, demand: RooflineDemand, memory: MemoryBandwidth, peak: Peak | None) -> Limit:
    """The longer of two times: to read the bytes, and to multiply.

    For a prompt the second must be known; a step without it is as fast as memory.
    """
    reading = demand.nbytes / memory.rate
    made = None if demand.products is None else demand.products + (demand.attention or 0.0)
    multiplying = None if made is None or peak is None else made / peak.rate
    step = case.kind == "decode"
    per_step = demand.nbytes if step else None
    if multiplying is None and not step:
        why = "no limit is known, because how fast products are made here could not be measured"
        return Limit(None, why, None, memory, demand=demand)
    if multiplying is None or reading >= multiplying:
        tok_s = demand.tokens / reading
        why = f"{_reads(case, demand)} and {memory.text}: at most {tok_s:.0f} tokens/s"
        return Limit(tok_s, why, per_step, memory, demand.estimated, "memory", demand, peak)
    assert peak is not None
    tok_s = demand.tokens / multiplying
    why = f"{_takes(case, demand, peak)}: at most {tok_s:.0f} tokens/s"
    # How many experts multiply does not depend on which they are.
    return Limit(tok_s, why, per_step, memory, False, "products", demand, peak)


def _reads(case: BenchCase, demand: RooflineDemand) -> str:
    some = ", of experts as many as are to be expected" if demand.estimated else ""
    return (
        f"{_what(case)} reads {format_bytes(demand.nbytes)} "
        f"({format_bytes(demand.weight_bytes)} of weights{some}, the rest keys and values)"
    )


def _takes(case: BenchCase, demand: RooflineDemand, peak: Peak) -> str:
    return (
        f"{_what(case)} takes {(demand.products or 0) / 1e9:.2f} GFLOP in products and "
        f"{(demand.attention or 0) / 1e9:.2f} in attention, and {peak.name} multiplies large matrices "
        f"at {peak.rate / 1e9:.0f} GFLOP/s with {counted(peak.threads, 'thread')}"
    )


def _what(case: BenchCase) -> str:
    if case.kind == "decode":
        return "a step"
    return "the prompt" if case.batch == 1 else f"a batch of {case.batch} prompts"
