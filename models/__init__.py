"""One file per model architecture, named as GGUF names it (with _ for -), and what they share.

A file has `name`, `build` (the graph, from settings and weights in GGUF's words) and, where Hugging Face
publishes such models, `from_hf` (what GGUF calls things).
"""

# Hugging Face's model_type -> the file here that reads it.
HF_TYPES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "mistral3": "mistral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "qwen3_5": "qwen35",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "afmoe": "afmoe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "kimi_k2": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5_moe",
    "exaone4": "exaone4",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "hunyuan_v1_moe": "hunyuan_moe",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "minimax_m2": "minimax_m2",
    "muse_glimmer": "muse_glimmer",
    "muse_glimmer_text": "muse_glimmer",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "gpt_oss": "gpt_oss",
    "phi3": "phi3",
    "opt": "opt",
}

# Files here that are no architecture.
SHARED = frozenset(
    (
        *(
            "blocks",
            "decoder",
            "deepseek2_import",
            "gemma4_import",
            "hf_import",
            "hybrid",
            "hybrid_import",
            "mamba2",
            "mixtures",
            "mtp",
        ),
        *("rope", "seeing"),
    )
)
