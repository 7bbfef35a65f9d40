"""Which words of `hetrun run` name a model: `hetrun run llama3.2 "Why is the sky blue?"`.

The first word is a model if it names one that is here: a file or folder with a model, `hf:`, `ollama:` or
another store's prefix, or a name that `hetrun list` shows. A word that can hardly be anything but the name of
a model (`qwen3:8b`, `tiny.gguf`, `user/repo`) is taken for one, too, and so is a slip in a name that is here
(`smolm2`), and any word before one prompt in quotes: it then is refused with what to do, instead of being
answered as a prompt. Everything else is the prompt, as is whatever has a space in it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetrun.cli import options
from hetrun.cli.output import say
from hetrun.config import Settings
from hetrun.errors import OptionError, UserError, printable

ENDINGS = (".gguf", ".safetensors")
STORES = ("hf:", "ollama:", "lmstudio:")
NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(?:/[\w.+-]+)*(?::[\w.-]+)?", re.ASCII)
FAMILIES = (
    "aya bloom codegemma codellama codestral command-r deepseek devstral dolphin ernie exaone falcon gemma "
    "glm gpt-oss granite hermes internlm kimi lfm llama llava magistral minicpm minimax ministral mistral "
    "mixtral nemotron olmo orca phi qwen qwq smollm solar stablelm starcoder tinyllama vicuna wizardlm yi "
    "zephyr"
).split()
# As a whole prompt these are nothing but a model's name; "falcon" or "solar" may be a question.
UNMISTAKABLE = {
    *("codegemma", "codellama", "codestral", "deepseek", "devstral", "gemma", "gpt-oss", "llama", "llava"),
    *("magistral", "mistral", "mixtral", "nemotron", "qwen", "qwq", "smollm", "tinyllama", "vicuna"),
}
_FAMILY = "|".join(map(re.escape, FAMILIES))
OF_A_FAMILY = re.compile(
    rf"(?:{_FAMILY})(?:[._-]?|[._-][a-z._-]*)\d[\w.-]*(?::[\w.-]+)?", re.ASCII | re.IGNORECASE
)
SIZE = re.compile(r"(?:^|[._:-])(?:e?\d+(?:\.\d+)?[bm]|a\d+b|q\d(?:_\w+)?|gguf)(?:$|[._:-])", re.IGNORECASE)
TAGGED = re.compile(r"[\w.-]+(?:/[\w.-]+)*:(?:latest|instruct|chat|base|cloud)", re.ASCII)
LONGEST_SHOWN = 200  # characters of a prompt that is repeated in what to type instead
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{2,}/[A-Za-z0-9][\w.-]{2,}(?::[\w.-]+)?", re.ASCII)

Taken = Literal["it is here", "by its looks"]  # why a word is; by its looks, it may be part of the prompt


@dataclass(frozen=True, slots=True)
class ModelArgument:
    """What the words of a command line ask, and whom."""

    prompt: str | None
    named: bool  # a model was named, by a word or by -m
    doubtful: tuple[str, ...] = ()  # all words, if the first was taken for a model that may not be here
    unsure: str | None = None  # a model that may be the first word of a prompt without quotes

    @classmethod
    def of(
        cls, words: Sequence[str], text: str | None, given: dict[str, object], here: bool = True
    ) -> ModelArgument:
        """`text` is the prompt of -p; a model that is named goes into `given`. A server's models are not
        `here`: only -m names them."""
        doubtful: tuple[str, ...] = ()
        unsure = None
        if given["model"] is not None or not here:
            if given["model"] is None and is_before_quotes(words):
                raise OptionError(f"with --url, -m names the model: -m {words[0]}; {as_prompt(words)}")
            prompt = " ".join(words) if words else None
        else:
            model, prompt, why = model_and_prompt(words)
            given["model"] = model
            if why == "by its looks":
                doubtful = tuple(words)
            unsure = model if model is not None and model.isalpha() and len(words) > 2 else None
        if text is not None and prompt is not None:
            raise OptionError("-p and a prompt are both given: use only one of them")
        return cls(prompt if text is None else text, given["model"] is not None, doubtful, unsure)

    def resolved(self, given: dict[str, object]) -> Settings:
        """All options; UserError says what to do where a word was taken for a model."""
        if self.unsure is not None and sys.stderr.isatty():
            say(
                f"{self.unsure} is taken as the model; if it is part of the prompt, put the whole "
                "prompt in quotes"
            )
        try:
            return options.resolved_or_remote(given)
        except UserError as error:
            if not self.doubtful or self.doubtful[0] not in str(error) or self.doubtful[0].endswith(ENDINGS):
                raise
            why, instead = self._why(error), as_prompt(self.doubtful)
            said = f"{why} I{instead[1:]}" if why.endswith("?") else f"{why}; {instead}"
            raise UserError(said) from None

    def _why(self, error: UserError) -> str:
        """Why there is no model; shorter for a word that does not look like one."""
        word = self.doubtful[0]
        if looks_like_model(word, self.doubtful[1:]) or "did you mean" in str(error):
            return str(error)
        return f"there is no model {word}; hetrun list shows those that are here"

    def is_conversation(self, interactive: bool, go_on: bool, plain: bool) -> bool:
        """Whether it is one: asked for, or a person types at a terminal, with a model and no prompt."""
        if interactive or go_on:
            return True
        typing = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
        return typing and self.named and self.prompt is None and plain


def model_and_prompt(words: Sequence[str]) -> tuple[str | None, str | None, Taken | None]:
    """The model that the words name, if they do, the prompt, if there is one, and why it is a model."""
    if not words:
        return None, None, None
    first, rest = words[0], words[1:]
    if why := taken_for_model(first, rest):
        return first, " ".join(rest) if rest else None, why
    return None, " ".join(words), None


def taken_for_model(word: str, rest: Sequence[str] = ()) -> Taken | None:
    """Why the first word is taken for a model, if it is. UserError: it is a path, and no model is there."""
    path = Path(word).expanduser() if word.strip() else None
    if path is not None and os.path.exists(path):
        if holds_model(path):
            return "it is here"
        if "/" in word or (path.suffix and path.is_file()) or is_before_quotes((word, *rest)):
            raise UserError(_no_model(word, path))
    if not word or any(map(str.isspace, word)):
        return None
    if _is_here(word):
        return "it is here"
    quoted = is_before_quotes((word, *rest))
    return "by its looks" if quoted or looks_like_model(word, rest) or _is_slip(word, rest) else None


def is_before_quotes(words: Sequence[str]) -> bool:
    """Whether it is NAME "the prompt": who puts only the rest in quotes means a model by the first word."""
    if len(words) != 2 or words[0] == "-":
        return False
    first, rest = words
    return bool(first) and not any(map(str.isspace, first)) and any(map(str.isspace, rest.strip()))


def holds_model(path: Path) -> bool:
    """Whether a file or folder is a model, by a glance at it."""
    try:
        if path.is_dir():
            names = os.listdir(path)
            some = ENDINGS if "config.json" in names else ENDINGS[:1]
            return any(name.lower().endswith(some) for name in names)
        if not path.is_file():
            return False
        if path.suffix.lower() in ENDINGS:
            return True
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _no_model(word: str, path: Path) -> str:
    shown = printable(word)
    if path.is_dir():
        return (
            f"{shown} does not contain a model: no .gguf file, and no config.json with safetensors; "
            "if it is part of the prompt, put the whole prompt in quotes"
        )
    return (
        f'{shown} is not a model. To ask about a file: hetrun run "What is this?" < {shown}; '
        f"if it is part of the prompt, put the whole prompt in quotes"
    )


def _is_here(word: str) -> bool:
    """Whether a store has a model of that name, or is named itself."""
    if word.startswith(STORES) and word not in STORES:
        return True
    from hetrun.loader.hub.names import is_on_the_hub

    if is_on_the_hub(word):
        return True
    if not NAME.fullmatch(word):
        return False
    from hetrun.loader.hub.resolve import by_name
    from hetrun.loader.hub.stores import available
    from hetrun.system import entry_points

    scheme, colon, rest = word.partition(":")
    if colon and rest and scheme in entry_points.points("stores"):
        return True
    return bool(by_name(word, available()))


def _is_slip(word: str, rest: Sequence[str]) -> bool:
    """Whether it is nearly the name of a model that is here: one with a digit, or one before a single word,
    as in `smolm2 Hello` or `mistral hello`. Other words may well begin a prompt."""
    before_one_word = len(rest) == 1
    if not NAME.fullmatch(word) or not (before_one_word or any(map(str.isdigit, word))):
        return False
    if before_one_word and (word in UNMISTAKABLE or any(map(OF_A_FAMILY.fullmatch, word.split("/")))):
        return True
    from hetrun.loader.hub.resolve import is_slip
    from hetrun.loader.hub.stores import available

    return is_slip(word, available(), begun=before_one_word)


def looks_like_model(word: str, rest: Sequence[str] = ()) -> bool:
    """Whether a word can hardly be anything but a model's name, wherever that model may be."""
    if word.lower().endswith(ENDINGS):
        return True
    if not NAME.fullmatch(word) or word.replace(".", "").replace(":", "").isdigit():
        return False
    if OF_A_FAMILY.fullmatch(word) or TAGGED.fullmatch(word):
        return True
    if SIZE.search(word) and re.search(r"[a-z]{2}", word, re.IGNORECASE) and re.search("[-:/]", word):
        return True
    quoted = is_before_quotes((word, *rest))
    if REPOSITORY.fullmatch(word):
        return quoted or not rest
    return (quoted and word in FAMILIES) or (not rest and word in UNMISTAKABLE)


def as_prompt(words: Sequence[str]) -> str:
    """What to do if the first word is no model's name, to be added to why there is no model."""
    prompt = " ".join(words)
    if len(words) == 1:
        return f"if it is your prompt, name a model before it: hetrun run smollm2 {in_quotes(prompt)}"
    said = "if it is part of the prompt, put the whole prompt in quotes"
    if len(prompt) > LONGEST_SHOWN or not prompt.isprintable():
        return said
    return f"{said}: hetrun run {in_quotes(prompt)}"


def in_quotes(text: str) -> str:
    """A text as a shell takes it for one word; in the quotes that people use, where they do."""
    if text == shlex.quote(text):
        return text
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'
