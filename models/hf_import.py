"""From Hugging Face's words to GGUF's, for the decoders that llama made common."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hetrun.graph import Weight, stack
from hetrun.loader.hf_mapping import Change, Config, HfModel, Interleave, Setting, same_bytes
from hetrun.models.rope import HfRope

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NEXTN = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
}
NEXTN_WORDS = {
    "nextn.embed_tokens": ("embed_tokens", "token_embd.weight"),
    "nextn.shared_head_head": ("shared_head.head", "output.weight"),
}
FREQUENT = 64  # tokens
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}

# What other models' configs ask for, with the value that asks for nothing.
NOT_DONE = {
    "attention_multiplier": 1.0,
    "attn_logit_softcapping": 0.0,
    "clip_qkv": 0.0,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "shared_expert_intermediate_size": 0.0,
}


def head_dim_of(c: Config, default: int = 0) -> int:
    """Columns of a head: the config's own, else the type's default, else what the width divides into."""
    width = c.require_int("hidden_size", 1, 1 << 20)
    n_heads = c.require_int("num_attention_heads", 1, 1 << 14)
    if not (found := c.get_int("head_dim", default or width // n_heads, 1, 1 << 12)):
        c.refuse(f"{n_heads} heads cannot share a hidden_size of {width}")
    return found


def decoder_settings(c: Config, head_dim: int, rope: HfRope) -> dict[str, Setting]:
    """What every such model says; anything asked for that hetrun does not do is refused."""
    refuse_what_is_not_done(c)
    n_heads = c.require_int("num_attention_heads", 1, 1 << 14)
    if not c.has("rms_norm_eps"):
        c.refuse("rms_norm_eps is missing: the model is incomplete")
    return {
        "vocab_size": c.require_int("vocab_size", 1, 1 << 24),
        "context_length": c.require_int("max_position_embeddings", 1, 1 << 31),
        "embedding_length": c.require_int("hidden_size", 1, 1 << 20),
        "block_count": c.require_int("num_hidden_layers", 1, 1 << 12),
        "feed_forward_length": c.require_int("intermediate_size", 1, 1 << 24),
        "attention.head_count": n_heads,
        "attention.head_count_kv": c.get_int("num_key_value_heads", n_heads, 1, n_heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": c.get_float("rms_norm_eps", 1e-6),
        **rope.settings,
    }


def refuse_what_is_not_done(c: Config) -> None:
    """What would give other numbers than the model's own code."""
    if (activation := c.get_str("hidden_act", "silu")) not in ("silu", "swish"):
        c.refuse(f"hidden_act is {activation[:40]!r}; hetrun runs models of its type with silu only")
    for key, nothing in NOT_DONE.items():
        if c.get_float(key, nothing) != nothing:
            c.refuse(
                f"{key} is {c.get_float(key, nothing):g}, which hetrun does not do for models of its type"
            )
    if c.has("no_rope_layers"):
        c.refuse("no_rope_layers leaves rope out in some layers, which hetrun does not do")
    refuse_embedders(c)


def refuse_embedders(c: Config) -> None:
    """A model whose tokens see those behind them."""
    for key, embeds in (("is_causal", False), ("use_bidirectional_attention", True)):
        if c.get_bool(key, not embeds) is embeds:
            c.refuse(f"{key} is {str(embeds).lower()}: this model makes embeddings, it does not write text")


def layer_windows(c: Config, window: int | None, slides: Sequence[bool]) -> dict[str, Setting]:
    """A sliding window for the layers that have one. llama.cpp's graphs of these models ignore it."""
    if not any(slides):
        return {}
    if window is None:
        c.refuse("layer_types has sliding_attention, but there is no sliding_window")
    out: dict[str, Setting] = {"attention.sliding_window": window}
    return out if all(slides) else out | {"attention.sliding_window_pattern": tuple(slides)}


def window_of(c: Config, default: int) -> int | None:
    """How many tokens a layer with a window sees; None: the settings say that there is none."""
    return None if c.is_null("sliding_window") else c.get_int("sliding_window", default, 1, 1 << 31)


def qwen_windows(c: Config) -> dict[str, Setting]:
    """Which layers slide: layer_types says it, else all from max_window_layers on."""
    n = c.require_int("num_hidden_layers", 1, 1 << 12)
    window = qwen_window(c)
    first = c.get_int("max_window_layers", 28, 0, 1 << 31) if window else n
    return layer_windows(c, window, sliding_layers(c, n) or [i >= first for i in range(n)])


def sliding_layers(c: Config, n: int) -> list[bool] | None:
    """Which layers slide, as layer_types says it; None where it is missing."""
    types = c.get_strings("layer_types", n)
    if types is None:
        return None
    if others := set(types) - {"sliding_attention", "full_attention"}:
        c.refuse(f"layer_types has {min(others)[:40]!r}; hetrun knows sliding_attention and full_attention")
    return [kind == "sliding_attention" for kind in types]


def qwen_window(c: Config) -> int | None:
    """Qwen's configs have a window that counts only when another setting says so."""
    if not c.get_bool("use_sliding_window", False) or c.is_null("sliding_window"):
        return None
    return c.get_int("sliding_window", 4096, 1, 1 << 31)


@dataclass(frozen=True, slots=True)
class MixtureExtras:
    """What a layer's mixture has beside its router and experts, as Hugging Face calls it; empty: nothing."""

    choice_bias: str
    shared: str = ""


def decoder_weights(
    hf: HfModel, biased: Collection[str] = (), n_experts: int = 0, head_norms: bool = False,
    norms: Mapping[str, str] = NORMS, mixing: MixtureExtras | None = None,
) -> dict[str, Weight]:  # fmt: skip
    """All tensors by GGUF name, each one that the config asks for and no other."""
    c, tensors = hf.config, ImportTensors(hf)
    tensors.take_ends(tied=c.get_bool("tie_word_embeddings", False))
    for i in range(c.require_int("num_hidden_layers", 1, 1 << 12)):
        tensors.take_layer(i, {**norms, **ATTENTION, **(HEAD_NORMS if head_norms else {})}, biased)
        if n_experts and hf.has(f"{tensors.root}layers.{i}.mlp.gate.weight"):
            tensors.take_experts(i, n_experts)
            if mixing:
                tensors.take_mixing(i, mixing)
        else:
            tensors.take_layer(i, FEED_FORWARD, biased)
        tensors.take_predicting(i)
    return tensors.finish()


def predicting_last(hf: HfModel) -> tuple[HfModel, dict[str, Setting]]:
    """A model one of whose layers is the first after its last, which predicts one more token, where it has
    that, and the setting that says so; without those that predict further ones."""
    n = hf.config.require_int("num_hidden_layers", 1, 1 << 12)
    more = any(hf.has(f"{root}layers.{n}.{NEXTN['nextn.eh_proj']}.weight") for root in ("", "model."))
    kept = {}
    for theirs, weight in hf.tensors.items():
        layer = LAYER.match(theirs)
        if not layer or int(layer[1]) < n + more:
            kept[theirs] = weight
    if not more:
        return HfModel(hf.config, kept), {}
    config = hf.config.without("num_hidden_layers").with_defaults({"num_hidden_layers": n + 1})
    return HfModel(config, kept), {"nextn_predict_layers": 1}


def biased(c: Config) -> set[str]:
    """The projections that have a bias, as llama's settings say it."""
    attention = ATTENTION if c.get_bool("attention_bias", False) else {}
    return {*attention, *(FEED_FORWARD if c.get_bool("mlp_bias", False) else {})}


def interleaves(c: Config, weights: Collection[str]) -> dict[str, Change]:
    """What `hetrun convert` does where GGUF has beside each other what rope turns together."""
    heads = {"attn_q": c.require_int("num_attention_heads", 1, 1 << 14)}
    heads["attn_k"] = c.get_int("num_key_value_heads", heads["attn_q"], 1, heads["attn_q"])
    return {w: Interleave(heads[part]) for w in weights if (part := w.split(".")[-2]) in heads}


def not_in_gguf(*reasons: tuple[bool, str]) -> dict[str, Setting]:
    """The first reason that is true why llama.cpp could not run a GGUF file of this model, for `convert`."""
    found = next((reason for true, reason in reasons if true), None)
    return {} if found is None else {"gguf.inexpressible": found}


def rope_factors(rope: HfRope, architecture: str) -> tuple[bool, str]:
    """As a reason: most architectures of llama.cpp's take no tensor of factors."""
    said = f"llama.cpp's {architecture} knows no factors of rope, which this model's scaling needs"
    return bool(rope.weights), said


class ImportTensors:
    """The tensors of a model, taken one by one under GGUF's names; in the end none may be left."""

    def __init__(self, hf: HfModel) -> None:
        self._hf = hf
        self._taken: dict[str, Weight] = {}
        # A model that was saved without its head lacks the first part of all names.
        self.root = "" if hf.has("embed_tokens.weight") else "model."
        # Old checkpoints carry rope's frequencies and tables, which their config implies.
        self._left = {name for name in hf.tensors if ".rotary_emb." not in f".{name}"}

    def take(self, ours: str, *theirs: str) -> None:
        """A tensor under GGUF's name; several on top of each other."""
        parts = [self._hf.weight(name) for name in theirs]
        if len({(part.shape, part.quant) for part in parts}) > 1:
            self._hf.config.refuse(f"{theirs[0]} and its siblings differ in shape or type")
        self._left.difference_update(theirs)
        self._taken[ours] = replace(stack(parts), name=ours)

    def use(self, theirs: str) -> Weight:
        """A tensor of which others are made."""
        self._left.discard(theirs)
        return self._hf.weight(theirs)

    def leave(self, theirs: str) -> None:
        """A tensor that the model may have and does not use."""
        self._left.discard(theirs)

    def put(self, ours: str, weight: Weight) -> None:
        """What was made of tensors, under GGUF's name."""
        self._taken[ours] = replace(weight, name=ours)

    def take_ends(self, tied: bool) -> None:
        """What stands before the layers and behind them."""
        self.take_words(f"{self.root}embed_tokens.weight", tied)
        self.take("output_norm.weight", f"{self.root}norm.weight")

    def take_words(self, table: str, tied: bool) -> None:
        """What tokens are read by and what they are told by: tied, that is one matrix under either name.

        Some checkpoints hold it twice; where the two differ, they are not tied whatever the config says.
        """
        hf, head = self._hf, "lm_head.weight"
        if tied and hf.has(head) and not hf.has(table):
            table = head
        self.take("token_embd.weight", table)
        if tied and (not hf.has(head) or same_bytes(hf.weight(table), hf.weight(head))):
            self._left.discard(head)
        else:
            self.take("output.weight", head)

    def take_layer(self, i: int, names: Mapping[str, str], biased: Collection[str]) -> None:
        """Some of a layer's tensors, with biases where they belong."""
        for ours, theirs in names.items():
            for kind in ("weight", "bias") if ours in biased else ("weight",):
                self.take(f"blk.{i}.{ours}.{kind}", f"{self.root}layers.{i}.{theirs}.{kind}")

    def take_experts(self, i: int, n_experts: int) -> None:
        """A layer's router and experts."""
        mlp = f"{self.root}layers.{i}.mlp"
        self.take(f"blk.{i}.ffn_gate_inp.weight", f"{mlp}.gate.weight")
        for ours, theirs in EXPERTS.items():
            each = (f"{mlp}.experts.{e}.{theirs}.weight" for e in range(n_experts))
            self.take(f"blk.{i}.{ours}.weight", *each)

    def take_mixing(self, i: int, mixing: MixtureExtras) -> None:
        """What a layer's mixture has besides."""
        layer = f"{self.root}layers.{i}"
        if self._hf.has(f"{layer}.{mixing.choice_bias}"):
            self.take(f"blk.{i}.exp_probs_b.bias", f"{layer}.{mixing.choice_bias}")
        if mixing.shared and self._hf.has(f"{layer}.{mixing.shared}.gate_proj.weight"):
            parts = ("gate", "up", "down")
            self.take_layer(i, {f"ffn_{p}_shexp": f"{mixing.shared}.{p}_proj" for p in parts}, ())

    def take_predicting(self, i: int) -> None:
        """What a layer has besides that predicts one more token. Its embeddings and its head are most often
        the model's, stored once more."""
        layer = f"{self.root}layers.{i}"
        if not self._hf.has(f"{layer}.{NEXTN['nextn.eh_proj']}.weight"):
            return
        self.take_layer(i, NEXTN, ())
        for ours, (name, models) in NEXTN_WORDS.items():
            if not self._hf.has(theirs := f"{layer}.{name}.weight"):
                continue
            mine, shared = self._hf.weight(theirs), self._taken.get(models, self._taken["token_embd.weight"])
            n = min(FREQUENT, mine.shape[0], shared.shape[0])
            # All of it would be gigabytes; where others than the first differ, some guesses are worse.
            if same_bytes(mine.rows(0, n), shared.rows(0, n)):
                self.leave(theirs)
            else:
                self.take(f"blk.{i}.{ours}.weight", theirs)

    def finish(self) -> dict[str, Weight]:
        """All of them by GGUF name. A tensor that was not asked for would have changed the result."""
        if self._left:
            self._hf.config.refuse(
                f"hetrun does not know what the tensor {min(self._left)} is for in models of its type"
            )
        return self._taken


def experts_apart(hf: HfModel, n_experts: int) -> HfModel:
    """Each expert's matrices by themselves, where transformers 5 saved them as it holds them."""
    out: dict[str, Weight] = {}
    for name, weight in hf.tensors.items():
        mlp, _, kind = name.removesuffix(".weight").rpartition(".experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            out[name] = weight
            continue
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        rows, rest = divmod(weight.shape[0], n_experts * len(names))
        if rest:
            hf.config.refuse(f"the {weight.shape[0]} rows of {name} cannot be shared by {n_experts} experts")
        for at, (e, part) in enumerate((e, part) for e in range(n_experts) for part in names):
            out[f"{mlp}.experts.{e}.{part}.weight"] = weight.rows(at * rows, (at + 1) * rows)
    return HfModel(hf.config, out)
