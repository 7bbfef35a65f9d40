"""Whether a model is a reranker: one that judges how well a document answers a query.

Two forms are known. llama.cpp's converter gives such a file a matrix of its own for the words yes and no
(`cls.output.weight`), and the prompt as a template named rerank. Folders, and files converted otherwise, are
those of a model that writes text: only their names, or texts that come with them, say what they are for.
"""

from __future__ import annotations

import re
from pathlib import Path

from hetrun.loader.source import ModelSource

HEAD = "cls.output"
ARCHITECTURE = "qwen3"
NAMED = re.compile(r"qwen3[-_ .]?reranker", re.IGNORECASE)
HEADING = re.compile(r"^#+ *qwen3[-_ .]?reranker", re.IGNORECASE | re.MULTILINE)
JUDGES = 'answer can only be "yes" or "no"'  # what its prompt says, which may come as a template
README = "README.md"
MOST_README = 1 << 20  # bytes
TEMPLATE = "rerank"


def has_head(source: ModelSource) -> bool:
    """Whether it has a matrix of its own for judgements: of one row, or of one for yes and one for no."""
    head = source.find(f"{HEAD}.weight")
    if head is None or head.shape[0] not in (1, 2):
        return False
    return source.architecture == ARCHITECTURE or TEMPLATE in source.chat_templates


def is_published(source: ModelSource) -> bool:
    """Whether it is Qwen3-Reranker as its makers publish it, or converted without a matrix of its own."""
    if source.architecture != ARCHITECTURE:
        return False
    if any(NAMED.search(name) for name in (source.name, Path(source.path).name)):
        return True
    return any(JUDGES in text for text in source.chat_templates.values()) or _says_readme(source)


def is_reranker(source: ModelSource) -> bool:
    """Whether it judges documents."""
    return has_head(source) or is_published(source)


def _says_readme(source: ModelSource) -> bool:
    """Whether the text beside a folder's model is about it."""
    try:
        with open(Path(source.path) / README, "rb") as file:
            text = file.read(MOST_README)
    except OSError:  # no folder, or without that
        return False
    return HEADING.search(text.decode("utf-8", "replace")) is not None
