"""What the parts of a layer take on one device: bytes read, operations, seconds, in closed form.

`D` and `C` of the papers: bytes of weights, keys and values and what goes in and out, and twice the
multiplications. The time on a device is the sum of both at its rates, and a launch for each op; a sum, not
the larger one, because real kernels overlap the two only in part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetrun.graph import Graph, Op, Value
from hetrun.graph.ops import MIXTURE, Attention, DeltaNet, Moe, Stateful, flops
from hetrun.tools.simulate.machine import SimulatedDevice

FLOAT, STATES = 4, 2
DELTA_OPERATIONS = 7  # of each number of a state, for each token
HALF = 2  # bytes of a number in float16 or bfloat16: activations, keys and values

# The parts of a layer that wait for each other, by the last word of a scope; all of one part may run at once.
PARTS: Mapping[str, str] = {
    **{f"attn.{word}": "qkv" for word in ("norm", "q", "k", "v")},
    **{"attn.score": "score", "attn.out": "out"},
    **{f"ffn.{word}": "up" for word in ("norm", "gate", "up")},
    **{"ffn.down": "down", "ffn.exp": "experts"},
}
ORDER = tuple(dict.fromkeys(PARTS.values()))


@dataclass(frozen=True, slots=True)
class StepCase:
    """What one step has to do: `sequences` of `tokens` new ones each, which see `seen` tokens on average.

    `past` tokens of each sequence lie in the KV cache already.
    """

    sequences: int
    tokens: int
    past: int

    @property
    def rows(self) -> int:
        """Tokens of the step."""
        return self.sequences * self.tokens

    @property
    def seen(self) -> float:
        """Tokens that a token sees on average, itself included."""
        return self.past + (self.tokens + 1) / 2


def prefill(sequences: int, prompt: int) -> StepCase:
    """The whole prompts of a batch."""
    return StepCase(sequences, prompt, 0)


def decode(sequences: int, length: int) -> StepCase:
    """One token for each sequence of a batch, all of one length with it."""
    return StepCase(sequences, 1, length - 1)


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Some ops of a layer that are placed as one."""

    name: str
    ops: tuple[Op, ...]
    takes: int  # columns of what it reads of other parts
    gives: int  # columns of what other parts read of it
    weight_bytes: int  # of everything that it holds
    kept: tuple[tuple[int, int], ...]  # columns of keys and values that it keeps of a token, and of how many
    state: int = 0  # numbers that it keeps of a sequence, however long that is

    def kv_bytes(self, sequences: int, length: float) -> float:
        """Keys and values of `sequences` sequences, as far as a window keeps them."""
        total = sum(width * (min(length, window) if window else length) for width, window in self.kept)
        return float((total * HALF + self.state_bytes) * sequences)

    @property
    def state_bytes(self) -> int:
        """What it keeps of a sequence: a step reads one state and writes another."""
        return STATES * FLOAT * self.state


def part_of(name: str, ops: Sequence[Op]) -> LayerPart:
    """A part of these ops, with its sizes."""
    attentions = [op.attrs for op in ops if isinstance(op.attrs, Attention)]
    return LayerPart(
        name,
        tuple(ops),
        *_edges(ops),
        weight_bytes=sum(w.nbytes for op in ops for w in op.weights),
        kept=tuple((kept_width(a), a.window) for a in attentions),
        state=sum(op.attrs.floats for op in ops if isinstance(op.attrs, Stateful)),
    )


def kept_width(a: Attention) -> int:
    """Numbers of a token's keys and values, which may be the same."""
    return (1 if a.sharing == "latent" else 2) * a.n_kv_heads * a.head_dim


@dataclass(frozen=True, slots=True)
class PartWork:
    """What a part does in one case, wherever it runs."""

    weights: float  # bytes that it reads
    past: float  # bytes of keys and values from before the step
    fresh: float  # and of those that the step itself made
    takes: float  # bytes that come in and go out
    gives: float
    products: tuple[tuple[float, float, bool], ...]  # operations, tokens in one product, weights in blocks
    ops: int

    def seconds(self, device: SimulatedDevice) -> float:
        """On one device, everything in its own memory."""
        read = self.weights + self.past + self.fresh + self.takes + self.gives
        compute = sum(c / device.rate(tokens, blocks) for c, tokens, blocks in self.products)
        return read / device.bandwidth + compute


def work(part: LayerPart, case: StepCase) -> PartWork:
    """The closed forms: GQA by the width of keys and values, SwiGLU by its three products."""
    weights, products = 0.0, []
    for op in part.ops:
        rows = case.rows if op.rows == "tokens" else case.sequences
        if isinstance(op.attrs, Attention):
            products.append(_attention(op.attrs, rows, case))
            continue
        if isinstance(op.attrs, DeltaNet):
            products.append((float(DELTA_OPERATIONS * op.attrs.floats * rows), float(case.tokens), False))
        weights += _weights_read(op, rows)
        count = flops(op.kind, op.attrs, [w.shape for w in op.weights], rows)
        if count:
            products.append(
                (
                    float(count),
                    float(rows),
                    op.weights[MIXTURE - 1 if op.kind == "moe" else 0].quant.block > 1,
                )
            )
    rows = case.rows if part.ops[-1].rows == "tokens" else case.sequences
    return PartWork(
        weights=weights,
        past=part.kv_bytes(case.sequences, case.past),
        fresh=part.kv_bytes(case.sequences, case.tokens) - part.state_bytes * case.sequences,
        takes=float(rows * part.takes * HALF),
        gives=float(rows * part.gives * HALF),
        products=tuple(products),
        ops=len(part.ops),
    )


def _attention(a: Attention, rows: int, case: StepCase) -> tuple[float, float, bool]:
    """Scores and values; the heads that share keys are rows of one product."""
    seen = min(case.seen, a.window) if a.window else case.seen
    together = case.tokens * a.n_heads / a.n_kv_heads
    return 4.0 * rows * seen * a.n_heads * a.head_dim, together, False


def _weights_read(op: Op, rows: int) -> float:
    """Bytes; of a table the rows that are looked up, of experts those that some token chose."""
    if op.kind in ("embed", "positions"):
        return float(min(rows, op.weights[0].shape[0]) * op.weights[0].quant.row_bytes(op.out.width))
    if isinstance(op.attrs, Moe):
        router, *experts = op.weights
        chosen = 1 - (1 - op.attrs.n_used / op.attrs.n_experts) ** rows
        return router.nbytes + chosen * sum(w.nbytes for w in experts)
    return float(sum(w.nbytes for w in op.weights))


# --- a graph as layers of parts


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A graph as predictions see it: layers of parts, equal ones the same object, and what is outside."""

    layers: tuple[tuple[LayerPart, ...], ...]
    before: LayerPart
    after: LayerPart
    shared: int  # bytes of the table of words where the output is the same matrix
    width: int  # of the stream between layers

    @property
    def weight_bytes(self) -> int:
        """Of all layers and what stands outside."""
        every = (*self.layers, (self.before, self.after))
        return sum(p.weight_bytes for layer in every for p in layer) - self.shared


def model_of(graph: Graph) -> SimulatedModel:
    """The layers of a graph, in order."""
    scopes: dict[str, list[Op]] = {}
    for op in graph.ops:
        words = op.scope.split(".")
        scopes.setdefault(words[1] if words[0] == "blk" else words[0], []).append(op)
    outside = {name: tuple(scopes.pop(name)) for name in ("embed", "output")}
    seen: dict[object, tuple[LayerPart, ...]] = {}
    layers = []
    for ops in scopes.values():
        parts = parts_of(ops, PARTS)
        layers.append(seen.setdefault(tuple(_facts(p) for p in parts), parts))
    before, after = (part_of(name, ops) for name, ops in outside.items())
    table, output = ({w.name: w.nbytes for op in p.ops for w in op.weights} for p in (before, after))
    shared = sum(output[name] for name in output if name in table)
    return SimulatedModel(tuple(layers), before, after, shared, graph.hidden.width)


def parts_of(ops: Sequence[Op], table: Mapping[str, str]) -> tuple[LayerPart, ...]:
    """Ops of one layer as parts; a scope that the table does not know goes with what stands before it."""
    groups: dict[str, list[Op]] = {}
    last = next(iter(table.values()))
    for op in ops:
        last = table.get(".".join(op.scope.split(".")[2:]), last)
        groups.setdefault(last, []).append(op)
    return tuple(part_of(name, group) for name, group in groups.items())


def _edges(ops: Sequence[Op]) -> tuple[int, int]:
    """Columns that come from outside, and those that may be read outside."""
    made = {op.out for op in ops}
    read = {v for op in ops for v in op.inputs}
    takes: set[Value] = read - made
    gives = made - read or {ops[-1].out}
    return sum(v.width for v in takes), sum(v.width for v in gives)


def _facts(part: LayerPart) -> object:
    """What the cost of a part depends on; layers that agree in it are one."""
    ops = []
    for op in part.ops:
        a = op.attrs
        shape = (a.n_heads, a.n_kv_heads, a.head_dim, a.window) if isinstance(a, Attention) else None
        ops.append((op.kind, op.rows, shape, tuple((w.shape, w.quant.name) for w in op.weights)))
    return part.name, part.takes, part.gives, tuple(ops)
