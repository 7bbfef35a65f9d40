"""The table of models in docs/models.md, from the files in `models/` and the rows that tests have of each:
`python -m tests.tools.model_table` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from hetrun.loader.hf_source import open_folder
from hetrun.models import HF_TYPES, SHARED
from tests.models import cases_hf, hf

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- models -->\n", "<!-- end -->\n"
HEAD = (
    *("models", "GGUF", "folders (`model_type`)", "to GGUF", "tested variants"),
    *("tool calls", "reasoning"),
)
# How published models of an architecture write calls, and whether some think: what
# `text.tool_parsers.formats.family` and `text.chat.reasoning.mark_of` say of their chat templates.
TOLD = "described"  # the template has no tools: the system message describes them
WRITES: dict[str, tuple[str, ...]] = {
    "deepseek2": ("deepseek", "deepseek_v31", "glm", "kimi_k2", "yes"),
    "gemma3": (TOLD, "no"),
    "gemma4": ("gemma4", "yes"),
    "glm4moe": ("glm", "yes"),
    "gpt_oss": ("harmony", "yes"),
    "granite": ("phi", "yes"),
    "granitehybrid": ("hermes", "no"),
    "granitemoe": ("phi", "yes"),
    "lfm2": ("lfm2", "yes"),
    "lfm2moe": ("lfm2", "yes"),
    "llama": ("llama3", "mistral", "hermes", "yes"),
    "minimax_m2": ("minimax_m2", "yes"),
    "mistral3": ("mistral_named", "yes"),
    "muse_glimmer": ("muse", "yes"),
    "phi3": ("phi", "no"),
    "qwen2": ("hermes", "yes"),
    "qwen3": ("hermes", "yes"),
    "qwen35": ("qwen3_coder", "yes"),
    "qwen35moe": ("qwen3_coder", "yes"),
    "qwen3moe": ("hermes", "qwen3_coder", "yes"),
    "qwen3next": ("hermes", "qwen3_coder", "yes"),
    "qwen3vl": ("hermes", "yes"),
    "qwen3vlmoe": ("hermes", "yes"),
    "seed_oss": ("seed_oss", "yes"),
    "smollm3": (TOLD, "yes"),
}


class Line(NamedTuple):
    """An architecture."""

    what: str
    gguf: str
    folders: str
    converted: str
    checked: str
    calls: str
    thoughts: str


def lines() -> Iterator[Line]:
    """All of them, by name."""
    folder = Path(str(import_module("hetrun.models").__file__)).parent
    for file in sorted({p.stem for p in folder.glob("*.py")} - SHARED - {"__init__"}):
        module = import_module(f"hetrun.models.{file}")
        types = [theirs for theirs, ours in HF_TYPES.items() if ours == file]
        rows = [row for row in cases_hf.ROWS if row.model_type in types]
        says = [gguf_says(row) for row in rows]
        converted = "yes" if not any(says) else "most" if not all(says) else "no"
        what = " ".join(str(module.__doc__).split()).partition(":")[0].removesuffix(".")
        *calls, thoughts = WRITES.get(file, ("", ""))
        yield Line(
            what,
            f"`{module.name}`",
            ", ".join(f"`{t}`" for t in sorted(types)),
            converted,
            str(len(rows)),
            ", ".join(form if form in ("", TOLD) else f"`{form}`" for form in calls),
            thoughts,
        )


def gguf_says(row: hf.Row) -> str:
    """Why llama.cpp could not run a GGUF file of it; nothing where it can."""
    return open_folder(hf.folder(row)).settings.get_str("gguf.inexpressible", "")


def table() -> str:
    """In Markdown."""
    rows = [HEAD, ("---",) * len(HEAD), *lines()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def within(page: str) -> str:
    """The table that a page has."""
    return page.partition(BEGIN)[2].partition(END)[0]


def main() -> int:
    page = PAGE.read_text("utf-8")
    PAGE.write_text(page.replace(BEGIN + within(page), BEGIN + table()), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
