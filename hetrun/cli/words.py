"""Words of other programs, and what hetrun calls the same: aliases that are taken, sentences for the rest.

An alias means exactly what ours means. Every other word of llama.cpp and Ollama is answered by one sentence
with ours: a suggestion by letters alone ("--n-predict: did you mean --strict?") is worse than none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

# Our option -> names that other programs have for it, with the same meaning.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("--n-predict", "--predict"),
    "ctx": ("--ctx-size", "--max-model-len"),
    "temperature": ("--temperature",),
    "threads": ("-t",),
    "ubatch": ("-ub", "--ubatch-size"),
    "system": ("-sys", "--system-prompt"),
    "chat_template": ("--chat-template-file",),
    "reasoning": ("-rea",),
    "mmproj": ("-mm",),
    "aliases": ("--served-model-name",),
    "media_path": ("--allowed-local-media-path",),
    "media_domains": ("--allowed-media-domains",),
    "cors_origins": ("--cors-origins",),
    "json_schema": ("-jf", "--json-schema-file"),
    "grammar": ("--grammar-file",),
}

# --- options

_GPU = "--backend cuda uses NVIDIA GPUs, and --vram says how much of their memory: layers follow from it"
_NO_GPU = "leave it out, or give --vram 0: no GPU is used then"
_EXPERTS = "experts that a GPU has no room for are computed by the CPU without an option; see --vram"
_CPUS = "which cores run what is measured; --threads says how many"
_KV = "--kv-type f16, q8_0 or f32 is the type of keys and values"
_ALWAYS = "leave it out: hetrun always does that"
_MEMORY = "leave it out: --ram says how much memory is taken, and what does not fit is read from disk"
_TEMPLATE = (
    "leave it out: the model's own chat template is used (--chat-template FILE: another one; run --raw: none)"
)
_REASONING = "--reasoning off answers without reasoning, if the model's template can; there is no budget"
_AUDIO = "hetrun reads texts and pictures; it takes no audio"
_LORA = "hetrun loads no adapters: merge it into the model first, then: hetrun convert"
_HUB = "-m hf:user/repo:Q4_K_M is a model of Hugging Face's hub"
_DRAFT = "--spec draft:MODEL lets a small model guess"
_OF_THE_FILE = "leave it out: it is taken from the model's file"
_SHIFT = "hetrun does not forget the beginning of a conversation: -c is the length of the context"
_ONE = "leave it out: hetrun run answers one prompt and ends"
_TALK = "hetrun run -i is a conversation line by line, hetrun chat one with a screen"
_QUIET = "leave it out: stdout has the answer only"

OPTIONS: Mapping[str, str] = {
    word: said
    for words, said in (
        ("-ngl --n-gpu-layers --gpu-layers --num-gpu --gpu --gpus --cuda --use-gpu", _GPU),
        ("--no-gpu --cpu --cpu-only", _NO_GPU),
        ("-ts --tensor-split -sm --split-mode -mg --main-gpu --gpu-memory-utilization", _GPU),
        (
            "-dev --device --device-draft -ot --override-tensor",
            "--backend NAME chooses; hetrun devices lists them",
        ),
        ("-ncmoe --n-cpu-moe -cmoe --cpu-moe", _EXPERTS),
        ("-ctk --cache-type-k -ctv --cache-type-v", _KV),
        ("-tb --threads-batch", "--threads is for prompts and answers"),
        ("-C --cpu-mask -Cr --cpu-range --cpu-strict --numa --prio --poll", _CPUS),
        ("-b --batch-size", "--ubatch is the most tokens in one step"),
        ("-fa --flash-attn -cb --cont-batching --cache-prompt --metrics", _ALWAYS),
        ("--embedding --embeddings", "leave it out: hetrun serve always has /v1/embeddings"),
        ("--rerank --reranking", "leave it out: hetrun serve always has /v1/rerank, for models that rank"),
        ("--mmap --no-mmap --mlock -nkvo --no-kv-offload -kvo --kv-offload", _MEMORY),
        ("--jinja --no-jinja", _TEMPLATE),
        ("--audio", _AUDIO),
        ("--image --attach", "hetrun run -a FILE is for pictures; in hetrun chat, /attach FILE"),
        ("--mmproj-url", "--mmproj FILE is the vision tower; hetrun pull brings it with a model of the hub"),
        ("--no-mmproj", "--mmproj none leaves the vision tower out"),
        ("--mmproj-auto --no-mmproj-auto", "leave it out: the mmproj file beside a model is found"),
        ("--mmproj-offload --no-mmproj-offload", "leave it out: pictures are encoded by the CPU"),
        ("--lora --lora-scaled --control-vector --control-vector-scaled", _LORA),
        ("-hf -hfr --hf-repo -hff --hf-file", _HUB),
        ("-mu --model-url", "hetrun pull user/repo brings a model from Hugging Face's hub; else give a path"),
        ("-md --model-draft --draft --draft-max --draft-min --draft-p-min", _DRAFT),
        ("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx", _OF_THE_FILE),
        ("--context-shift --keep", _SHIFT),
        ("--no-context-shift", _ALWAYS),
        ("-cnv --conversation --interactive-first -if", _TALK),
        ("-no-cnv --no-conversation -st --single-turn", _ONE),
        ("--no-display-prompt --log-disable --nowordwrap --simple-io --color -co", _QUIET),
        ("--warmup --no-warmup", "leave it out: there is no run to warm up"),
        ("-np --parallel", "leave it out: as many answers run together as memory holds; see serve --queue"),
        ("--keepalive --keep-alive", "hetrun serve keeps a model loaded; --sleep-idle SECONDS lets it go"),
        (
            "--format",
            '--json-schema \'{"type": "object"}\' makes the answer JSON; --json is the whole result',
        ),
        ("--check-tensors", "hetrun check MODEL reads every weight"),
        ("--list-devices", "hetrun devices lists them"),
        ("--reasoning-budget --reasoning-budget-message", _REASONING),
        ("--prefill-assistant", _ALWAYS),
        (
            "--no-prefill-assistant",
            "leave it out: a request with add_generation_prompt: true begins a new answer",
        ),
        ("--tags", "--alias NAME is the model's name for clients; it has no tags"),
        ("-s", "--seed N for the seed, --system TEXT for the system message"),
        ("-e --escape --no-escape", "leave it out: a prompt is taken as it stands"),
    )
    for word in words.split()
}

# --- commands

SAME_COMMAND: Mapping[str, str] = {"show": "inspect", "ls": "list"}

COMMANDS: Mapping[str, str] = {
    word: said
    for words, said in (
        (
            "create",
            "there is no Modelfile: -m takes a model's file, --system and --chat-template are options",
        ),
        ("cp", "models are files and folders: copy the file, and give its path"),
        ("push", "hetrun uploads nothing"),
        ("quantize llama-quantize", "hetrun convert MODEL -q q4_k_m writes a file of another type"),
        ("server llama-server start", "hetrun serve MODEL is the server"),
        ("cli llama-cli", 'hetrun run MODEL "a prompt" answers one; hetrun chat MODEL is a conversation'),
        ("llama-bench", "hetrun bench MODEL measures"),
        ("perplexity llama-perplexity", "hetrun eval MODEL -f TEXT measures it"),
        ("generate complete completions prompt ask", 'hetrun run MODEL "a prompt" answers one'),
        ("download get install", "hetrun pull user/repo brings a model from Hugging Face's hub"),
        ("remove delete uninstall", "hetrun rm NAME removes a model"),
        ("batch", "hetrun run -f FILE answers every prompt of a file"),
        ("models", "hetrun list has the models on this machine"),
        ("embed embeddings embedding", "hetrun serve MODEL has /v1/embeddings"),
        ("rerank reranking", "hetrun serve MODEL has /v1/rerank, if the model is a reranker"),
    )
    for word in words.split()
}

CLOSE = 0.75  # how alike two options must be before one is taken for a slip in the other
CLOSE_COMMAND = 0.65  # they are short


def close(word: str, known: Iterable[str], least: float = CLOSE) -> list[str]:
    """The words of which this one may be a slip, the likeliest first."""
    likely = [(SequenceMatcher(None, other, word).ratio(), other) for other in known]
    return [other for ratio, other in sorted(likely, reverse=True) if ratio >= least]
