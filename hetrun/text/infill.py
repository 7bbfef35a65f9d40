"""The prompt with which a model fills in the middle of a text.

    [repo]myproject
    [file]FILENAME
    its text
    ...
    [file]filename
    [prefix]text before the gap[suffix]text behind it[middle]

Everything up to the last [file] line is left out for a text that belongs to no repository. The order, the
names and how much of each part is taken are llama.cpp's, so that models and editors find what they know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetrun.client.queries import FillPrompt, Literally
from hetrun.errors import OptionError
from hetrun.loader.formats.fim_tokens import FimTokens

BATCH = 2048  # tokens of both texts: three quarters for the one before the gap, as llama.cpp shares them
ROOM = 128  # tokens of an answer of no particular length
MARKS = 4  # tokens besides: what begins a prompt, and what begins its three parts
FAR = 1 << 16  # characters from the gap: what is farther away is cut off before it is tokenised
STEP = 256  # tokens that a text loses at once
REPOSITORY, FILE = "myproject\n", "filename\n"  # as no request names them
SNIPPET = "\n\n--- snippet ---\n\n"  # between files, for models without a token for that

Encode = Callable[[str], list[int]]


def marks(fim: FimTokens) -> tuple[int, int, int]:
    """The tokens for prefix, suffix and middle; an error if the model lacks one."""
    if fim.prefix is not None and fim.suffix is not None and fim.middle is not None:
        return fim.prefix, fim.suffix, fim.middle
    lacks = " and ".join(fim.missing) if len(fim.missing) < 3 else "prefix, suffix and middle"
    raise OptionError(
        f"this model cannot fill in the middle of a text: its vocabulary has no token for the {lacks}; use "
        "one that was trained for that, such as Qwen2.5-Coder"
    )


def fill_prompt(
    asked: FillPrompt, fim: FimTokens, bos: int | None, context: int, plain: Encode, special: Encode
) -> list[int]:
    """The tokens of a prompt. `bos`: what begins it, where the model wants that; `plain` encodes a text
    literally, `special` also its special tokens."""
    prefix, suffix, middle = marks(fim)
    room = min(asked.max_tokens or ROOM, context // 2)
    batch = max(min(BATCH, context - room - MARKS), 0)
    begun = special(asked.prompt) if asked.prompt else []
    before = last(literal(asked.prefix[-FAR:], plain), 3 * (batch // 4))
    behind = literal(asked.suffix[:FAR], plain)[: max(batch // 4 - 2 - len(begun), 0)]
    files = repository(asked, fim, plain) if asked.repository else []
    return [
        *last(files, max(context - batch - 2 * room - MARKS, 0)),
        *([] if bos is None else [bos]),
        *(prefix, *before, *begun),
        *(suffix, *behind),
        middle,
    ]


def repository(asked: FillPrompt, fim: FimTokens, plain: Encode) -> list[int]:
    """The other files, and the name of the one with the gap."""
    tokens = [] if fim.repository is None else [fim.repository, *plain(REPOSITORY)]
    for snippet in asked.extra:
        if fim.file is None:
            tokens += plain(SNIPPET)
        else:
            tokens += [fim.file, *plain(f"{snippet.filename}\n")]
        tokens += plain(snippet.text)
    return tokens if fim.file is None else [*tokens, fim.file, *plain(FILE)]


def literal(given: Literally, plain: Encode) -> list[int]:
    """The tokens of a text, or of texts and tokens in turn."""
    if isinstance(given, str):
        return plain(given) if given else []
    return [token for part in given for token in ([part] if isinstance(part, int) else plain(part))]


def last(tokens: Sequence[int], most: int) -> Sequence[int]:
    """The end of a text that is too long.

    It loses its beginning in steps: while the user writes at its end, it begins at the same place for a
    while, and is found in the prefix cache.
    """
    if len(tokens) <= most:
        return tokens
    step = max(min(STEP, most // 4), 1)
    return tokens[-(-(len(tokens) - most) // step) * step :]
