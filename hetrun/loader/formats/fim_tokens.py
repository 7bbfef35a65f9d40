"""The tokens with which a model fills in the middle of a text (FIM), and how they are written.

GGUF files name them by keys; folders do not, and are searched for their texts. The texts are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

TEXTS: dict[str, tuple[str, ...]] = {
    "prefix": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "suffix": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "middle": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
}


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The numbers of these tokens; None: the model has none."""

    prefix: int | None = None
    suffix: int | None = None
    middle: int | None = None
    pad: int | None = None
    repository: int | None = None  # before the name of a repository
    file: int | None = None  # before the name of each of its files

    @property
    def complete(self) -> bool:
        """Whether a model with these can fill in the middle."""
        return None not in (self.prefix, self.suffix, self.middle)

    @property
    def ends(self) -> frozenset[int]:
        """Those with which an answer ends: it fills one gap in one file."""
        return frozenset(t for t in (self.pad, self.repository, self.file) if t is not None)

    @property
    def missing(self) -> list[str]:
        """What a model lacks that cannot."""
        return [name for name, token in zip(TEXTS, astuple(self)[:3], strict=False) if token is None]


def by_text(find: Callable[[str], int | None]) -> FimTokens:
    """The tokens that are written so; `find` gives the number of a special token."""
    found = {name: map(find, texts) for name, texts in TEXTS.items()}
    return FimTokens(**{name: next((t for t in ids if t is not None), None) for name, ids in found.items()})
