"""What a model is made of, without loading it: its tensors by type and by layer, and what it takes to run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hetrun.errors import ModelFileError
from hetrun.executor.library.plan import backend_for, needs
from hetrun.executor.loading.memory_estimates import besides, in_parts, work_bytes
from hetrun.graph import kv_shapes, states_of
from hetrun.graph.quant import by_name
from hetrun.loader import expert_names
from hetrun.loader.architectures import build_graph
from hetrun.loader.source import ModelSource
from hetrun.loader.tensor_list import TensorEntry
from hetrun.memory.kv.cache import sequence_bytes
from hetrun.planner.static import LARGEST_UBATCH

KV_TYPES = ("f16", "q8_0")
CONTEXTS = (2048, 8192, 32768)
AT_ONCE = LARGEST_UBATCH  # tokens that come in together: a sliding window needs room for them behind it

PARTS = ("attention", "ffn", "experts", "other")


@dataclass(frozen=True, slots=True)
class TypeSize:
    """All tensors of one type."""

    type: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Bytes of one layer's parts; what is in no layer is all `other`."""

    name: str
    parts: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class KvSummary:
    """Bytes of keys and values by context and type, for one sequence, and of all that is held besides these
    and the weights, as a plan counts it; `note` is how sure that is."""

    kv: Mapping[int, Mapping[str, int]]
    note: str = ""
    besides: int = 0


def by_type(found: Sequence[TensorEntry]) -> list[TypeSize]:
    """The types, the largest first."""
    tensors: dict[str, list[int]] = defaultdict(list)
    for e in found:
        tensors[e.type].append(e.nbytes)
    sizes = (TypeSize(kind, len(nbytes), sum(nbytes)) for kind, nbytes in tensors.items())
    return sorted(sizes, key=lambda size: -size.nbytes)


def by_layer(found: Sequence[TensorEntry]) -> list[LayerSize]:
    """The embedding, the layers in order, the output."""
    parts: dict[str, dict[str, int]] = defaultdict(dict)
    for e in found:
        layer, part = place(e.name)
        parts[layer][part] = parts[layer].get(part, 0) + e.nbytes
    return [LayerSize(name, parts[name]) for name in sorted(parts, key=_order)]


def place(name: str) -> tuple[str, str]:
    """The layer that a tensor belongs to, by its GGUF name, and its part there."""
    found = re.match(r"(blk\.\d+)\.(.*)", name)
    if not found:
        ends = {"output": name.startswith("output"), "embedding": "embd" in name or name.startswith("rope")}
        return next((end for end, fits in ends.items() if fits), "elsewhere"), "other"
    layer, rest = found.groups()
    if "_exps" in rest or "ffn_gate_inp" in rest or expert_names.of_one(name):
        return layer, "experts"
    return layer, "attention" if rest.startswith(("attn", "ssm")) else "ffn" if rest.startswith(
        "ffn"
    ) else "other"


def _order(layer: str) -> tuple[int, int]:
    if layer.startswith("blk."):
        return 1, int(layer[4:])
    return {"embedding": 0, "output": 2}.get(layer, 3), 0


def memory(source: ModelSource) -> KvSummary:
    """What one sequence takes, for contexts up to the one that the model was trained for."""
    trained = source.get_int("context_length", CONTEXTS[0], 1, 1 << 31)
    contexts = [*(c for c in CONTEXTS if c < trained), trained]
    process = sum(in_parts(besides(source.vocabulary_entries)).values())
    try:
        if backend_for(source, None) is None:
            graph = build_graph(source)
            shapes, states = kv_shapes(graph), states_of(graph.ops)
            kinds = {t: by_name(t.upper()) for t in KV_TYPES}
            fits = {t: q for t, q in kinds.items() if not any(s.head_dim % q.block for s in shapes.values())}
            sizes = {t: partial(sequence_bytes, shapes, q, AT_ONCE, states=states) for t, q in fits.items()}
            kv = {c: {t: size(c) for t, size in sizes.items()} for c in contexts}
            return KvSummary(kv, besides=process + work_bytes(graph, AT_ONCE))
        needed = {t: needs(source, t, AT_ONCE) for t in KV_TYPES}
        return KvSummary(
            {c: {t: needed[t].reserved(c, 1) for t in KV_TYPES} for c in contexts},
            "an estimate: hetrun has no architecture of its own for it",
            process + needed[KV_TYPES[0]].per_run,
        )
    except (ModelFileError, ValueError) as e:
        return KvSummary({}, f"cannot be told: {e}")


def who_runs(source: ModelSource) -> str:
    """Whether hetrun has the architecture, or a library runs the model as a whole."""
    try:
        backend = backend_for(source, None)
    except ModelFileError as e:
        return f"nothing here runs it: {e.reason}"
    return "hetrun's own" if backend is None else f"{backend.name} runs it as a whole"
