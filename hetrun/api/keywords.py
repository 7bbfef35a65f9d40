"""Keywords of `LLM` and of its answers, for type checkers and editors.

Generated from the table of options and from `SamplingParams`: python -m tests.tools.keywords
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict


class ModelOptions(TypedDict, total=False):
    """Options of `LLM`, as on the command line; None: not given."""

    offline: bool | None
    """Do not download anything."""
    ctx: int | None
    """Context length: the most tokens that prompt and answer can have together (default: the model's own, if
    that fits; hetrun plan shows it)."""
    ram: int | str | None
    """Memory limit, such as 2GiB or 50% (default: the free memory minus a reserve)."""
    vram: int | str | None
    """Memory limit on each GPU, such as 8GiB; 0: use no GPU (default: the free memory minus a reserve)."""
    threads: int | None
    """Number of threads that compute (default: planned)."""
    backends: Sequence[str] | str | None
    """Use only this backend (default: all)."""
    precision: Literal["exact", "fast"] | None
    """Exact: the closest results; fast: 8-bit activations, as in llama.cpp (default: exact with AMX, else
    fast)."""
    spec: str | None
    """Speculation: guess several tokens and verify them together. lookup: guesses from the text itself; mtp:
    from a block in the model's file; draft:MODEL: from a smaller model; auto: if that is faster and gives
    the same text; off."""
    ubatch: int | None
    """Most tokens in one step (default: planned)."""
    kv_type: Literal["f16", "q8_0", "f32"] | None
    """Type of the keys and values that are kept: f16, q8_0 or f32."""
    deterministic: bool | None
    """Give the same tokens, whatever else is running."""
    planner: str | None
    """How plans are made: measured, static (in a fixed order), or by a package's planner."""
    streaming: (
        Literal[
            "balanced",
            "unbalanced",
            "attention-first",
            "ffn-first",
            "none",
            "synchronous",
            "mmap",
            "off",
        ]
        | None
    )
    """For experiments: how weights that do not fit are read from disk: balanced, unbalanced, attention-
    first, ffn-first, none, synchronous, mmap, off."""
    plan: str | PathLike[str] | None
    """A file with a saved plan (default: none)."""
    mmproj: str | None
    """The file with the model's vision tower, with which it reads pictures; none: it reads none (default:
    the one that lies beside the model)."""
    prompt_cache: str | PathLike[str] | None
    """A file that keeps computed prompts for the next run (default: none)."""
    context_shift: bool | None
    """When a text fills the context, drop its oldest tokens and go on."""
    max_tokens: int | None
    """Most tokens in an answer; -1: no limit (default: until the model stops)."""
    temperature: float | None
    """Sampling temperature; 0: always the likeliest token (default: what the model recommends, or 0.8)."""
    seed: int | None
    """Random seed (default: random; hetrun run -v shows it)."""
    chat_template: str | PathLike[str] | None
    """A file with a Jinja template, the template itself, or a name such as chatml or llama3 (default: the
    model's own)."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Variables for the chat template, as JSON such as {"enable_thinking": false} (default: none)."""
    reasoning: Literal["auto", "on", "off"] | None
    """Reasoning before answers, if the model's template can switch it: on, off, or auto (default: auto: as
    the template does by itself)."""
    tool_parser: (
        Literal[
            "auto",
            "none",
            "hermes",
            "qwen3_coder",
            "glm",
            "llama3",
            "mistral",
            "mistral_named",
            "deepseek",
            "deepseek_v31",
            "phi",
            "gemma4",
            "harmony",
            "kimi_k2",
            "lfm2",
            "minimax_m2",
            "muse",
            "seed_oss",
            "generic",
        ]
        | None
    )
    """Format of the model's tool calls: auto, none, or the name of one (default: auto: from the chat
    template)."""
    reasoning_format: Literal["auto", "none", "deepseek"] | None
    """Where reasoning goes: none (into the text), deepseek (into reasoning_content), or auto."""
    no_server: bool | None
    """Load the model here, even if one of your servers has loaded it."""


class SamplingKeywords(TypedDict, total=False):
    """Fields of `SamplingParams`, given by themselves."""

    max_tokens: int | None
    """Most tokens of the answer; None: until the model ends or the context is full. 0 with prompt_logprobs:
    only the log-probabilities of the prompt."""
    temperature: float | None
    """0 always takes the most likely token, more draws more freely; None: what the model's file says, else
    0.8."""
    top_k: int
    """Draw from the N most likely tokens; 0 or -1: off."""
    top_p: float
    """Draw from the most likely tokens that together have this probability; 1: off."""
    min_p: float
    """Leave out tokens less likely than this share of the most likely one; 0: off."""
    typical_p: float
    """Draw from the tokens closest to the expected surprise, up to this probability; 1: off."""
    top_n_sigma: float
    """Leave out logits further than this many standard deviations below the best; 0 or less: off."""
    xtc_probability: float
    """How often to leave out the most likely tokens where several are likely; 0: off."""
    xtc_threshold: float
    """The probability from which xtc counts a token as likely; above 0.5: off."""
    min_keep: int
    """Tokens that top_p, min_p, typical_p and xtc leave at least."""
    dynatemp_range: float
    """How far the temperature moves with the entropy of the distribution; 0: off."""
    dynatemp_exponent: float
    """How the entropy becomes a temperature within that range."""
    repeat_penalty: float
    """Divides the logits of tokens that were used; 1: off."""
    frequency_penalty: float
    """Lowers a token's logit each time that it was used; 0: off."""
    presence_penalty: float
    """Lowers a token's logit once it was used; 0: off."""
    repeat_last_n: int
    """Tokens that the three penalties look back; 0: off; -1: the whole context."""
    dry_multiplier: float
    """Strength of the penalty for repeated sequences; 0: off."""
    dry_base: float
    """By how much that penalty grows with each repeated token; below 1: off."""
    dry_allowed_length: int
    """The longest repetition without that penalty."""
    dry_penalty_last_n: int
    """Tokens that it looks back; 0: off; -1: the whole context."""
    dry_sequence_breakers: Sequence[str]
    """Texts at which a repetition ends."""
    mirostat: int
    """1 or 2: that version of Mirostat instead of all samplers but the temperature; 0: off."""
    mirostat_tau: float
    """The surprise that Mirostat aims at."""
    mirostat_eta: float
    """How fast Mirostat learns."""
    samplers: Sequence[str]
    """The order in which samplers run; one that is not named is off."""
    seed: int | None
    """Seed of the random draws; None or -1: a random one."""
    stop: Sequence[str]
    """A text or several that end the answer, and are no part of it."""
    ignore_eos: bool
    """Go on when the model would end."""
    logprobs: int | None
    """N: the log-probability of each token, and of the n most likely ones there."""
    prompt_logprobs: int | None
    """The same for every token of the prompt but the first."""
    logit_bias: Mapping[int, float]
    """Numbers to be added to logits, by token id; -inf forbids a token."""
    json_schema: Mapping[str, Any] | bool | str | None
    """A JSON schema that the answer follows, as a dictionary or JSON."""
    regex: str | None
    """A regular expression that the answer matches."""
    grammar: str | None
    """A grammar that the answer follows: GBNF as llama.cpp has it, or Lark."""
    more: Mapping[str, float]
    """Parameters of samplers that packages brought, by name."""
