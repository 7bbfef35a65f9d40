"""Values that no sane model has: of numbers, names, templates, bytes, and of whole settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from random import Random

from tests.hostile.trees import Nested, Node, Raw, Table

INTS = (
    *(0, 1, -1, 2, 3, 7, 31, 255, 256, 65535, 65536, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1),
    *(
        1 << 32,
        1 << 40,
        1 << 53,
        (1 << 62) + 1,
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
        -(1 << 31),
        -(1 << 63),
    ),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e-8, 1e8, 3.4e38, 1e300, math.inf, -math.inf, math.nan)
JSON_ONLY: tuple[Node, ...] = (
    *(
        Raw("1e999"),
        Raw("-1e999"),
        Raw("NaN"),
        Raw("-Infinity"),
        Raw("1E+2"),
        Raw("1" * 400),
        Raw("0." + "9" * 400),
    ),
    *(Raw("nul"), Raw('"\\ud800"'), Raw("[1,]"), Raw("{}{}"), Nested(60), Nested(1000), Nested(100_000)),
)
STRINGS = (
    *("", " ", "x", "\0", "a\0b", "\n", "\x1b[31m", "\ud800", "\udcff", "\U0001f600", "é" * 40, "x" * 70_000),
    *("../../../etc/passwd", "/etc/passwd", "config.json", "model.safetensors", "true", "null", "0", "-1"),
    *("llama", "gpt2", "bert", "t5", "rwkv", "none", "no_vocab", "plamo2", "blocks", "phi3", "gemma3", "opt"),
    *("linear", "yarn", "longrope", "llama3", "dynamic", "default", "F64", "U8", "F4", "bpe", "Unigram"),
    *("<0x-1>", "<0x100>", "<0xZZ>", "WordPiece", "wordlevel"),
)  # fmt: skip
TEMPLATES = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(10**9) %}x{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages | map('upper') | list | tojson }}{{ (1,) * 99999 | string * 9999 }}",
    "{{ raise_exception('no') }}",
    "{{ messages[99].content }}{{ 1 // 0 }}",
    "{{ '%999999999s' | format('x') }}{{ 'x'.center(999999999) }}{{ 'x' | indent(999999999) }}",
    "{% if",
    "{{ " + "(" * 500 + ")" * 500 + " }}",
    "{{ [messages] | pprint }}{{ cycler }}{{ joiner }}{{ self }}{{ caller }}{{ dict }}",
    "{% include '/etc/passwd' %}{% import 'os' as os %}",
)
BYTES = (
    b"",
    b"\0",
    b"\xff",
    b"\x00\x7c",
    b"\x00\xfc",
    b"\x80\x7f",
    b"\x00\x00\x80\x7f",
    b"\xff\xff\x7f\x7f",
    b"\x80",
)

MORE_PAIRS: Mapping[str, Node] = {
    "general.alignment": 64,
    "general.sampling.temp": 0.5,
    "split.count": 2,
    "split.no": 1,
    "split.tensors.count": 3,
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.precompiled_charsmap": (0, 4, 0, 0, 1, 2, 3, 4),
    "tokenizer.ggml.eot_token_id": 5,
    "tokenizer.ggml.eog_token_ids": (1, 400),
    "tokenizer.ggml.suppress_tokens": (1, -1),
    "tokenizer.ggml.fim_pre_token_id": 3,
    "tokenizer.ggml.padding_token_id": 400,
    "tokenizer.ggml.add_sep_token": True,
    "tokenizer.ggml.remove_extra_whitespaces": True,
    "tokenizer.ggml.normalizer.lowercase": True,
    "tokenizer.huggingface.json": "{}",
    "tokenizer.chat_templates": ("tool_use",),
    "tokenizer.chat_template.tool_use": "x",
    "tokenizer.rwkv.world": "1 'x' 1",
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": (True, False),
    "attention.key_length": 32,
    "attention.value_length": 16,
    "attention.scale": 0.0,
    "attention.causal": False,
    "rope.scaling.type": "longrope",
    "rope.scaling.factor": 8.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 0.5,
    "rope.scaling.yarn_beta_fast": 4.0,
    "rope.scaling.original_context_length": 1,
    "rope.scale_linear": 0.0,
    "rope.dynamic": True,
    "rope.freq_base_swa": 0.0,
    "expert_count": 4,
    "expert_used_count": 5,
    "expert_weights_scale": 0.5,
    "final_logit_softcapping": 1e-30,
    "norm.offset": 1e30,
    "vocab_size": 7,
    "leading_dense_block_count": 1,
    "decoder_sparse_step": 0,
}
MORE_SETTINGS: Mapping[str, Node] = {
    "auto_map": Table((("AutoModelForCausalLM", "evil.Model"),)),
    "trust_remote_code": True,
    "quantization_config": Table((("quant_method", "awq"),)),
    "text_config": Table((("hidden_size", 8),)),
    "rope_scaling": Table((("type", "yarn"), ("factor", 0))),
    "rope_parameters": Table((("rope_type", "longrope"), ("short_factor", ()), ("long_factor", (0,)))),
    "head_dim": 0,
    "partial_rotary_factor": 0.001,
    "sliding_window": 1,
    "layer_types": ("sliding_attention",),
    "max_window_layers": -1,
    "use_sliding_window": True,
    "mlp_only_layers": (10**30,),
    "decoder_sparse_step": 0,
    "original_max_position_embeddings": 2,
    "tie_word_embeddings": True,
    "vocab_size": 1,
    "eos_token_id": (10**30, -1),
    "bos_token_id": "1",
    "temperature": -1,
    "add_prefix_space": True,
    "tokenizer_class": "GPT2Tokenizer",
    "added_tokens_decoder": Table((("x", 1),)),
    "chat_template": (),
}


def absurd(random: Random, value: Node, keys: tuple[str, ...]) -> Node:
    """Something in place of a value: mostly of its own type and near it, else anything."""
    near = _near(value)
    if (isinstance(value, str) and "{%" in value) or keys[-2:-1] == ("tokenizer.chat_template",):
        near = (*near, *TEMPLATES)
    if "chat_template.jinja" in keys or "merges.txt" in keys:
        near = tuple(v.encode("utf-8", "surrogatepass") for v in (*TEMPLATES, *STRINGS))
    if "data" in keys[-1:]:
        near = BYTES
    anything: tuple[Node, ...] = (
        *INTS,
        *FLOATS,
        *STRINGS,
        True,
        False,
        None,
        (),
        (0,),
        Table(()),
        (1.5, "x", None),
    )
    json_only = () if any(k.endswith(".gguf") for k in keys) else JSON_ONLY
    return random.choice(near if random.random() < 0.7 else (*near, *anything, *json_only))


def _near(value: Node) -> tuple[Node, ...]:
    """What differs from a value by little, or keeps its type."""
    if isinstance(value, bool):
        return (not value, int(value))
    if isinstance(value, int):
        return (
            value + 1,
            value - 1,
            value * 2,
            value // 2,
            -value,
            value * 3,
            float(value % (1 << 60)),
            *INTS,
        )
    if isinstance(value, float):
        return (value + 1, -value, value * 1e3, value / 1e3, value * 1e20, *FLOATS)
    if isinstance(value, str):
        return (value[:-1], value + "x", value * 2, value.upper(), f"../{value}", value.encode(), *STRINGS)
    if isinstance(value, bytes):
        return (value[:-1], value[::-1], value * 2, value[1:], *BYTES)
    if isinstance(value, tuple):
        some = value[: len(value) // 2]
        return (
            (),
            value[:1],
            value[:-1],
            value + value[:1],
            some,
            value * 3,
            value[::-1],
            (value,),
            *BYTES[:1],
        )
    if isinstance(value, Table):
        return (
            Table((), value.form),
            replace(value, items=value.items[::-1]),
            value.items and value.items[0][1],
        )
    return (0, 1, "x", (), Table(()))
