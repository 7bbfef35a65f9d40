"""What a tokenizer.json asks the library `tokenizers` to do to a text: looked at before it is done.

The library trusts the file: a few short rules may turn a letter into gigabytes, or try every way of reading a
text before they give up. What those in use ask for is far from the limits here.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from typing import NoReturn

from hetrun.errors import ModelFileError
from hetrun.loader.formats import precompiled_charsmap
from hetrun.loader.formats.bounded_reader import DAMAGED
from hetrun.loader.formats.json_file import once, parse_object
from hetrun.loader.formats.regex_safety import objection

MAX_GROWTH = 256  # times longer; compatibility forms make 11 of one byte, a wide stand-in for spaces 3
MAX_ADDED = 64 << 20  # bytes of all added tokens, as they are looked for
MAX_PREPENDED = 256
MAX_STEPS = 64
MAX_TEMPLATE = 64

# By how much the forms of Unicode can make a text longer, in UTF-8. The form of a form is hardly longer than
# it, and so are the tables in use, which hold such forms.
_FORMS = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "BertNormalizer": 6}
_OTHERS = {"ByteLevel": 2, "Strip": 1, "StripAccents": 1, "Nmt": 1, "Sequence": 1}
_UNKNOWN = 11

_LATER_ESCAPE = re.compile(rb"\\u00[67]")  # a letter of ASCII, which needs no escape
_VALUE = re.compile(rb'"normalizer"\s*:\s*([^\s])')
_COMMA = re.compile(r"[ \t\r\n]*[,{][ \t\r\n]*")
_COLON = re.compile(r"[ \t\r\n]*:[ \t\r\n]*")

Step = Mapping[str, object]


def check_file(path: str, raw: bytes) -> None:
    """Refuse a file whose normalizer would fill the memory already with the tokens that are added to it."""
    sections = _head(raw)
    if sections is None:
        sections = _whole(path, raw)
    grown = growth(path, sections.get("normalizer"))
    added = sections.get("added_tokens")
    contents = [t.get("content") for t in added if isinstance(t, dict)] if isinstance(added, list) else []
    if sum(len(c) for c in contents if isinstance(c, str)) * grown > MAX_ADDED:
        _fail(path, "added_tokens", f"would be more than {MAX_ADDED} bytes in the form that is looked for")


def growth(path: str, normalizer: object) -> int:
    """How many times longer a text may become."""
    form, product, prepended, tables = 1, 1, 0, 0
    for place, step in _steps(path, "normalizer", normalizer):
        kind, text = str(step.get("type")), step.get("prepend")
        if kind == "Precompiled":
            form, tables = max(form, _table(path, place, step.get("precompiled_charsmap"))), tables + 1
        else:
            form = max(form, _FORMS.get(kind, 1))
            product *= 1 if kind in _FORMS else _times_longer(path, place, kind, step)
        extra = len(text.encode("utf-8", "replace")) if isinstance(text, str) else 0
        prepended = prepended * product + extra
        if product * form > MAX_GROWTH or prepended > MAX_PREPENDED or tables > 1:
            _fail(path, place, f"makes a text more than {MAX_GROWTH} times longer, with the steps before it")
    return product * form


def check_pre_tokenizer(path: str, pre_tokenizer: object) -> None:
    """Refuse ways of cutting that may not come to an end."""
    for place, step in _steps(path, "pre_tokenizer", pre_tokenizer):
        _pattern(path, place, step)
        if step.get("type") == "FixedLength" and step.get("length") == 0:
            _fail(path, place, "cuts a text into pieces of zero length")


def check_post_processor(path: str, post_processor: object) -> None:
    """Refuse what adds to a text without end."""
    for place, step in _steps(path, "post_processor", post_processor):
        if step.get("type") != "TemplateProcessing":
            continue
        single, special = step.get("single"), step.get("special_tokens")
        parts = single if isinstance(single, list) else []
        texts = sum(isinstance(part, dict) and "Sequence" in part for part in parts)
        tokens = special.values() if isinstance(special, dict) else ()
        ids = (t.get("ids") for t in tokens if isinstance(t, dict))
        if texts > 1 or len(parts) > MAX_TEMPLATE or any(isinstance(i, list) and len(i) > 8 for i in ids):
            _fail(path, place, "has a template that repeats the text, or adds more than a few tokens to it")


def _fail(path: str, place: str, reason: str) -> NoReturn:
    raise ModelFileError(path, f"{place} {reason}; it is not one that a model was trained with")


def _head(raw: bytes) -> dict[str, object] | None:
    """The sections before the vocabulary, which comes last and is large; None where it may be otherwise."""
    at = raw.find(b'"model"')
    later = (found[1] for found in _VALUE.finditer(raw, max(at, 0)))
    if at < 0 or any(not b.isdigit() and b != b"-" for b in later) or _LATER_ESCAPE.search(raw):
        return None
    out: dict[str, object] = {}
    read, pos = json.JSONDecoder().raw_decode, 0
    try:
        text = raw[:at].decode()
        while comma := _COMMA.match(text, pos):
            if comma.end() == len(text):
                return out
            key, pos = read(text, comma.end())
            if not isinstance(key, str) or not (colon := _COLON.match(text, pos)) or key in out:
                return None
            out[key], pos = read(text, colon.end())
    except (ValueError, RecursionError):
        pass
    return None


def _whole(path: str, raw: bytes) -> dict[str, object]:
    try:
        return parse_object(raw, once)
    except ValueError as e:
        raise ModelFileError(path, f"is not a tokenizer that can be read: {e}; {DAMAGED}") from e


def _steps(path: str, place: str, state: object) -> Iterator[tuple[str, Step]]:
    """Every step and where it stands."""
    waiting, count = [(place, state)], 0
    while waiting:
        place, state = waiting.pop()
        if not isinstance(state, dict):
            continue  # there is none, or the library refuses it
        count += 1
        if count > MAX_STEPS:
            _fail(path, place, f"is one of more than {MAX_STEPS} steps")
        yield place, state
        for name in ("normalizers", "pretokenizers", "processors", "decoders"):
            inner = state.get(name)
            if isinstance(inner, list):
                waiting += [(f"{place}.{name}[{i}]", step) for i, step in enumerate(inner)][::-1]


def _times_longer(path: str, place: str, kind: str, step: Step) -> int:
    if kind == "Replace":
        pattern, content = _pattern(path, place, step), step.get("content")
        new = len(content.encode("utf-8", "replace")) if isinstance(content, str) else 1
        if pattern is None:
            return 1 + new  # an expression may match nothing, before each letter
        return max(1, -(-new // max(1, len(pattern.encode("utf-8", "replace")))))
    return 1 if kind == "Prepend" else _OTHERS.get(kind, _UNKNOWN)


def _pattern(path: str, place: str, step: Step) -> str | None:
    """The text that a step looks for; None for an expression, which is checked."""
    pattern = step.get("pattern")
    if not isinstance(pattern, dict):
        return None
    if isinstance(expression := pattern.get("Regex"), str) and (why := objection(expression)) is not None:
        _fail(path, f"{place}.pattern", why)
    text = pattern.get("String")
    return text if isinstance(text, str) else None


def _table(path: str, place: str, text: object) -> int:
    try:
        raw = base64.b64decode(text if isinstance(text, str) else "")
    except (binascii.Error, ValueError):
        return 1  # the library refuses it
    if raw and (why := precompiled_charsmap.objection(raw)) is not None:
        _fail(path, f"{place}.precompiled_charsmap", f"is damaged: {why}")
    return precompiled_charsmap.longest_text(raw) if raw else 1
