"""A text that both sides read and write: which experts of a mixture a token chooses depends on the text.

Prompts are stretches of the text, and what follows a stretch is its answer, whatever a model would say. Each
round begins elsewhere, so that nothing is answered from a cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from hetrun.api.model_path import model_path
from hetrun.config import Settings
from hetrun.engine.factory import open_tokenizer
from hetrun.errors import OptionError, UserError
from hetrun.loader.open_model import open_model
from hetrun.system.files import read_text
from hetrun.tools.bench.cases import BenchCase, Passage, Tokens

MOST = 64 << 20  # bytes of a text
GOLDEN = (5**0.5 - 1) / 2  # multiples of it, without their whole parts, lie far from each other


@dataclass(frozen=True, slots=True)
class TextOrigin:
    """Which text it was."""

    name: str
    sha256: str  # of the file's bytes
    tokens: int  # of all of it

    def to_json(self) -> Mapping[str, object]:
        """For `bench -o json`."""
        return asdict(self)

    @property
    def told(self) -> str:
        """In a line for people."""
        return (
            f"text: {self.name}, {self.tokens} tokens (sha256 {self.sha256[:12]}); prompts and answers are "
            "its consecutive tokens, another stretch in each round, the same on both sides"
        )


@dataclass(frozen=True, slots=True)
class BenchText:
    """A text as the model's tokenizer has it."""

    about: TextOrigin
    ids: Tokens

    def check(self, case: BenchCase) -> None:
        """Refuse a case that is longer than the text."""
        if len(self.ids) < case.context:
            raise OptionError(
                f"{case.name} needs a text of {case.context} tokens, a prompt and its answer, and "
                f"{self.about.name} has {len(self.ids)}; give a longer one with --text, or measure less"
            )

    def passage(self, case: BenchCase, seed: int) -> Passage:
        """What the sequences of a case read and write in the round of that number.

        Where it begins does not depend on how much is written: a side that writes less begins at the same
        place. Sequences, rounds and prompts of other lengths begin at places of their own.
        """
        more = case.batch * (1 + case.prompt) if case.batch > 1 else 0  # those that begin early go on
        length = case.prompt + (1 + case.tokens + more if case.kind == "decode" else 0)
        phase = crc32(f"{case.kind} {case.prompt} {case.batch}".encode()) / 2**32
        numbers = seed * case.batch + np.arange(case.batch)
        begins = ((phase + numbers * GOLDEN) % 1 * len(self.ids)).astype(np.int64)
        # Behind the end the text begins again.
        rows = self.ids[(begins[:, None] + np.arange(length)) % len(self.ids)]
        return Passage(rows[:, : case.prompt].copy(), rows[:, case.prompt :].copy())


def passage_of(text: BenchText | None, case: BenchCase, seed: int) -> Passage | None:
    """That of a text; None: there is none, and tokens are random."""
    return None if text is None else text.passage(case, seed)


def open_text(settings: Settings, path: Path | None) -> BenchText | None:
    """The text of a file, by the tokenizer of the model of these settings; None: none was asked for. It makes
    native calls: only where no engine runs."""
    if path is None:
        return None
    try:
        text = read_text(path, MOST)
    except ValueError as error:
        raise UserError(f"{path}: {error}; give a text file with --text") from None
    source = open_model(model_path(settings))
    tokenizer = open_tokenizer(source)
    if tokenizer is None:
        raise UserError(f"{source.path} has no tokenizer, so --text cannot be measured with it")
    with closing(tokenizer):
        ids = np.array(tokenizer.encode_plain(text), np.int32)
    about = TextOrigin(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), len(ids))
    return BenchText(about, ids)
