"""A chat template: its text, and why this one is in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hetrun.errors import TemplateError
from hetrun.system.files import is_template, read_text
from hetrun.system.terminal_text import visible

NO_TEMPLATE = "ChatML, because the model has none"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The names that Hugging Face gives to the templates of a model that has several.
DEFAULT = "default"
FOR_TOOLS = "tool_use"

MOST_SOURCE = 1 << 17  # characters; the longest templates in use have some 20,000


NO_CHAT = ("rerank",)  # by llama.cpp's converter: the prompt of a reranker


class Templates(Protocol):
    """What a model says of its templates."""

    @property
    def path(self) -> str:
        """The model."""
        ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The templates it was trained with, by name."""
        ...

    @property
    def chat_template_place(self) -> str:
        """Where they lie."""
        ...


@dataclass(frozen=True)
class ChatTemplate:
    """A template and where it comes from; `for_tools` is used instead where tools are given."""

    source: str
    origin: str
    for_tools: ChatTemplate | None = None
    path: str = ""  # of the model, if it is the model's own

    @classmethod
    def of_model(cls, model: Templates) -> ChatTemplate:
        """The model's own; a model that has none gets ChatML, and `origin` says so."""
        named = {name: text for name, text in model.chat_templates.items() if name not in NO_CHAT}
        if not named:
            return cls(CHATML, NO_TEMPLATE)
        name = DEFAULT if DEFAULT in named else next(iter(named))
        own = f"the model's own ({model.chat_template_place})"
        others = ", ".join(visible(other[:40]) for other in named if other != name)
        origin = own
        if name != DEFAULT:
            origin += f", named {visible(name[:40])}, because it has none named {DEFAULT}"
        elif others:
            origin += f", named {DEFAULT}; it also has {others}"
        if FOR_TOOLS not in named or name == FOR_TOOLS:
            return cls(named[name], origin, path=model.path)
        why = f"{own}, named {FOR_TOOLS}, because tools are given"
        tools = cls(named[FOR_TOOLS], why, path=model.path)
        return cls(named[name], f"{origin} ({FOR_TOOLS} is used where tools are given)", tools, model.path)

    @classmethod
    def named(cls, given: str | Path) -> ChatTemplate:
        """What --chat-template says: a template itself, a file, or the name of a template that hetrun has."""
        name = str(given)
        if is_template(name):
            return cls(name, "--chat-template, given as text")
        if not Path(given).is_file() and name in (known := built_in()):
            return cls(known[name], f"--chat-template {name}, which is built into hetrun")
        return cls.from_file(given)

    @classmethod
    def from_file(cls, path: str | Path) -> ChatTemplate:
        """The template in a file."""
        try:
            return cls(read_text(path, 4 * MOST_SOURCE), f"--chat-template {path}")
        except ValueError as error:
            from difflib import get_close_matches  # on use: 4 ms

            close = get_close_matches(str(path), built_in(), n=1) or ["chatml"]
            raise TemplateError(
                f"--chat-template {path}: {error}; give a file with a Jinja template, or a name such as "
                f"{close[0]}"
            ) from None


def built_in() -> Mapping[str, str]:
    """Templates by name."""
    from hetrun.text.chat.named_templates import named  # on use: models have their own

    return {"chatml": CHATML, **named()}
