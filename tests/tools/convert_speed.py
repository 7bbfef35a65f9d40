"""How long `hetrun convert` takes, beside llama.cpp's own quantiser on the same tensors, in turn.

    python tests/tools/convert_speed.py --shape 1b --quant q4_k_m --rounds 3 --work FOLDER

The folder gets a synthetic llama model in BF16 as transformers saves it, and the same tensors as a BF16 GGUF
file for llama.cpp. Each conversion is a process of its own; both use as many threads.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from tests.models.hf import write_tokenizer
from tests.tools.make_model import SHAPES, Shape

PEER = """
import sys
from llama_cpp import llama_cpp as c
params = c.llama_model_quantize_default_params()
params.nthread, params.ftype = int(sys.argv[3]), int(sys.argv[4])
sys.exit(c.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


def write_folder(folder: Path, shape: Shape) -> None:
    """A model in BF16 with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.embd,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def seconds(command: Sequence[str | Path]) -> float:
    """A process from its start to its end."""
    start = perf_counter()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Time `hetrun convert` beside llama.cpp's quantiser.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--quant", default="q4_k_m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    folder, floats = args.work / "model", args.work / "bf16.gguf"
    ours, theirs = args.work / "ours.gguf", args.work / "theirs.gguf"
    write_folder(folder, SHAPES[args.shape])
    convert_model(ConversionOptions(folder, by_option("bf16"), floats, force=True))
    threads, kind = str(args.threads), str(by_option(args.quant).number)
    hetrun = [sys.executable, "-m", "hetrun", "convert", folder, "-q", args.quant, "-o", ours, "--force"]
    commands: dict[str, list[str | Path]] = {
        "hetrun": [*hetrun, "--threads", threads],
        "llama.cpp": [sys.executable, "-c", PEER, floats, theirs, threads, kind],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for i in range(args.rounds):
        for name in list(commands)[:: -1 if i % 2 else 1]:  # A B B A
            times[name].append(seconds(commands[name]))
    for name, found in times.items():
        print(f"{name:<10} median {median(found):6.2f} s  {' '.join(f'{t:.2f}' for t in found)}")
    ratios = [a / b for a, b in zip(times["hetrun"], times["llama.cpp"], strict=True)]
    print(f"ratio, median over the pairs: {median(ratios):.3f}; load average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
