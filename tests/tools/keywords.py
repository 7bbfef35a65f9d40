"""Write hetrun/api/keywords.py: the keywords of `LLM` and of its answers, as type checkers read them.

python -m tests.tools.keywords [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from dataclasses import fields

from hetrun.client.sampling_params import SamplingParams
from hetrun.config import OPTIONS
from hetrun.option_types import WordChoice
from tests.support.paths import ROOT

PATH = ROOT / "hetrun" / "api" / "keywords.py"

# Options of commands that mean nothing to a model in a program; the model itself is no keyword.
OF_COMMANDS = frozenset(
    "model system host port ollama uds api_key allowed_hosts cors_origins queue models models_max sleep_idle "
    "strict sandbox url slot_save_path media_path media_domains keep_billing_header aliases api".split()
)
# What is taken for an option, by the function of `option_types` that reads it.
TYPES = {
    "text": "str",
    "path": "str | PathLike[str]",
    "template": "str | PathLike[str]",
    "json_object": "Mapping[str, Any]",
    "boolean": "bool",
    "integer": "int",
    "number": "float",
    "size": "int | str",
    "memory": "int | str",
    "answer_length": "int",
    "names": "Sequence[str] | str",
    "speculation": "str",
}
HEAD = '''"""Keywords of `LLM` and of its answers, for type checkers and editors.

Generated from the table of options and from `SamplingParams`: python -m tests.tools.keywords
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict
'''


def source() -> str:
    """The module."""
    options = [
        (name, _type(name), _sentence(option.help.replace("; may be repeated", ""), option.shows))
        for name, option in OPTIONS.items()
        if name not in OF_COMMANDS
    ]
    meanings = sampling_meanings()
    sampling = [(f.name, str(f.type), _sentence(meanings[f.name], "")) for f in fields(SamplingParams)]
    return "\n\n".join(
        [
            HEAD,
            _class("ModelOptions", "Options of `LLM`, as on the command line; None: not given.", options),
            _class("SamplingKeywords", "Fields of `SamplingParams`, given by themselves.", sampling),
        ]
    )


def sampling_meanings() -> dict[str, str]:
    """What each field means, as the docstring of `SamplingParams` says it."""
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", SamplingParams.__doc__ or "", re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def _type(name: str) -> str:
    parse = OPTIONS[name].parse
    if not isinstance(parse, WordChoice):
        return f"{TYPES[parse.__qualname__.partition('.')[0]]} | None"
    if parse.group:  # to which packages add words
        return "str | None"
    words = [f'"{word}"' for word in parse.allowed]
    line = f"Literal[{', '.join(words)}] | None"
    if len(f"    {name}: {line}") <= 110:
        return line
    listed = "".join(f"            {word},\n" for word in words)
    return f"(\n        Literal[\n{listed}        ]\n        | None\n    )"


def _sentence(meaning: str, default: str) -> str:
    said = meaning[0].upper() + meaning[1:].rstrip(".")
    return f"{said} (default: {default})." if default else f"{said}."


def _class(name: str, meaning: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"class {name}(TypedDict, total=False):", f'    """{meaning}"""', ""]
    for keyword, kind, said in rows:
        lines.append(f"    {keyword}: {kind}")
        wrapped = textwrap.wrap(f'"""{said}"""', 105, break_long_words=False)
        lines += [f"    {line}" for line in wrapped]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The exit code: 1 if --check finds an older file."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.keywords", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the file is current")
    if parser.parse_args().check:
        return int(PATH.read_text(encoding="utf-8") != source())
    PATH.write_text(source(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
