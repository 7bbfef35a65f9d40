"""Names of models on Hugging Face's hub: hf:user/repo, hf:user/repo:Q4_K_M, and addresses of pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from hetrun.errors import OptionError, printable

PREFIX = "hf:"
# What people copy: a page's address, with one slash where a program took it for a path.
PAGE = re.compile(r"(?:https?:/{1,2})?(?:www\.)?(?:huggingface\.co|hf\.co)/(.+)")
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
REPOSITORY = re.compile(
    rf"({_WORD}/{_WORD})(?:@(?P<at>[A-Za-z0-9][A-Za-z0-9._/-]*))?(?::(?P<quant>[^:\s]+))?"
)
_OF_A_PAGE = re.compile(
    rf"({_WORD}/{_WORD})(?:/(?:resolve|blob|tree)/(?P<at>[^/]+)(?:/(?P<file>[^?#]+))?)?/?(?:[?#].*)?"
)


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """A model of a repository."""

    repo: str
    which: str = ""  # a type such as Q4_K_M, or a file's name; "": the usual one
    revision: str = "main"

    @property
    def name(self) -> str:
        """As it may be asked for again."""
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"{PREFIX}{self.repo}{at}" + (f":{self.which}" if self.which else "")


def is_on_the_hub(name: str) -> bool:
    """Whether a name is one of the hub's, well formed or not."""
    return name.startswith(PREFIX) or PAGE.fullmatch(name) is not None


def wanted(name: str) -> RepositoryModel:
    """What a name asks for; the prefix may be left out. OptionError: it is no such name."""
    text = name.removeprefix(PREFIX)
    page = PAGE.fullmatch(text)
    if page and (found := _OF_A_PAGE.fullmatch(page[1])):
        return RepositoryModel(found[1], unquote(found["file"] or ""), unquote(found["at"] or "main"))
    found = REPOSITORY.fullmatch(page[1] if page else text)
    if found is None or ".." in text:
        raise OptionError(
            f"{printable(name)} is not a valid name on the hub: it must be like hf:user/repo:Q4_K_M"
        )
    return RepositoryModel(found[1], found["quant"] or "", found["at"] or "main")
