"""How the values of options are read, whether they come as Python values, from TOML or as text.

Each parser takes the value as given and where it was given, and returns the value in its own type or raises
an OptionError that says what was given, where, and what is allowed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from reprlib import repr as short
from typing import Any, cast

from hetrun.errors import OptionError
from hetrun.system.files import is_template
from hetrun.system.units import counted

LARGEST = 2**63 - 1
UNITS = {"": 1, "b": 1} | {
    letter + ending: base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
MEANT = {"context": "ctx"}  # words that begin another name as well
MOST_NAMES = 320  # characters of a list of names
SPECULATION = ("off", "lookup", "mtp", "auto")
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def unknown(what: str, name: str, known: Iterable[str], prefix: str = "") -> str:
    """The sentence for a name that does not exist; `prefix` is what all names begin with."""
    from difflib import get_close_matches  # on use: 4 ms

    tails = [other.removeprefix(prefix) for other in known]
    tail = name.removeprefix(prefix)
    meant = [
        ours for word, ours in MEANT.items() if len(tail) > 3 and word.startswith(tail) and ours in tails
    ]
    longer = [other for other in tails if tail and other.startswith(tail)]
    close = meant or longer or get_close_matches(tail, tails, n=1)
    if close:
        return f"unknown {what} {name}: did you mean {prefix}{close[0]}?"
    names = [prefix + other for other in tails]
    lengths = accumulate(len(found) + 2 for found in names)
    shown = sum(length <= MOST_NAMES for length in lengths)
    more = f" and {len(names) - shown} more" if shown < len(names) else ""
    return f"unknown {what} {name}: known are {', '.join(names[:shown])}{more}"


def refused(where: str, value: object, said: str) -> OptionError:
    return OptionError(f"{where} must be {said}, not {short(value)}")


def text(value: object, where: str) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value:
        raise refused(where, value, "a text")
    return value


def path(value: object, where: str) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise refused(where, value, "the path of a file")
    return Path(os.fsdecode(value)).expanduser()


def template(value: object, where: str) -> str:
    """A chat template: the path of a file, a name, or its text, which holds a block of Jinja."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise refused(where, value, "the path of a file, a name, or a Jinja template")
    found = os.fsdecode(value)
    return found if is_template(found) else os.path.expanduser(found)


def json_object(value: object, where: str) -> dict[str, Any]:
    """A JSON object, as text or as a table of TOML."""
    import json  # on use: few set one

    said = 'a JSON object such as {"enable_thinking": false}'
    try:
        found = json.loads(value) if isinstance(value, str) else value
        if isinstance(found, Mapping):
            return cast("dict[str, Any]", json.loads(json.dumps(dict(found), allow_nan=False)))
    except (ValueError, TypeError, RecursionError):
        pass
    raise refused(where, value, said)


def host(value: object, where: str) -> str:
    """One address to listen on."""
    found = text(value, where)
    if "," in found or " " in found.strip():
        raise refused(where, value, "one address: a server listens on one, or on all of them (0.0.0.0 or ::)")
    return found


def boolean(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else None
    if word not in TRUE + FALSE:
        raise refused(where, value, "true or false (also yes/no, on/off, 1/0)")
    return word in TRUE


def integer(least: int, most: int = LARGEST) -> Callable[[object, str], int]:
    said = f"an integer of {least} or more" if most == LARGEST else f"an integer from {least} to {most}"

    def parse(value: object, where: str) -> int:
        number = value
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", value):
            number = int(value)
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            raise refused(where, value, said)
        return number

    return parse


def number(least: float) -> Callable[[object, str], float]:
    def parse(value: object, where: str) -> float:
        found = math.nan
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            try:
                found = float(value)
            except (ValueError, OverflowError):
                found = math.nan
        if not least <= found < math.inf:
            raise refused(where, value, f"a number of {least:g} or more")
        return found

    return parse


def size(least: int) -> Callable[[object, str], int]:
    def parse(value: object, where: str) -> int:
        found = parse_size(value, where)
        if found < least:
            raise refused(where, value, f"at least {least} byte")
        return found

    return parse


def memory(value: object, where: str) -> int:
    """A size, or a share of the machine's memory: 50%."""
    match = SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        found = size(1)(value, where)
        # A number that is no text may have been read from one with a unit, as in a worker's options.
        if found < 1 << 20 and isinstance(value, str) and value.strip().isdecimal():
            meant = f"did you mean {found}MiB?" if found < 100_000 else "give a unit, as in 500MiB or 2GiB"
            raise OptionError(f"{where}: {found} is {counted(found, 'byte')}; {meant}")
        return found
    if not 0 < float(match[1]) <= 100:
        raise refused(where, value, "a size such as 2GiB, or a share of the machine's memory up to 100%")
    from hetrun.system.memory_info import machine_memory

    return max(1, int(machine_memory() * float(match[1]) / 100))


def answer_length(value: object, where: str) -> int | None:
    """A number of tokens; -1 is none, as llama.cpp and Ollama have it."""
    try:
        found = integer(-1)(value, where)
    except OptionError:
        raise refused(where, value, ANSWER_LENGTH) from None
    return None if found == -1 else found


ANSWER_LENGTH = "an integer of 1 or more, or -1 for no limit (0 only with prompt_logprobs)"
SHARE = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%\s*", re.ASCII)
SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([a-z]{0,3})\s*", re.ASCII)


def parse_size(value: object, where: str = "a size") -> int:
    """Bytes: 2GiB and 2G are 2 * 1024**3, 2GB is 2 * 1000**3, 1024 is 1024."""
    found: Decimal | int = -1
    if isinstance(value, int) and not isinstance(value, bool):
        found = value
    match = SIZE.fullmatch(value.lower()) if isinstance(value, str) else None
    if match and match[2] in UNITS:
        found = Decimal(match[1]) * UNITS[match[2]]
        if UNITS[match[2]] == 1 and found != int(found):
            found = -1  # half a byte is a mistake; 1.3G, which is no whole number of bytes either, is not
    if not 0 <= found <= LARGEST:
        raise refused(where, value, "a size such as 2GiB, 1.5G, 512MiB, 2GB or a number of bytes")
    return int(found)


def names(value: object, where: str) -> tuple[str, ...]:
    """Several names: a list, or one text with commas."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(
        isinstance(name, str) and name.strip() for name in found
    ):
        raise refused(where, value, "one or more names, separated by commas")
    return tuple(dict.fromkeys(name.strip() for name in found))


THIS_MACHINE = "localhost"  # as an origin: pages on any port of this machine
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", re.ASCII | re.IGNORECASE)


def origins(value: object, where: str) -> tuple[str, ...]:
    """Web pages as browsers name them: a scheme, a host and a port; or localhost, or * for all."""
    found = names(value, where)
    for origin in found:
        if origin not in ("*", THIS_MACHINE) and not ORIGIN.fullmatch(origin.rstrip("/")):
            raise refused(where, origin, "a scheme and a host, as https://example.com:3000, localhost, or *")
    return found


@dataclass(frozen=True, slots=True)
class WordChoice:
    """One of several words."""

    allowed: tuple[str, ...]
    group: str = ""  # or of the names that packages registered in this group

    @property
    def words(self) -> tuple[str, ...]:
        """All that are taken here."""
        if not self.group:
            return self.allowed
        from hetrun.system.entry_points import points  # on use: looking through packages takes milliseconds

        return (*self.allowed, *points(self.group))

    def __call__(self, value: object, where: str) -> str:
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in self.allowed and word not in self.words:
            raise refused(where, value, " or ".join(self.words))
        return word


def choice(*allowed: str, group: str = "") -> WordChoice:
    """One of these words, or of the names in a group."""
    return WordChoice(allowed, group)


def speculation(value: object, where: str) -> str:
    """How tokens are guessed; after `draft:` stands the path of a model."""
    word = value.strip() if isinstance(value, str) else ""
    kind, _, model = word.partition(":")
    if kind.lower() == "draft" and model:
        return f"draft:{model}"
    if word.lower() not in SPECULATION:
        raise refused(where, value, f"{', '.join(SPECULATION)} or draft:MODEL")
    return word.lower()
