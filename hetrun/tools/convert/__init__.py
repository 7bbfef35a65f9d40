"""A folder of Hugging Face, or a GGUF file of floats, to one GGUF file of another type.

quant_mixtures.py says which type each tensor gets, stream.py converts, gguf_writer.py writes, tokenizer.py
translates the vocabulary. Memory does not depend on the size of the tensors: a few slices of rows are
under way at a time.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import cast

import numpy as np

from hetrun.errors import BackendUnavailable, ModelFileError, OptionError, system_faults
from hetrun.graph import Weight, stack
from hetrun.graph.quant import Bytes, Floats, QuantType
from hetrun.loader import expert_names
from hetrun.loader.architectures import build_graph, is_known
from hetrun.loader.formats.gguf_file import StringArray, shown
from hetrun.loader.gguf_source import GGUFModel
from hetrun.loader.hf_mapping import Change, Setting
from hetrun.loader.hf_source import HfSource
from hetrun.loader.open_model import open_model
from hetrun.loader.source import ModelSource
from hetrun.system import entry_points
from hetrun.text.tokenizer import open_vocabulary
from hetrun.tools.convert import quant_mixtures as recipes, tokenizer
from hetrun.tools.convert.gguf_writer import (
    ALIGNMENT_KEY,
    MetaValue,
    OutputTensor,
    check_target,
    target_path,
    write_model,
)
from hetrun.tools.convert.quant_mixtures import ModelForm, Recipe, Shape
from hetrun.tools.convert.stream import TensorJob, convert, in_order

QUANTIZATION_VERSION = 2  # ggml's GGML_QNT_VERSION
# The architectures, of ours, whose sliding window llama.cpp heeds.
HEEDS_WINDOWS = ("afmoe", "exaone4", "gemma3", "gpt-oss", "muse-glimmer", "olmo2")
FLOATS = ("F32", "F16", "BF16")
LOSSLESS = ("F32", "F16")  # what quantised weights become without losing what can be noticed
OF_HEADS = ("attn_k_b.weight", "attn_v_b.weight")  # a matrix for each head
MOST_NAME = 50  # characters of a model's name that become a file's: up to 200 bytes


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """What the user asked for."""

    source: Path
    recipe: Recipe
    output: Path | None = None
    threads: int | None = None
    force: bool = False
    requantize: bool = False  # also weights that have lost precision before


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What was done; `notes` are sentences for the user."""

    path: Path
    recipe: str
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    seconds: float
    types: Mapping[str, int]  # tensors of each type
    notes: tuple[str, ...]


def convert_model(
    wish: ConversionOptions, progress: Callable[[float], None] | None = None
) -> ConversionReport:
    """Convert a model; the file is complete when this returns, and not there when it raises."""
    with system_faults("the model was not converted"):
        return _convert_model(wish, progress)


def _convert_model(wish: ConversionOptions, progress: Callable[[float], None] | None) -> ConversionReport:
    begin = perf_counter()
    source = open_model(wish.source)
    if is_known(source):
        build_graph(source)  # settings and tensors that do not fit together make no model of any type
    path = target(wish, source)
    check_target(path, wish.force)
    jobs, tensors = plan(source, wish.recipe, wish.requantize)
    metadata, notes = describe(source, wish.recipe)
    threads = wish.threads or len(os.sched_getaffinity(0))
    with closing(convert(jobs, threads, quantise, progress)) as pieces:
        size = write_model(path, metadata, tensors, pieces, wish.force)
    notes += _compare(path, source)
    weights = sum(job.weight.shape[0] * job.weight.shape[1] for job in jobs)
    return ConversionReport(
        path,
        wish.recipe.name,
        source.nbytes,
        size,
        8 * sum(t.nbytes for t in tensors) / weights,
        perf_counter() - begin,
        dict(Counter(t.quant.name for t in tensors)),
        tuple(notes),
    )


def target(wish: ConversionOptions, source: ModelSource) -> Path:
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in source.name[:MOST_NAME])
    return target_path(wish.output, f"{name.strip('.-') or 'model'}-{wish.recipe.name}.gguf")


def plan(
    source: ModelSource, recipe: Recipe, requantize: bool = False
) -> tuple[list[TensorJob], list[OutputTensor]]:
    """What becomes of each weight."""
    changes: Mapping[str, Change] = {}
    if isinstance(source, HfSource):
        changes = source.imported.changes
        if reason := source.settings.get_str("gguf.inexpressible", ""):
            raise ModelFileError(source.path, f"cannot be converted: {reason}; hetrun runs it as it is")
    weights = _with_whole_experts({w.name: w for w in source.weights()})
    shapes = {name: _shape(source, weight) for name, weight in weights.items()}
    chosen = recipes.choose(recipe, form(source), {n: (shapes[n], w.quant) for n, w in weights.items()})
    for name, weight in weights.items():
        if weight.quant.name in FLOATS or weight.quant is chosen[name] or chosen[name].name in LOSSLESS:
            continue
        if not requantize:
            raise OptionError(
                f"{source.path} is quantised already ({shown(name)} is {weight.quant.name}), and would lose "
                "precision twice; convert the original model, or a GGUF of F32, F16 or BF16. If you have "
                "neither: --allow-requantize"
            )
    jobs = [
        TensorJob(in_order(weight, changes.get(name)), chosen[name], changes.get(name))
        for name, weight in weights.items()
    ]
    return jobs, [OutputTensor(name, shapes[name], chosen[name]) for name in weights]


def _with_whole_experts(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Matrices of single experts on top of each other, as llama.cpp reads them, where none is missing."""
    sets: dict[tuple[str, str], dict[int, Weight]] = defaultdict(dict)
    for name, weight in weights.items():
        if one := expert_names.of_one(name):
            sets[one[:2]][one[2]] = weight
    out: dict[str, Weight] = {}
    for name, weight in weights.items():
        one = expert_names.of_one(name)
        whole = expert_names.whole(*one[:2]) if one else name
        members = sets[one[:2]] if one else {}
        forms = {(w.shape, w.quant.name) for w in members.values()}
        if not one or whole in weights or len(forms) > 1 or max(members) != len(members) - 1:
            out[name] = weight
        elif whole not in out:
            out[whole] = replace(stack([members[e] for e in range(len(members))]), name=whole)
    return out


def _shape(source: ModelSource, weight: Weight) -> Shape:
    """Rows first: a vector has no rows, experts have a dimension of their own."""
    if isinstance(source, GGUFModel) and weight.name in source.file.tensors:
        return source.file.tensors[weight.name].shape
    rows, cols = weight.shape
    if "_exps.weight" in weight.name:
        n = source.require_int("expert_count", 1, rows)
        return (n, rows // n, cols)
    if weight.name.endswith(OF_HEADS):
        n = source.require_int("attention.head_count", 1, rows)
        return (n, rows // n, cols)
    return (cols,) if rows == 1 else (rows, cols)


def form(source: ModelSource) -> ModelForm:
    """What the mixtures look at."""
    layers = source.get_int("block_count", 0, 0, 1 << 16)
    heads = _first(source, "attention.head_count", layers)
    return ModelForm(
        architecture=source.architecture,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=_first(source, "attention.head_count_kv", layers) or heads,
        n_experts=source.get_int("expert_count", 0, 0, 1 << 16),
    )


def _first(source: ModelSource, key: str, layers: int) -> int:
    """A number that some architectures have for each layer: the first layer's."""
    found = source.get_numbers(key, layers) if layers else None
    return int(found[0]) if found else 0


def describe(source: ModelSource, recipe: Recipe) -> tuple[dict[str, MetaValue], list[str]]:
    """The new file's metadata, and what there is to say about it."""
    kinds: dict[str, MetaValue] = {
        "general.file_type": recipe.number,
        "general.quantization_version": QUANTIZATION_VERSION,
    }
    if isinstance(source, GGUFModel):
        note = "from a GGUF file: its metadata is copied, its weights are converted again"
        return {**_copied(source), **kinds}, [note]
    assert isinstance(source, HfSource)
    n_vocab = source.require_int("vocab_size", 1, 1 << 24)
    vocabulary = tokenizer.convert(source.folder, n_vocab, source.architecture)
    metadata: dict[str, MetaValue] = {
        "general.architecture": source.architecture,
        "general.type": "model",
        "general.name": _name(source.name, vocabulary.keys),
        **kinds,
    }
    if source.temperature is not None:
        metadata["general.sampling.temp"] = source.temperature
    for key, value in source.imported.settings.items():
        metadata[f"{source.architecture}.{key}"] = _setting(value)
    metadata |= vocabulary.keys
    metadata |= _templates(source.chat_templates)
    return metadata, [*vocabulary.notes, *_ignored(source)]


def _templates(named: Mapping[str, str]) -> dict[str, MetaValue]:
    """Chat templates under the keys that GGUF has for them."""
    key = "tokenizer.chat_template"
    others = {re.sub(r"\W", "_", name): text for name, text in named.items() if name != "default"}
    keys: dict[str, MetaValue] = {f"{key}.{name}": text for name, text in others.items()}
    if others:
        keys[f"{key}s"] = list(others)
    return {key: named["default"], **keys} if "default" in named else keys


def _name(name: str, vocabulary: Mapping[str, MetaValue]) -> str:
    """llama.cpp looks for Phi-3's tokens where the name says so, and loads no such file without them."""
    texts = vocabulary.get("tokenizer.ggml.tokens", ())
    if isinstance(texts, list) and {"</s>", "<unk>", "<s>", "<|endoftext|>"} <= {*texts}:
        return name
    return re.sub("(phi)-?3", r"\1 3", name, flags=re.IGNORECASE)


def _ignored(source: ModelSource) -> list[str]:
    """What the file says and llama.cpp does not heed."""
    if note := source.get_str("gguf.note", ""):
        return [note]
    window = source.get_int("attention.sliding_window", 0, 0, 1 << 31)
    matters = 0 < window < source.get_int("context_length", 0, 0, 1 << 31)
    if source.architecture in HEEDS_WINDOWS or not matters:
        return []
    return [
        f"the model sees {window} tokens at a time in some layers; hetrun heeds that, llama.cpp's "
        f"{source.architecture} does not: with longer texts it answers differently"
    ]


def _setting(value: Setting) -> MetaValue:
    if not isinstance(value, tuple):
        return value
    kind = "|b1" if isinstance(value[0], bool) else "<i4" if isinstance(value[0], int) else "<f4"
    return np.array(value, kind)


def _copied(source: GGUFModel) -> dict[str, MetaValue]:
    """A file's metadata, without what speaks of how that file is laid out."""
    out: dict[str, MetaValue] = {}
    for key, value in source.file.metadata.items():
        if not key.startswith("split.") and key != ALIGNMENT_KEY:
            out[key] = [value.raw(i) for i in range(len(value))] if isinstance(value, StringArray) else value
    return out


def quantise(quant: QuantType, x: Floats) -> Bytes:
    """Float32 rows as rows of a type: by ggml's own routine where it is installed."""
    service = entry_points.named("services", "quantise")
    if service is not None and quant.name != "F32":
        out = np.empty((x.shape[0], quant.row_bytes(x.shape[1])), np.uint8)
        try:
            cast("Callable[[int, Floats, Bytes], None]", service)(quant.ggml_id, x, out)
            return out
        except BackendUnavailable:
            if quant.pack is None:
                raise
    return quant.quantise(x)


def _compare(path: Path, source: ModelSource) -> Sequence[str]:
    """Whether llama.cpp reads the new vocabulary as the folder's own library does."""
    if not isinstance(source, HfSource) or not source.vocabulary:
        return ()
    try:
        with ExitStack() as stack:
            opened = []
            for model in (open_model(path), source):
                if (vocabulary := open_vocabulary(model)) is None:
                    return ()
                stack.callback(vocabulary.close)
                opened.append(vocabulary)
            text = tokenizer.difference(*opened)
    except BackendUnavailable:
        return ()
    if text is None:
        return ()
    return (f"llama.cpp reads some texts as other tokens than the original tokenizer, for one {text[:60]!r}",)
