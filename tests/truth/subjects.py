"""The rows of the table: a tiny model for each architecture that hetrun has, and each thing only some have.

The numbers of a model are such that Q8_0 holds them exactly. So a folder in float32, a file in Q8_0 and
transformers have the same model, and one reference serves both.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from hetrun.api.local_model import LocalModel
from hetrun.client.sampling_params import SamplingParams
from hetrun.graph.quant import by_name
from hetrun.loader.hf_source import open_folder
from hetrun.models import HF_TYPES, SHARED
from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from tests.models import cases_hf, hf, tiny
from tests.models.hf import Row
from tests.models.tiny import F32
from tests.support.closeness import limit
from tests.support.folders import lasting_folder
from tests.truth.verdicts import NotApplicable, Said, leads

ANSWER = 24  # tokens
LENGTHS = (40, 3, 17, 33, 64, 9, 25, 50)  # of prompts; windows of the tiny models are 8
OTHERS = tuple(tiny.random_tokens(n, seed=100 + n) for n in LENGTHS[1:])
MORE = 86  # tokens of the text behind the answer, for means that one token does not make
SEEDS = 40  # first prompts that are tried
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
Q8_0 = by_name("Q8_0")
# Whose experts lie on their side in folders: what is a row in GGUF is a column there.
TURNED = ("gpt_oss",)
TRANSPOSED = "kv_b_proj"  # of latent attention: its keys lie on their side in GGUF


def architectures() -> list[str]:
    """All that hetrun has of its own, by their files."""
    found = Path(str(import_module("hetrun.models").__file__)).parent.glob("*.py")
    return sorted({path.stem for path in found} - SHARED - {"__init__"})


@dataclass(frozen=True, eq=False)
class Subject:
    """A row of the table."""

    architecture: str
    row: Row | None  # None: the tests have no tiny model of it

    def __str__(self) -> str:
        return f"{self.architecture}: {self.row}" if self.row else self.architecture

    def answers_to(self, name: str) -> bool:
        """Whether someone who writes this name means it."""
        return name in (self.architecture, str(self.row), self.row.model_type if self.row else "")

    @property
    def tiny(self) -> Row:
        """Its model."""
        if self.row is None:
            raise AssertionError("there is no tiny model of it in tests/models/cases_hf.py")
        return self.row

    @cached_property
    def folder(self) -> Path:
        """The model in float32, as Hugging Face has it."""
        return rounded_folder(self.tiny)

    @cached_property
    def file(self) -> Path:
        """The same numbers in Q8_0."""
        return converted(self.tiny, self.folder)

    @property
    def in_gguf(self) -> bool:
        """Whether GGUF can say what this model is."""
        return not open_folder(self.folder).settings.get_str("gguf.inexpressible", "")

    @cached_property
    def text(self) -> list[int]:
        """The first prompt, what transformers says to it, and some more tokens."""
        for seed in range(SEEDS):
            text = tiny.random_tokens(LENGTHS[0], seed=seed)
            for _ in range(ANSWER):
                text.append(int(hf.logits(self.folder, text)[-1].argmax()))
            rows = hf.logits(self.folder, text)[LENGTHS[0] - 1 : -1]
            if leads(rows).min() > 2 * limit(self.tiny):
                return [*text, *tiny.random_tokens(MORE, seed=seed)]
        raise AssertionError(
            f"in each of {SEEDS} answers of transformers two tokens are as good as each other"
        )

    @property
    def prompts(self) -> Sequence[list[int]]:
        """To the first of them transformers' answer is known, and nowhere a tie."""
        return [self.text[: LENGTHS[0]], *OTHERS]

    @cached_property
    def truth(self) -> Said:
        """What transformers says, in float32."""
        answer = tuple(self.text[LENGTHS[0] :][:ANSWER])
        return Said((answer,), hf.logits(self.folder, self.text))

    @cached_property
    def moved_by_bf16(self) -> float:
        """How far transformers' own logits move where it computes in BF16."""
        assert self.truth.logits is not None
        rounded = hf.logits(self.folder, self.text, torch.bfloat16)
        return float(np.abs(rounded - self.truth.logits).max())

    @cached_property
    def resident(self) -> Said:
        """What the file says in memory, one sequence after the other, deterministically: to all prompts."""
        with LocalModel(self.file, **self.options() | {"kv_type": "f16"}, deterministic=True) as llm:
            return self.ask(llm, len(LENGTHS))

    def options(self, *backends: str) -> dict[str, Any]:
        """Of a model whose plan nothing measures. Without names: ggml alone."""
        return {
            "backends": list(backends) or ["llamacpp"], "planner": "static", "spec": "off",
            "ctx": self.tiny.ctx or 256, "kv_type": "f32", "threads": 1,
        }  # fmt: skip

    def ask(self, llm: LocalModel, prompts: int = 1) -> Said:
        """What a model says to the first prompts, one after the other, and to the text of the reference."""
        answers = [tuple(llm.generate([list(p)], GREEDY)[0].tokens) for p in self.prompts[:prompts]]
        return Said(tuple(answers), llm.logits(self.text))


def subjects() -> list[Subject]:
    """All rows; a new architecture is one of them by itself."""
    return [Subject(name, row) for name in architectures() for row in rows_of(name)]


def rows_of(architecture: str) -> Sequence[Row | None]:
    """Its tiny models that stand for others, or any, or none."""
    own = [row for row in cases_hf.ROWS if HF_TYPES.get(row.model_type) == architecture]
    return [row for row in own if str(row) in cases_hf.NAMES] or own[:1] or [None]


def named(names: Sequence[str]) -> Iterator[Subject]:
    """Rows by an architecture, by a model_type of Hugging Face, or by their own names; all without names."""
    for subject in subjects():
        if not names or any(subject.answers_to(name) for name in names):
            yield subject


@cache
def _room() -> Path:
    return lasting_folder()


@cache
def rounded_folder(row: Row) -> Path:
    """The row's folder, its matrices rounded to what Q8_0 holds."""
    path = _room() / str(row).replace("phi3", "phi")  # see `hf.folder`
    shutil.copytree(hf.folder(row), path)
    turned = row.model_type in TURNED
    for file in path.glob("*.safetensors"):
        found = load_file(file)
        tensors = {n: both_ways(t) if TRANSPOSED in n else rounded(t, turned) for n, t in found.items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return path


def rounded(tensor: torch.Tensor, turned: bool) -> torch.Tensor:
    """A tensor with values that a file in Q8_0 has, too; vectors stay."""
    if turned and tensor.ndim == 3:
        return rounded(tensor.transpose(1, 2).contiguous(), turned=False).transpose(1, 2).contiguous()
    if tensor.ndim < 2 or tensor.shape[-1] % Q8_0.block:
        return tensor
    rows: F32 = tensor.float().numpy().reshape(-1, tensor.shape[-1])
    values = np.ascontiguousarray(tiny.there_and_back(rows, Q8_0)).reshape(tensor.shape)
    return torch.from_numpy(values).to(tensor.dtype)


def both_ways(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix that Q8_0 holds by rows and by columns: each block of either has the largest value."""
    n, most = Q8_0.block, 127
    if any(size % n for size in tensor.shape):
        return rounded(tensor, turned=False)
    step = float(np.float16(tensor.abs().max().item() / most))
    whole = torch.clamp(torch.round(tensor.float() / step), -most, most)
    rows, columns = torch.meshgrid(*(torch.arange(size) % n for size in tensor.shape), indexing="ij")
    return torch.where(rows == columns, float(most), whole).mul(step).contiguous()


@cache
def converted(row: Row, folder: Path) -> Path:
    """The folder as a file in Q8_0."""
    if reason := open_folder(folder).settings.get_str("gguf.inexpressible", ""):
        raise NotApplicable(f"no GGUF: {reason}")
    wish = ConversionOptions(folder, by_option("q8_0"), _room() / f"{folder.name}.gguf", threads=1)
    return Path(convert_model(wish).path)
