"""Random rows of logits, texts and settings, and what llama.cpp's own samplers leave of them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from hetrun.client.sampling_params import SAMPLERS, SamplingParams
from tests.support.peer import llama_cpp

Row = npt.NDArray[np.float32]
# Tokens, logits, and how many are listed with those at -inf.
Left = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], int]

DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
CONTEXT = 300  # what a look back of -1 means here
LONG = 5000


@dataclass(frozen=True)
class Case:
    """One row of logits, what came before it, and how to sample."""

    row: Row
    params: dict[str, Any]
    ties: bool = False
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)

    def but(self, **params: object) -> Case:
        return replace(self, params=self.params | params)


# --- random cases


def random_case(seed: int) -> Case:
    random = np.random.default_rng(seed)
    ties = bool(random.random() < 0.15)
    row = random_row(random, ties)
    params = random_params(random, len(row))
    if ties:  # which of the equals is penalised is llama.cpp's choice if they were cut before
        first = [name for name in ("penalties", "dry") if name in params["samplers"]]
        params["samplers"] = first + [name for name in params["samplers"] if name not in first]
    text = random_text(random, len(row))
    if not ties and random.random() < 0.7:  # what is penalised matters only where it is probable
        words = np.unique(text).astype(int)
        row[words] = min(row.max(), 30) - random.exponential(1, len(words))
    cut = int(random.integers(0, len(text) + 1))
    return Case(row, params, ties, text[:cut], text[cut:])


def random_row(random: np.random.Generator, ties: bool) -> Row:
    size = int(
        random.choice([8, 9, 30, 100, 1000, 1025, 3000, 50_000], p=[0.1, 0.1, 0.1, 0.2, 0.2, 0.1, 0.1, 0.1])
    )
    scale = float(random.choice([0.05, 1.0, 3.0, 8.0]))
    values = random.normal(random.choice([0, 15, -20]), scale, size)
    out = random.integers(0, size, 1 + size // 50)
    values[out] += random.exponential(2 * scale, len(out))
    if ties:
        values = np.round(values)
    match random.integers(0, 8):
        case 0:
            values[random.random(size) < 0.5] = -math.inf
        case 1:
            values[random.random(size) < 0.99] = -math.inf
        case 2:
            values[random.integers(0, size, 3)] = [-1e6, 1e4, -1e4]
        case 3:
            values[random.integers(0, size)] = 1e6
    values[random.integers(0, size)] = 3.0  # one at least is finite
    return values.astype(np.float32)


def random_text(random: np.random.Generator, size: int) -> list[int]:
    """Of few tokens, so that they repeat, and of pieces that were there before."""
    words = random.integers(0, min(size, len(PIECES)), int(random.choice([2, 5, 30])))
    text: list[int] = random.choice(words, int(random.choice([0, 1, 5, 40, 400]))).tolist()
    for _ in range(int(random.integers(0, 4)) if text else 0):
        start = int(random.integers(0, len(text)))
        text += text[start : start + int(random.integers(1, 30))]
    return text


def random_params(random: np.random.Generator, size: int) -> dict[str, Any]:
    def one(*values: float) -> Any:  # noqa: ANN401
        return values[random.integers(0, len(values))]

    def often(on: object, off: object, chance: float = 0.5) -> Any:  # noqa: ANN401
        return on if random.random() < chance else off

    names = random.permutation(SAMPLERS)[: random.integers(0, len(SAMPLERS) + 1)].tolist()
    ids = random.integers(0, size, 3).tolist()
    return {
        "samplers": often(names, list(SAMPLERS), 0.7),
        "temperature": often(one(0.05, 0.5, 0.8, 1, 1.5, 5), 0, 0.8),
        "dynatemp_range": often(one(0.1, 0.5, 3), 0),
        "dynatemp_exponent": one(0, 0.5, 1, 2),
        "top_k": one(0, 1, 5, 40, 40, 130, 2000),
        "top_p": often(float(random.random()), one(0, 0.5, 0.95, 1)),
        "min_p": often(float(random.random() ** 3), one(0, 0.05, 1)),
        "typical_p": often(float(random.random()), 1),
        "top_n_sigma": often(float(random.random() * 4), -1),
        "xtc_probability": often(1, 0),
        "xtc_threshold": one(0.001, 0.01, 0.1, 0.3, 0.6),
        "min_keep": often(one(1, 3, 50), 0, 0.3),
        "repeat_penalty": often(one(0.5, 1.1, 1.5), 1),
        "frequency_penalty": often(one(-0.5, 0.3, 2), 0),
        "presence_penalty": often(one(-1, 0.6), 0),
        "repeat_last_n": one(0, 1, 64, 64, 1000, -1),
        "dry_multiplier": often(one(0.3, 0.8, 5), 0, 0.6),
        "dry_base": one(0.5, 1, 1.0000001, 1.2, 1.75, 1.75, 30),
        "dry_allowed_length": one(0, 1, 2, 2, 4),
        "dry_penalty_last_n": one(0, 3, 64, 64, 1000, -1),
        "dry_sequence_breakers": often(random.choice(BREAKERS, 2).tolist(), ["\n", ":", '"', "*"]),
        "logit_bias": often({ids[0]: 3.0, ids[1]: -100.0, ids[2]: -5.0}, {}, 0.2),
    }


# --- a vocabulary: the bytes as GPT-2 writes them, and some merges that make breakers span tokens

BREAKERS = ["\n", "\n\n", "###", "Human:", ":\n", "**", "a", "é", "ab", "\n- x", "long" * 15]
MERGES = "Ċ Ċ|* *|# #|## #|H u|m a|Hu ma|Huma n|n :|: Ċ|a b|b a|Ċ -|l o|n g|lo ng|long long|Ã ©|c Ã".split(
    "|"
)


def byte_names() -> list[str]:
    """GPT-2's: what prints stands for itself, the others for characters from 256 on."""
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b if b in printing else next(others)) for b in range(256)]


NAMES = [*byte_names(), *(merge.replace(" ", "") for merge in MERGES)]
PIECES = [bytes(map(NAMES.index, name)) for name in NAMES]


@contextmanager
def open_vocab(path: Path) -> Iterator[Any]:
    """llama.cpp's view of the vocabulary, through a file that is written here."""
    api = llama_cpp()
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(NAMES)
    writer.add_token_types([1] * len(NAMES))
    writer.add_token_merges(MERGES)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(str(path).encode(), params)
    assert model
    yield api.llama_model_get_vocab(model)
    api.llama_model_free(model)


def encoder(vocab: Any) -> Any:  # noqa: ANN401
    def encode(text: str) -> list[int]:
        raw = text.encode()
        out = (ctypes.c_int32 * 200)()
        n = llama_cpp().llama_tokenize(vocab, raw, len(raw), out, 200, False, False)
        return out[:n]

    return encode


# --- llama.cpp's answer


def back(n: int) -> int:
    return CONTEXT if n == -1 else n


def llama_samplers(case: Case, vocab: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """As llama.cpp's common_sampler_init makes them."""
    api, n, p = llama_cpp(), len(case.row), SamplingParams(**case.params)
    temperature = 0.8 if p.temperature is None else p.temperature
    biases = (api.llama_logit_bias * len(p.logit_bias))(*p.logit_bias.items())
    yield "logit_bias", api.llama_sampler_init_logit_bias(n, len(biases), biases)
    if p.mirostat:
        yield "temperature", api.llama_sampler_init_temp(temperature)
        if p.mirostat == 1:
            yield "mirostat", api.llama_sampler_init_mirostat(n, 1, p.mirostat_tau, p.mirostat_eta, 100)
        else:
            yield "mirostat", api.llama_sampler_init_mirostat_v2(1, p.mirostat_tau, p.mirostat_eta)
        return
    breakers = (ctypes.c_char_p * len(p.dry_sequence_breakers))(
        *(b.encode() for b in p.dry_sequence_breakers)
    )
    dry = (p.dry_multiplier, p.dry_base, p.dry_allowed_length, back(p.dry_penalty_last_n))
    penalties = (back(p.repeat_last_n), p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
    make = {
        "penalties": lambda: api.llama_sampler_init_penalties(n, *penalties),
        "dry": lambda: api.llama_sampler_init_dry(vocab, *dry, breakers, len(breakers)),
        "top_n_sigma": lambda: api.llama_sampler_init_top_n_sigma(p.top_n_sigma),
        "top_k": lambda: api.llama_sampler_init_top_k(p.top_k),
        "typ_p": lambda: api.llama_sampler_init_typical(p.typical_p, p.min_keep),
        "top_p": lambda: api.llama_sampler_init_top_p(p.top_p, p.min_keep),
        "min_p": lambda: api.llama_sampler_init_min_p(p.min_p, p.min_keep),
        "xtc": lambda: api.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, p.min_keep, 1),
        "temperature": lambda: api.llama_sampler_init_temp_ext(
            temperature, p.dynatemp_range, p.dynatemp_exponent
        ),
    }
    for name in p.samplers:
        yield name, make[name]()


class Undefined(Exception):
    """llama.cpp's typical_p computes NaN, or a sum that is far off."""


def data_array(row: Row) -> tuple[Any, npt.NDArray[Any]]:
    data = np.zeros(len(row), DATA)
    data["id"], data["logit"] = np.arange(len(row)), row
    api = llama_cpp()
    pointer = ctypes.cast(data.ctypes.data, ctypes.POINTER(api.llama_token_data))
    return api.llama_token_data_array(pointer, len(row), -1, False), data


def listed(array: Any) -> npt.NDArray[Any]:  # noqa: ANN401
    """What llama.cpp has in its list now."""
    raw = ctypes.string_at(array.data, array.size * DATA.itemsize)
    return np.frombuffer(raw, DATA)


def theirs(case: Case, vocab: Any) -> Left:  # noqa: ANN401
    api = llama_cpp()
    array, data = data_array(case.row)
    for name, sampler in llama_samplers(case, vocab):
        try:
            for token in case.prompt + case.answer:
                api.llama_sampler_accept(sampler, token)
            if name == "typ_p" and case.params["typical_p"] < 1:
                logits = listed(array)["logit"]
                if len(logits) > LONG or np.exp(logits - logits.max()).min() < 1e-37:
                    raise Undefined
            api.llama_sampler_apply(sampler, ctypes.byref(array))
        finally:
            api.llama_sampler_free(sampler)
    left = possible_of(listed(array))
    assert len(data)  # it must live until here
    return left


def possible_of(left: npt.NDArray[Any]) -> Left:
    kept = left[left["logit"] > -np.inf]
    return kept["id"].astype(np.int64), kept["logit"].astype(np.float64), len(left)
