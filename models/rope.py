"""Rotary embeddings: what GGUF says of them, and what Hugging Face says, in GGUF's words.

GGUF has keys for linear and YaRN scaling, as llama.cpp computes them, and tensors of factors, which divide
the angles of each pair. Everything else that Hugging Face knows becomes such factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hetrun.errors import OptionError
from hetrun.graph import GraphBuilder, ModelMeta, Weight, constant
from hetrun.graph.ops import Rope
from hetrun.loader.hf_mapping import Config, Setting

FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
TRUNCATE = "rope.truncate"  # a setting of ours: YaRN's ramp begins and ends at whole pairs
BETA_FAST, BETA_SLOW = 32.0, 1.0  # the paper's, and llama.cpp's whatever a file says
LARGEST = 1e6  # a factor, or a reciprocal, from which kernels in float32 make numbers
NEVER = 1e30  # divides an angle to nothing: a pair that does not turn

Vector = npt.NDArray[np.float64]


# --- GGUF


def read_rope(meta: ModelMeta, n_heads: int, head_dim: int, interleaved: bool) -> Rope:
    """Rope for the query heads; scaling as llama.cpp reads it."""
    kind = meta.get_str("rope.scaling.type", "linear")
    factor = meta.get_float("rope.scaling.factor", meta.get_float("rope.scale_linear", 1.0))
    factor = factor if factor > 0 and kind != "none" else 1.0
    attn_factor = meta.get_float("rope.scaling.attn_factor", 1.0)
    # llama.cpp's converter writes transformers' factor here, and llama.cpp forgets it.
    if kind == "yarn" and (total := meta.get_float("rope.scaling.yarn_attn_factor", 0.0)):
        attn_factor *= total / yarn_magnitude(factor)
    return Rope(
        n_heads=n_heads,
        head_dim=head_dim,
        n_rot=meta.get_int("rope.dimension_count", head_dim, 2, head_dim),
        base=meta.get_float("rope.freq_base", 10000.0),
        interleaved=interleaved,
        freq_scale=1 / factor,
        ext_factor=1.0 if kind == "yarn" else 0.0,
        attn_factor=attn_factor,
        beta_fast=meta.get_float("rope.scaling.yarn_beta_fast", BETA_FAST),
        beta_slow=meta.get_float("rope.scaling.yarn_beta_slow", BETA_SLOW),
        n_ctx_orig=meta.get_int(
            "rope.scaling.original_context_length", meta.require_int("context_length", 1, 1 << 31), 1, 1 << 31
        ),
    )


def yarn_magnitude(factor: float) -> float:
    """By what ggml multiplies cos and sin of its own accord."""
    return 1 + 0.1 * math.log(factor)


def read_sections(b: GraphBuilder, meta: ModelMeta, rope: Rope) -> tuple[int, ...]:
    """How many pairs turn by time, height and width, in a model whose tokens may have a position in each."""
    found = meta.get_numbers("rope.dimension_sections", 4) or (rope.n_rot // 2, 0, 0, 0)
    good = all(n >= 0 and n == int(n) for n in found)
    b.check(good, f"rope.dimension_sections is {', '.join(f'{n:g}' for n in found)}")
    b.check(not (b.spatial and b.has(FACTORS)), "it has factors of rope beside sections of it")
    return tuple(int(n) for n in found[:3])


def others_still(sections: Sequence[int], pairs: int) -> list[npt.NDArray[np.float32]]:
    """For time, height and width the factors by which only their own pairs turn. Pairs take turns: every
    third one is height's, and the one after it width's, as far as those have any."""
    axis = np.zeros(pairs, np.int64)
    for which in (1, 2):
        axis[which : 3 * sections[which] : 3] = which
    return [np.where(axis == which, 1, NEVER).astype(np.float32) for which in range(3)]


def neutral(rope: Rope) -> float:
    """The attn_factor with which a rope only turns."""
    return 1 / yarn_magnitude(1 / rope.freq_scale) if rope.ext_factor else 1.0


def check_rope(b: GraphBuilder, meta: ModelMeta, rope: Rope) -> None:
    """What kernels would end the process for, and what the model does not say about longer sequences."""
    kind = meta.get_str("rope.scaling.type", "linear")
    b.check(kind in ("none", "linear", "yarn", "longrope"), f"rope.scaling.type is {kind[:40]!r}")
    b.check(rope.n_rot % 2 == 0, f"rope.dimension_count is {rope.n_rot}, which is odd")
    b.check(rope.base > (1 if rope.ext_factor else 0), f"rope.freq_base is {rope.base}")
    slowest = min(rope.beta_fast, rope.beta_slow)
    b.check(slowest > 0, f"a beta among the rope.scaling keys is {slowest}")
    sane = 1 / LARGEST <= rope.freq_scale <= LARGEST
    b.check(sane, f"rope.scaling.factor gives a scale of {rope.freq_scale:g}")
    b.check(abs(rope.attn_factor) <= LARGEST, f"rope.scaling.attn_factor is {rope.attn_factor:g}")
    trained = meta.require_int("context_length", 1, 1 << 31)
    if meta.get_bool("rope.dynamic", False) and (b.context or 0) > trained:
        raise OptionError(
            f"--ctx {b.context}: beyond {trained} tokens this model's rope changes with every token "
            f"(dynamic scaling), which hetrun does not do; use --ctx {trained} or less"
        )


def factors(b: GraphBuilder, meta: ModelMeta, rope: Rope) -> str:
    """The tensor of factors for sequences as long as they may become; it may be missing.

    Keys stay in the cache as they were turned, so that the choice is made once.
    """
    if not b.has(LONG_FACTORS):
        return FACTORS
    context = b.context or meta.require_int("context_length", 1, 1 << 31)
    return LONG_FACTORS if context > rope.n_ctx_orig else SHORT_FACTORS


# --- Hugging Face


@dataclass(frozen=True, slots=True)
class HfRope:
    """A rope of Hugging Face in GGUF's words."""

    settings: Mapping[str, Setting] = field(default_factory=dict)
    weights: Mapping[str, Weight] = field(default_factory=dict)
    layout: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """What every kind of scaling stands on."""

    scaling: Config
    base: float
    n_rot: int
    head_dim: int
    context: int
    original_context: int

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0; one that is missing or 0 takes the default."""
        found = self.scaling.get_float(key, 0.0) or default
        if found is None or found <= 0:
            self.scaling.refuse(f"the rope settings lack {key}, or it is not positive")
        if not 1 / LARGEST <= found <= LARGEST:
            self.scaling.refuse(f"{key} is {found:g}, with which no position means anything")
        return found

    @property
    def wavelengths(self) -> Vector:
        """The tokens that each pair needs for one turn."""
        return 2 * math.pi * self.base ** (np.arange(0, self.n_rot, 2) / self.n_rot)


def rope_settings(c: Config) -> Config:
    """The table of rope's settings, as transformers 4 or 5 calls it."""
    return c.section("rope_scaling" if c.has("rope_scaling") else "rope_parameters")


def rope_from_hf(config: Config, head_dim: int, base: float = 10000.0, partial: bool = False,
                 kinds: Kinds | None = None) -> HfRope:  # fmt: skip
    """The rope that all layers share; the last three are what the code of the model's type knows."""
    scaling = rope_settings(config)
    if nested := [t for t in ("full_attention", "sliding_attention", "chunked_attention") if scaling.has(t)]:
        config.refuse(
            f"rope_parameters has settings of its own for {nested[0]}, which its type does not know"
        )
    return scaling_from_hf(config, scaling, head_dim, base, partial, kinds or KINDS)


def scaling_from_hf(config: Config, scaling: Config, head_dim: int, base: float, partial: bool,
                    kinds: Kinds) -> HfRope:  # fmt: skip
    """One table of rope settings, of all layers or of those of one kind."""
    kind = scaling.get_str("rope_type", scaling.get_str("type", "default"))
    if (write := kinds.get(kind)) is None:
        config.refuse(f"its rope is scaled by {kind[:40]!r}; hetrun knows {', '.join(kinds)} in its type")
    for key in ("extrapolation_factor", "attn_factor", "mrope_section"):
        if scaling.has(key):
            config.refuse(f"its rope settings have {key}, which hetrun does not know for {kind}")
    share = scaling.get_float("partial_rotary_factor", config.get_float("partial_rotary_factor", 1.0))
    if not 0 < share <= 1:
        config.refuse(f"partial_rotary_factor must be above 0 and at most 1, it is {share}")
    if share != 1 and not partial and kind != "proportional":
        config.refuse(f"partial_rotary_factor is {share}; models of its type turn all columns of a head")
    context = config.require_int("max_position_embeddings", 1, 1 << 31)
    own = scaling.get_int("original_max_position_embeddings", context, 2, 1 << 31)
    asked = RopeSettings(
        scaling=scaling,
        base=scaling.get_float("rope_theta", config.get_float("rope_theta", base)),
        n_rot=head_dim if kind == "proportional" else int(head_dim * share),
        head_dim=head_dim,
        context=context,
        original_context=config.get_int("original_max_position_embeddings", own, 2, 1 << 31),
    )
    if asked.base <= 1 or asked.n_rot < 2 or asked.n_rot % 2:
        config.refuse(f"a rope of base {asked.base} over {asked.n_rot} columns makes no sense")
    basics: dict[str, Setting] = {"rope.freq_base": asked.base, "rope.dimension_count": asked.n_rot}
    found = write(asked)
    return HfRope(basics | dict(found.settings), found.weights, found.layout)


def default(asked: RopeSettings) -> HfRope:
    """As in the paper."""
    return HfRope()


def linear(asked: RopeSettings) -> HfRope:
    """All angles divided by the factor."""
    return HfRope({"rope.scaling.type": "linear", "rope.scaling.factor": asked.positive("factor")})


def dynamic(asked: RopeSettings) -> HfRope:
    """A base that grows with the sequence, once it is longer than those of training."""
    return HfRope(layout={"rope.dynamic": True})


def yarn(asked: RopeSettings) -> HfRope:
    """Fast pairs keep their angle, slow ones are divided by the factor, with a ramp between."""
    factor = asked.positive("factor", asked.context / asked.original_context)
    fast, slow = asked.positive("beta_fast", BETA_FAST), asked.positive("beta_slow", BETA_SLOW)
    truncate = asked.scaling.get_bool("truncate", True)
    if truncate and (fast, slow) == (BETA_FAST, BETA_SLOW):
        return replace(yarn_settings(asked), layout={})
    ramp = Ramp(asked.n_rot, asked.base, asked.original_context, fast, slow)
    return HfRope(
        {
            "rope.scaling.type": "none",
            "rope.scaling.attn_factor": yarn_attention_factor(asked.scaling, factor),
        },
        {FACTORS: ramp.factors(factor, truncate)},
    )


def yarn_settings(asked: RopeSettings) -> HfRope:
    """The same as GGUF's keys say it. Where the borders of the ramp are rounded, the layout says so."""
    factor = asked.positive("factor", asked.context / asked.original_context)
    magnitude = yarn_attention_factor(asked.scaling, factor)
    settings: dict[str, Setting] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": asked.original_context,
    }
    for key, usual in (("beta_fast", BETA_FAST), ("beta_slow", BETA_SLOW)):
        if (found := asked.positive(key, usual)) != usual:
            settings[f"rope.scaling.yarn_{key}"] = found
    if not math.isclose(magnitude, yarn_magnitude(factor)):
        settings["rope.scaling.attn_factor"] = magnitude / yarn_magnitude(factor)
    return HfRope(settings, layout={TRUNCATE: True} if asked.scaling.get_bool("truncate", True) else {})


def smooth_yarn(rope: Rope) -> tuple[Rope, Weight]:
    """A rope of YaRN's whose ramp's borders are not rounded, as ggml would: a plain one and its factors."""
    factor = 1 / rope.freq_scale
    ramp = Ramp(rope.n_rot, rope.base, rope.n_ctx_orig, rope.beta_fast, rope.beta_slow)
    magnitude = rope.attn_factor * yarn_magnitude(factor)
    plain = replace(rope, freq_scale=1.0, ext_factor=0.0, attn_factor=magnitude)
    return plain, ramp.factors(factor, truncate=False)


def yarn_attention_factor(scaling: Config, factor: float) -> float:
    """By what cos and sin are multiplied."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if scaling.has("attention_factor"):
        return scaling.get_float("attention_factor", 1.0)
    all_dim, own = scaling.get_float("mscale_all_dim", 0.0), scaling.get_float("mscale", 0.0)
    return magnitude(own) / magnitude(all_dim) if own and all_dim else magnitude(1.0)


@dataclass(frozen=True, slots=True)
class Ramp:
    """YaRN's way from pairs that keep their angle to those that are divided by its factor."""

    n_rot: int
    base: float
    original_context: int
    fast: float  # turns within the original context, from which on pairs keep their angle
    slow: float  # and up to which they are divided

    def factors(self, factor: float, truncate: bool) -> Weight:
        """What divides each pair's angle; `truncate`: the ramp begins and ends at whole pairs."""
        low, high = self._pair(self.fast), self._pair(self.slow)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.n_rot - 1)
        ramp = (np.arange(self.n_rot // 2) - low) / (high - low or 0.001)
        keep: Vector = 1 - np.clip(ramp, 0, 1)
        return constant(FACTORS, (1 / (keep + (1 - keep) / factor)).astype(np.float32))

    def _pair(self, turns: float) -> float:
        """The pair, as a fraction of one, that turns so often within the original context."""
        tokens = self.original_context / (turns * 2 * math.pi)
        return self.n_rot * math.log(tokens) / (2 * math.log(self.base))


def llama3(asked: RopeSettings) -> HfRope:
    """Slow pairs are divided by the factor, fast ones are not, and those between by something between."""
    factor, low = asked.positive("factor"), asked.positive("low_freq_factor")
    high = asked.positive("high_freq_factor")
    if high <= low:
        asked.scaling.refuse(f"high_freq_factor is {high}, which is not above low_freq_factor {low}")
    turns = asked.original_context / asked.wavelengths
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    found = 1 / ((1 - smooth) / factor + smooth)
    return HfRope(weights={FACTORS: constant(FACTORS, found.astype(np.float32))})


def longrope(asked: RopeSettings) -> HfRope:
    """A factor for each pair: some for sequences as in training, others for all that are longer."""
    factor = asked.positive("factor", asked.context / asked.original_context)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(asked.original_context)) if factor > 1 else 1.0
    weights = {}
    for name, key in ((LONG_FACTORS, "long_factor"), (SHORT_FACTORS, "short_factor")):
        numbers = asked.scaling.get_numbers(key, asked.n_rot // 2)
        if numbers is None or min(numbers) <= 0:
            asked.scaling.refuse(f"the rope settings lack {key}, or not all of it is positive")
        weights[name] = constant(name, np.array(numbers, np.float32))
    return HfRope(
        {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": asked.original_context,
            "rope.scaling.attn_factor": asked.scaling.get_float("attention_factor", magnitude),
        },
        weights,
    )


def proportional(asked: RopeSettings) -> HfRope:
    """Only the first pairs turn, as fast as if all did."""
    share = asked.scaling.get_float("partial_rotary_factor", 1.0)
    found = np.full(asked.head_dim // 2, NEVER)
    found[: int(share * asked.head_dim // 2)] = asked.positive("factor", 1.0)
    return HfRope(weights={FACTORS: constant(FACTORS, found.astype(np.float32))})


Kinds = Mapping[str, Callable[[RopeSettings], HfRope]]

KINDS: Kinds = {
    "default": default,
    "linear": linear,
    "dynamic": dynamic,
    "yarn": yarn,
    "llama3": llama3,
    "longrope": longrope,
    "proportional": proportional,
}
