"""Which type each tensor gets: llama.cpp's own mixtures, so that its users find what they know.

The rules and their order are those of src/llama-quant.cpp; tests compare every recipe with what it does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetrun.errors import OptionError
from hetrun.graph.quant import QuantType, by_name

Shape = tuple[int, ...]  # rows first


@dataclass(frozen=True, slots=True)
class Recipe:
    """A name people type, its number in `general.file_type`, and the type that most tensors get."""

    name: str
    number: int
    bulk: str

    @property
    def mixes(self) -> bool:
        """Whether some tensors get other types; the plain float types are used as they are."""
        return self.bulk not in ("F32", "F16", "BF16")


RECIPES = {
    r.name: r
    for r in (
        Recipe("F32", 0, "F32"),
        Recipe("F16", 1, "F16"),
        Recipe("BF16", 32, "BF16"),
        Recipe("Q8_0", 7, "Q8_0"),
        Recipe("Q6_K", 18, "Q6_K"),
        Recipe("Q5_K_M", 17, "Q5_K"),
        Recipe("Q5_K_S", 16, "Q5_K"),
        Recipe("Q5_1", 9, "Q5_1"),
        Recipe("Q5_0", 8, "Q5_0"),
        Recipe("Q4_K_M", 15, "Q4_K"),
        Recipe("Q4_K_S", 14, "Q4_K"),
        Recipe("Q4_1", 3, "Q4_1"),
        Recipe("Q4_0", 2, "Q4_0"),
        Recipe("IQ4_NL", 25, "IQ4_NL"),
        Recipe("IQ4_XS", 30, "IQ4_XS"),
        Recipe("MXFP4_MOE", 38, "MXFP4"),
        Recipe("Q3_K_L", 13, "Q3_K"),
        Recipe("Q3_K_M", 12, "Q3_K"),
        Recipe("Q3_K_S", 11, "Q3_K"),
        Recipe("Q2_K", 10, "Q2_K"),
    )
}
ALIASES = {"Q5_K": "Q5_K_M", "Q4_K": "Q4_K_M", "Q3_K": "Q3_K_M"}


def by_option(name: str) -> Recipe:
    """The recipe that the user asked for."""
    upper = name.upper()
    if (found := RECIPES.get(ALIASES.get(upper, upper))) is None:
        raise OptionError(f"-q: there is no type {name!r}; there are {', '.join(RECIPES).lower()}")
    return found


@dataclass(frozen=True, slots=True)
class ModelForm:
    """What the mixtures look at besides a tensor's name and shape."""

    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_experts: int

    @property
    def gqa(self) -> int:
        """Query heads for each KV head."""
        return self.n_heads // max(1, self.n_kv_heads)

    @property
    def is_70b(self) -> bool:
        """What llama.cpp takes for a 70B, whose V is eight times smaller than its Q."""
        grouped = self.architecture == "llama" and self.n_heads != self.n_kv_heads
        return self.n_layers == 80 and (grouped or self.architecture in ("qwen2", "olmo", "deci"))


# Tensors that stay as they are, by a part of their name: norms, routers, and what is small and sensitive in
# architectures that only come here as GGUF files.
_KEPT = (
    "_norm.weight ffn_gate_inp.weight ffn_gate_tid2eid.weight altup laurel per_layer_model_proj ssm_conv1d "
    "shortconv.conv.weight indexer.k_proj.weight indexer.q_proj.weight time_mix_first.weight "
    "time_mix_w0.weight time_mix_w1.weight time_mix_w2.weight time_mix_v0.weight time_mix_v1.weight "
    "time_mix_v2.weight "
    "time_mix_a0.weight time_mix_a1.weight time_mix_a2.weight time_mix_g1.weight time_mix_g2.weight "
    "time_mix_decay_w1.weight time_mix_decay_w2.weight time_mix_lerp_fused.weight attn_rel_b.weight "
    ".position_embd sam.pos_embd sam.neck. sam.net_ .rel_pos .patch_embd .patch_merger a.rvq.codebook "
    "mm.a.code_embd"
).split()
_KEPT_WHOLE = ("position_embd.weight", "token_types.weight")

_KINDS = (
    "attn_qkv.weight",
    "attn_kv_b.weight",
    "attn_v.weight",
    "attn_k.weight",
    "attn_output.weight",
    "ffn_down",
)
_VALUES = ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")  # what llama.cpp handles like attn_v
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")

# What a type becomes whose blocks of 256 do not fit into a row.
_SMALLER = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}


def can_change(name: str, shape: Shape) -> bool:
    """Whether a tensor may lose precision: matrices that are no norm and no router."""
    return (
        len(shape) >= 2
        and name.endswith("weight")
        and name not in _KEPT_WHOLE
        and not any(part in name for part in _KEPT)
    )


def choose(
    recipe: Recipe, form: ModelForm, tensors: Mapping[str, tuple[Shape, QuantType]]
) -> dict[str, QuantType]:
    """The type of each tensor, by name; what must keep its precision becomes F32."""
    mixture = _Mixture(recipe, form, list(tensors))
    chosen = {}
    for name in sorted(tensors, key=_place):  # llama.cpp counts tensors layer by layer
        shape, now = tensors[name]
        if not can_change(name, shape):
            chosen[name] = by_name("F32") if now.name in ("F16", "BF16") else now
        elif recipe.mixes:
            chosen[name] = _that_fits(mixture.type_of(name, shape), shape[-1])
        else:
            chosen[name] = by_name(recipe.bulk)
    return chosen


def _place(name: str) -> tuple[int, str]:
    return _layer(name), name


def _layer(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _that_fits(name: str, cols: int) -> QuantType:
    """The type, or the one that llama.cpp takes instead for rows that are not whole blocks."""
    quant = by_name(name)
    if cols % quant.block:
        quant = by_name(_SMALLER.get(name, name))
    return by_name("F16") if cols % quant.block else quant


def use_more_bits(layer: int, n_layers: int) -> bool:
    """The layers that _M mixtures are generous to: the first and last eighths, and every third between."""
    first = n_layers // 8
    return layer < first or layer >= 7 * n_layers // 8 or (layer - first) % 3 == 2


class _Mixture:
    """llama.cpp's rules; they count the tensors of a kind that came before."""

    def __init__(self, recipe: Recipe, form: ModelForm, names: Sequence[str]) -> None:
        self._recipe, self._form = recipe, form
        self._tied = "output.weight" not in names
        self._n_values = sum(_kind(name) in _VALUES for name in names)
        self._values = self._downs = 0

    def type_of(self, name: str, shape: Shape) -> str:
        """The type before it is checked against the length of the rows."""
        recipe = self._recipe.name
        if name == "output.weight" or (self._tied and name in _EMBEDDINGS):
            return self._output(shape)
        if recipe == "MXFP4_MOE":
            return "MXFP4" if len(shape) > 2 and shape[0] > 1 else "Q8_0"
        if name in _EMBEDDINGS:
            return self._recipe.bulk
        kind = _kind(name)
        if kind in _VALUES:
            return self._value(self._take_value())
        if kind == "attn_k.weight" and self._form.n_experts == 8:
            return "Q8_0"
        if kind == "ffn_down":
            return self._down(self._take_down(name))
        if kind == "attn_output.weight":
            return self._attention_output()
        return self._recipe.bulk

    def _output(self, shape: Shape) -> str:
        """The output matrix, which may be the embedding too, is never below Q6_K."""
        bulk = by_name(self._recipe.bulk)
        if self._recipe.name in ("MXFP4_MOE", "Q8_0") or self._form.architecture == "falcon":
            return "Q8_0"
        return "Q8_0" if shape[-1] % bulk.block else "Q6_K"

    def _take_value(self) -> int:
        self._values += 1
        return self._values - 1

    def _take_down(self, name: str) -> int:
        self._downs += 1
        return _layer(name) if self._form.n_experts > 1 else self._downs - 1

    def _value(self, i: int) -> str:
        """V, which is small where heads are grouped, and which every later product sees."""
        bulk, grouped = self._recipe.bulk, self._form.gqa >= 4
        found = bulk
        match self._recipe.name:
            case "Q2_K":
                found = "Q4_K" if grouped else "Q3_K"
            case "Q3_K_M":
                found = "Q5_K" if i < 2 else "Q4_K"
            case "Q3_K_L":
                found = "Q5_K"
            case "IQ4_NL" | "IQ4_XS":
                found = "Q5_K" if grouped else bulk
            case "Q4_K_M" | "Q5_K_M":
                found = "Q6_K" if use_more_bits(i, self._n_values) else bulk
            case "Q4_K_S":
                found = "Q5_K" if i < 4 else bulk
        if self._form.is_70b and found in ("Q3_K", "Q4_K"):
            found = "Q5_K"
        return "Q8_0" if self._form.n_experts == 8 else found

    def _down(self, i: int) -> str:
        """The last product of a block, whose errors go straight into the residual stream."""
        bulk, n = self._recipe.bulk, self._form.n_layers
        more, falcon = use_more_bits(i, n), self._form.architecture == "falcon"
        match self._recipe.name:
            case "Q2_K":
                return "Q3_K"
            case "Q3_K_M":
                return "Q5_K" if i < n // 16 else "Q4_K" if more or not falcon else "Q3_K"
            case "Q3_K_L":
                return "Q4_K" if falcon else "Q5_K"
            case "Q4_K_M" if falcon:
                return "Q6_K" if i < n // 16 else "Q5_K" if more else "Q4_K"
            case "Q4_K_M" | "Q5_K_M":
                return "Q6_K" if more else bulk
            case "IQ4_NL" | "IQ4_XS":
                return "Q5_K" if i < n // 8 else bulk
            case "Q4_K_S":
                return "Q5_K" if i < n // 8 and not falcon else bulk
        return bulk

    def _attention_output(self) -> str:
        recipe, bulk = self._recipe.name, self._recipe.bulk
        if self._form.architecture == "falcon":
            return "Q4_K" if recipe == "Q3_K_L" else bulk
        if self._form.n_experts == 8:
            small = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M")
            return "Q5_K" if recipe in small else bulk
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(recipe, bulk)


def _kind(name: str) -> str:
    return next((kind for kind in _KINDS if kind in name), "")
